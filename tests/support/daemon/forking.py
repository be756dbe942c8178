# SPDX-License-Identifier: Apache-2.0
"""The command line in processes that are forked from a server process, which has imported it already.

Starting a daemon spends most of its processor time on imports. A test of the start itself runs
`tests.support.daemon.process.PENSTOCK` in a new interpreter.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# The modules that `penstock serve` imports. PyArrow imports pandas by itself once it converts values.
MODULES = [
    "pandas",
    "pyarrow.pandas_compat",
    "penstock.cli.app",
    "penstock.cli.serve",
    "penstock.cli.shared.checked_settings",
    "penstock.cli.shared.console_process",
    "penstock.console.rendering",
    "penstock.daemon",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(MODULES)


class ForkedProcess:
    """A running command, with the methods of `subprocess.Popen` that tests of daemons use."""

    def __init__(self, words: Sequence[str], cwd: Path, environment: Mapping[str, str], output: Path) -> None:
        self._process = _context.Process(target=_run, args=(words, cwd, dict(environment), output))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status of a process that has ended, else None."""
        return self._process.exitcode

    def wait(self, seconds_max: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(seconds_max)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("penstock", seconds_max or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            # The process may end at this moment; its status is available shortly afterwards.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()


def _run(words: Sequence[str], cwd: Path, environment: Mapping[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.argv = ["penstock", *words]

    from penstock.cli.app import main

    main()
