# SPDX-License-Identifier: Apache-2.0
"""The hosts of a fleet: daemons and workers with separate folders, which reach everything through proxies."""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.daemon.process import PENSTOCK, DaemonProcess
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Proxy, Server
from tools.servers.child import end, spawn
from tools.servers.ports import free_port
from tools.zookeeper import Ensemble

INSTANCE = "shop"
# Short, so that members fail over within a run. Not shorter, because a busy machine may pause a process for
# two seconds.
SESSION_SECONDS = 4.0
# Enough space for the log of a long run.
DISK_BYTES = 1 << 30


def canal_node(root: str) -> str:
    """Return the node that has Canal's layout, next to the fleet's node."""
    return f"{root}-canal"


class Network:
    """The connections of one host, all routed through proxies. As a context manager, it keeps them open
    inside the block.
    """

    def __init__(self, ensemble: Ensemble, root: str, servers: Sequence[Server] = ()) -> None:
        self._nodes = [Proxy(node.port) for node in ensemble.nodes]
        self._sources = [(server, Proxy(server.port)) for server in servers]
        self._served: list[Proxy] = []
        self._root = root
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for proxy in self._proxies(""):
            self._stack.enter_context(proxy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def coordination(self) -> str:
        """The URL of the coordination store, from this host."""
        return f"zookeeper://{self.hosts}/{self._root}"

    @property
    def hosts(self) -> str:
        """The addresses of the ensemble, from this host."""
        return ",".join(f"127.0.0.1:{proxy.port}" for proxy in self._nodes)

    @property
    def canal_node(self) -> str:
        """The node that has Canal's layout."""
        return canal_node(self._root)

    @property
    def sources(self) -> list[str]:
        """The URLs of the captured servers, from this host."""
        return [proxy.through(server.url()) for server, proxy in self._sources]

    def serve(self, port: int) -> str:
        """Return the address at which the other hosts reach a port of this host."""
        proxy = self._stack.enter_context(Proxy(port))
        self._served.append(proxy)
        return f"127.0.0.1:{proxy.port}"

    def cut_off(self, path: str = "") -> None:
        """Pass nothing in either direction on one path (by default on all), without closing connections."""
        for proxy in self._proxies(path):
            proxy.swallow()

    def restore(self) -> None:
        """Pass traffic again, including the bytes sent while the path was cut."""
        for proxy in self._proxies(""):
            proxy.resume()

    def _proxies(self, path: str) -> list[Proxy]:
        """Return the proxies of a path: `store`, `servers` or `clients`; "" means all of them."""
        paths = {
            "store": self._nodes,
            "servers": [proxy for _, proxy in self._sources],
            "clients": self._served,
        }
        return [proxy for name, proxies in paths.items() if path in ("", name) for proxy in proxies]


class Member:
    """A daemon of the fleet on a separate host. As a context manager, it runs inside the block."""

    def __init__(
        self,
        name: str,
        folder: Path,
        ensemble: Ensemble,
        root: str,
        servers: Sequence[Server],
        kind: Mapping[str, str],
    ) -> None:
        self.name = name
        self.network = Network(ensemble, root, servers)
        self._kind = kind
        self._folder = folder
        self._stack = ExitStack()
        self._filler = folder / "disk" / "filler"
        self.address = ""
        self.has_disk = False
        folder.mkdir()
        self.daemon = DaemonProcess(folder, {})

    def __enter__(self) -> Self:
        self._stack.enter_context(self.network)
        self._mount_disk()
        self.address = self.network.serve(self.daemon.port)
        canal = free_port()
        canal_top = f"zookeeper://{self.network.hosts}/{self.network.canal_node}"
        first, *others = self.network.sources
        self.daemon.settings = {
            "coordination": self.network.coordination,
            "listen": {
                "canal": f"127.0.0.1:{canal}",
                "canal_cluster": canal_top,
                "canal_address": self.network.serve(canal),
            },
            "processes": self._kind["processes"],
            "fleet": {
                "member": self.name,
                "zone": f"room-{self.name}",
                "session": self._kind.get("session", SESSION_SECONDS),
                "address": self.address,
            },
            "log": {
                "folder": str(self.log_folder.parent),
                "copies": 2,
                "serve": self._kind["serve"],
                "segment_bytes": "1MiB",
                "free_bytes_min": "4MiB",
                "fsync_seconds": "100ms",
            },
            "instances": {
                INSTANCE: {"source": first, "servers": others, "fail_over_after": "2s", "semi_sync": True}
            },
        }
        self._stack.enter_context(self.daemon)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def log_folder(self) -> Path:
        """The folder of the instance's log."""
        return self._folder / "disk" / "log" / INSTANCE

    def signal(self, number: int) -> None:
        """Send the daemon a signal."""
        os.kill(self.daemon.pid, number)

    def lose(self) -> None:
        """Kill the daemon and its processes, and delete their stored files."""
        self._kill()
        if self.log_folder.exists():
            shutil.rmtree(self.log_folder.parent)

    def tear(self) -> None:
        """Kill the daemon and its processes, and remove the newest part of its durable log."""
        self._kill()
        newest = max(self.log_folder.rglob("*.binlog"), default=None)
        if newest is not None:
            newest.unlink()

    def _kill(self) -> None:
        processes = children(self.daemon.pid)
        self.daemon.kill()
        # Capture processes end by themselves shortly after the daemon, but write until then.
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))

    def fill_disk(self) -> None:
        """Leave no free byte on the small disk of the log."""
        # A buffered file would try to write the rest again when it is closed.
        with self._filler.open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(1 << 16))

    def free_disk(self) -> None:
        """Free the space that `fill_disk` has used."""
        self._filler.unlink()

    def _mount_disk(self) -> None:
        """Put the log on a separate disk, if this process has the privilege."""
        disk = self._folder / "disk"
        disk.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
        self.has_disk = subprocess.run(words, check=False, capture_output=True).returncode == 0
        if self.has_disk:
            self._stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)

    def fleet_row(self) -> dict[str, Any]:
        """Return the state of the instance in the fleet, as this member sees it."""
        rows: list[dict[str, Any]] = self.daemon.get("/v1/fleet")["instances"]
        return next(row for row in rows if row["instance"] == INSTANCE)


class Worker:
    """A worker of the fleet on a separate host. As a context manager, it runs inside the block."""

    def __init__(self, name: str, folder: Path, ensemble: Ensemble, root: str) -> None:
        self.name = name
        self.network = Network(ensemble, root)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    def __enter__(self) -> Self:
        self.network.__enter__()
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.network.__exit__(kind, error, trace)

    def start(self) -> Self:
        """Start the worker."""
        words = ["worker", "--name", self.name, "--folder", str(self._folder / "jobs")]
        words += ["--session", str(SESSION_SECONDS), "--coordination", self.network.coordination]
        self._process = spawn([*PENSTOCK, *words], self._folder / "worker.output")
        return self

    def stop(self) -> None:
        """Stop the worker cleanly."""
        assert self._process is not None
        assert end(self._process, WAIT_SECONDS_MAX), "the worker does not end"

    def kill(self) -> None:
        """Kill the worker as in a crash. Its jobs die with it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_jobs(self) -> None:
        """Kill the processes of its jobs as in a crash."""
        assert self._process is not None
        for pid in children(self._process.pid):
            # The process may have ended by itself.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the worker, but not to its jobs."""
        assert self._process is not None
        self._process.send_signal(number)

    def said(self) -> str:
        """Return the output of the worker and its jobs."""
        files = [self._folder / "worker.output", *sorted((self._folder / "jobs").rglob("output.log*"))]
        return "\n".join(file.read_text(errors="replace") for file in files if file.exists())


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def freeze(host: Member | Worker) -> None:
    """Stop a process without ending it."""
    host.signal(signal.SIGSTOP)


def thaw(host: Member | Worker) -> None:
    """Let a stopped process run again."""
    host.signal(signal.SIGCONT)


def cut_off(path: str, host: Member | Worker) -> None:
    """Cut a path of a host's `Network`; "" cuts all paths."""
    host.network.cut_off(path)


def restore(host: Member | Worker) -> None:
    """Restore the network of a host."""
    host.network.restore()
