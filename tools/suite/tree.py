# SPDX-License-Identifier: Apache-2.0
"""Run one command, pause its whole process tree at random, and leave no process of it behind.

    python -m tools.suite.tree --output FILE --leaks FILE [--pause-seconds MAX --seed TEXT] COMMAND...

The program exits with the command's status. It writes to the file of leaks the command lines of all processes
that outlived the command. On SIGTERM, which the kernel also sends when the runner dies, it kills the tree and
exits with 143. Orphans of the tree become children of this process (prctl(2) PR_SET_CHILD_SUBREAPER), so a
daemon in its own session is found, paused and ended as well. The command gets a separate temporary folder as
TMPDIR, which is removed at the end.
"""

import argparse
import contextlib
import ctypes
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36

PAUSE_SECONDS_MIN = 0.1
# Pauses are this far apart, so that short tests are hit and long tests make progress.
GAP_SECONDS = (0.1, 10.0)
# Processes that are still shutting down when their command ends, such as a JVM, may take this long.
END_SECONDS_MAX = 20.0
# A process in the middle of a disk access stops after it.
STOP_SECONDS_MAX = 1.0
LEAK_LETTERS_MAX = 200
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


class Terminated(Exception):
    """The runner asked the command to end, or the runner died."""


class CommandTree:
    """A running command and all processes that it started. Create at most one per process."""

    def __init__(self, argv: list[str], output: Path, environment: dict[str, str]) -> None:
        adopt_orphans()
        # Only sigtimedwait fetches these signals, so none can arrive between two statements.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        with output.open("ab") as file:
            self._command = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
            )

    @property
    def status(self) -> int | None:
        """The exit status of the command; None while it runs."""
        return self._command.poll()

    def wait(self, seconds: float) -> None:
        """Return when the command has ended, or after `seconds`. Raises Terminated."""
        deadline = time.monotonic() + seconds
        while self.status is None and (seconds_left := deadline - time.monotonic()) > 0:
            received = signal.sigtimedwait(_SIGNALS, seconds_left)
            if received is not None and received.si_signo != signal.SIGCHLD:
                raise Terminated
            self._reap()

    def pause(self, seconds: float) -> None:
        """Stop every process for a time. Afterwards all processes are resumed, even after an exception.

        A process that a test itself has stopped is left alone, because only the test may resume it.
        """
        seen: set[psutil.Process] = set()
        stopped: list[psutil.Process] = []
        try:
            # A process may have forked just before it was stopped.
            while running := [process for process in self.processes() if process not in seen]:
                for process in running:
                    seen.add(process)
                    if not is_stopped(process):
                        stopped.append(process)
                        send(process, signal.SIGSTOP)
                        wait_until_stopped(process)
            self.wait(seconds)
        finally:
            # Resume children first, because a parent that runs again may stop a child that has not been
            # resumed yet.
            for process in reversed(stopped):
                send(process, signal.SIGCONT)

    def end(self, seconds_max: float = 0.0) -> list[str]:
        """Kill every process; return the command lines of those that still ran after `seconds_max`."""
        deadline = time.monotonic() + seconds_max
        while self.processes() and (seconds_left := deadline - time.monotonic()) > 0:
            signal.sigtimedwait((signal.SIGCHLD,), min(seconds_left, 0.1))
        lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline()) or process.name()
                lines.append(" ".join(words.split())[:LEAK_LETTERS_MAX])
        while processes := self.processes():
            for process in processes:
                send(process, signal.SIGKILL)
            signal.sigtimedwait((signal.SIGCHLD,), 0.1)
        return lines

    def processes(self) -> list[psutil.Process]:
        """Return every process of the tree, parents before their children."""
        self._reap()
        children: list[psutil.Process] = psutil.Process().children(recursive=True)
        return children

    def _reap(self) -> None:
        """Collect the exit statuses of adopted children and of the command."""
        for child in psutil.Process().children():
            if child.pid == self._command.pid:
                self._command.poll()
            else:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def run(
    argv: list[str], output: Path, leaks: Path, end_seconds_max: float, pause_seconds_max: float, seed: str
) -> int:
    """Run a command to its end, and return its exit status. Unless the maximum pause is 0, the command is
    paused at random.

    If SIGTERM or SIGINT arrives first, raises Terminated after the process tree has ended.
    """
    dice = random.Random(seed)
    with scratch_folder() as folder:
        tree = CommandTree(argv, output, os.environ | {"TMPDIR": str(folder)})
        try:
            while tree.status is None:
                if pause_seconds_max:
                    tree.wait(log_uniform(dice, *GAP_SECONDS))
                    if tree.status is None:
                        tree.pause(log_uniform(dice, PAUSE_SECONDS_MIN, pause_seconds_max))
                else:
                    tree.wait(60)
        except Terminated:
            tree.end()
            raise
        leaks.write_text("".join(f"{name}\n" for name in tree.end(end_seconds_max)))
        status = tree.status
    assert status is not None
    return status


def log_uniform(dice: random.Random, low: float, high: float) -> float:
    """Return a number between two bounds; every order of magnitude is equally likely."""
    return math.exp(dice.uniform(math.log(low), math.log(high)))


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def is_stopped(process: psutil.Process) -> bool:
    """Return whether a process is stopped by a signal, or has ended."""
    try:
        return bool(process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    except psutil.NoSuchProcess:
        return True


def wait_until_stopped(process: psutil.Process) -> None:
    """Wait until a signal has stopped a process, so that it cannot stop other processes before they are
    examined.
    """
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while not is_stopped(process) and time.monotonic() < deadline:
        time.sleep(0.001)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder; at the end remove it, including mounts left by a killed test."""
    # The name is short because a Unix socket's path is limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        try:
            yield Path(folder)
        finally:
            for line in Path("/proc/self/mounts").read_text().splitlines():
                mounted = line.split()[1]
                if mounted.startswith(f"{folder}/"):
                    subprocess.run(["umount", mounted], check=True)


def main(words: list[str]) -> int:
    """Read the command line and run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.suite.tree", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="append the command's output to this file")
    parser.add_argument("--leaks", type=Path, required=True, help="write what outlived the command here")
    parser.add_argument(
        "--end-seconds",
        type=float,
        default=END_SECONDS_MAX,
        help=f"longest time that other processes may outlive the command (default: {END_SECONDS_MAX:g})",
    )
    parser.add_argument("--pause-seconds", type=float, default=0.0, help="longest pause; 0: no pauses")
    parser.add_argument("--seed", default="", help="decides when the pauses are and how long they last")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    try:
        status = run(
            options.command,
            options.output,
            options.leaks,
            options.end_seconds,
            options.pause_seconds,
            options.seed,
        )
    except Terminated:
        return 128 + signal.SIGTERM
    # A command that died by a signal has a negative status.
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
