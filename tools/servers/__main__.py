# SPDX-License-Identifier: Apache-2.0
"""Private database servers, started by hand.

    python -m tools.servers install [FLAVOR ...]
    python -m tools.servers start FLAVOR [--port PORT] [--dir DIR] [--tls] [--option NAME=VALUE ...]
    python -m tools.servers stop DIR

`start` runs in the foreground until Ctrl-C or `stop`; with `--dir`, the data are kept for the next start.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from tools.servers import FLAVORS, PartMissing, Server, ServerFailed, install
from tools.servers.server import STOP_SECONDS_MAX


def main(words: list[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 success, 1 failed, 3 the machine is missing a part."""
    arguments = _parser().parse_args(words)
    try:
        if arguments.verb == "install":
            return _install(arguments.flavors or list(FLAVORS))
        if arguments.verb == "start":
            return _start(arguments)
        return _stop(arguments.directory)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    except PartMissing as error:
        print(error, file=sys.stderr)
        return 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.servers", description="Private database servers.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    installing = verbs.add_parser("install", help="fetch what the flavors need, where it is missing")
    installing.add_argument(
        "flavors", nargs="*", metavar="FLAVOR", help=f"of {', '.join((*FLAVORS, 'host'))}"
    )
    starting = verbs.add_parser("start", help="run a server in the foreground")
    starting.add_argument("flavor", choices=(*FLAVORS, "host"))
    starting.add_argument("--port", type=int, help="TCP port on 127.0.0.1 (default: a free one)")
    starting.add_argument(
        "--dir", type=Path, dest="directory", help="keep its files here (default: temporary)"
    )
    starting.add_argument("--tls", action="store_true", help="give it a certificate of a known authority")
    starting.add_argument(
        "--option", action="append", default=[], metavar="NAME[=VALUE]", help="of the server"
    )
    stopping = verbs.add_parser("stop", help="stop the server that runs in a directory")
    stopping.add_argument("directory", type=Path)
    return parser


def _install(flavors: list[str]) -> int:
    for flavor in flavors:
        started = time.monotonic()
        installation = install(flavor)
        print(f"{flavor}: {installation.version} in {installation.root} ({time.monotonic() - started:.1f} s)")
    return 0


def _start(arguments: argparse.Namespace) -> int:
    options = {
        name: value if has_value else None for name, has_value, value in map(_option, arguments.option)
    }
    directory = arguments.directory.resolve() if arguments.directory else None
    server = Server(arguments.flavor, options, port=arguments.port, directory=directory, tls=arguments.tls)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with server:
            print(f"{server.version} in {server.directory}, pid {server.pid}")
            for user in ("root", "repl"):
                print(f"  {server.url(user)}")
            print(
                f"  {' '.join([*server.program('mysql'), f'--socket={server.socket}', '--user=root'])}",
                flush=True,
            )
            server.wait()
    except KeyboardInterrupt:
        return 0
    return 0


def _option(text: str) -> tuple[str, str, str]:
    return text.partition("=")


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _stop(directory: Path) -> int:
    """Stop the server whose pid file is in a directory, after checking that its process runs there."""
    directory = directory.resolve()
    try:
        pid = int((directory / "pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ValueError):
        raise ServerFailed(f"no server runs in {directory}") from None
    if f"--datadir={directory / 'data'}" not in command.split("\0"):
        raise ServerFailed(f"process {pid} is not the server of {directory}")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            raise ServerFailed(f"process {pid} did not stop within {STOP_SECONDS_MAX} s")
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
