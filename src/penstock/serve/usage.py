# SPDX-License-Identifier: Apache-2.0
"""Counts an account's usage of its quota, in one process or jointly for all processes of the daemon.

    file of shared usage: for each account    debt f8, its time f8, requests under way i8 for each process

Times are monotonic seconds, which the processes of a host share.
"""

import fcntl
import mmap
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

_DEBT = struct.Struct("<dd")
_REQUESTS = struct.Struct("<q")


class Usage:
    """The usage of an account whose requests are all served by one process. Belongs to the event loop."""

    def __init__(self) -> None:
        self.requests = 0
        self._debt_bytes = self._debt_at = 0.0

    def begin_request(self, requests_max: int | None) -> bool:
        """Count a request unless the limit of concurrent requests is reached; return whether the request was
        counted.
        """
        if requests_max is not None and self.requests >= requests_max:
            return False
        self.requests += 1
        return True

    def end_request(self) -> None:
        """Subtract a request that has ended."""
        self.requests -= 1

    def spend(self, size: int, rate: int, now: float) -> float:
        """Add sent bytes to the debt, which falls by `rate` bytes per second, and return the debt."""
        self._debt_bytes = max(self._debt_bytes - (now - self._debt_at) * rate, 0.0) + size
        self._debt_at = now
        return self._debt_bytes


class SharedUsage(Usage):
    """The usage of an account whose requests are served by this process and others."""

    def __init__(self, usages: "SharedUsages", account: int, process: int) -> None:
        super().__init__()
        self._usages = usages
        self._account = account
        self._process = process

    def begin_request(self, requests_max: int | None) -> bool:
        """Count a request unless the limit of concurrent requests in all processes is reached."""
        with self._usages.locked(self._account):
            requests = self._usages.requests(self._account)
            if requests_max is not None and sum(requests) >= requests_max:
                return False
            self._usages.set_requests(self._account, self._process, requests[self._process] + 1)
            return True

    def end_request(self) -> None:
        """Subtract a request that has ended."""
        with self._usages.locked(self._account):
            requests = self._usages.requests(self._account)[self._process]
            self._usages.set_requests(self._account, self._process, max(requests - 1, 0))

    def spend(self, size: int, rate: int, now: float) -> float:
        """Add sent bytes to the debt that all processes share, and return the debt."""
        with self._usages.locked(self._account):
            debt_bytes, debt_at = self._usages.debt(self._account)
            debt_bytes = max(debt_bytes - (now - debt_at) * rate, 0.0) + size
            self._usages.set_debt(self._account, debt_bytes, now)
            return debt_bytes


class SharedUsages:
    """The usages of all accounts, in memory that several processes share through a file. Used by one thread
    of each process.

    Without a `file`, a new file is created. If a process ends, its locks are released.
    """

    def __init__(self, accounts: int, processes: int, file: IO[bytes] | None = None) -> None:
        self._accounts = accounts
        self._processes = processes
        self._size = _DEBT.size + processes * _REQUESTS.size
        self.file = tempfile.TemporaryFile() if file is None else file  # noqa: SIM115
        if file is None:
            # An empty file cannot be mapped.
            self.file.truncate(max(accounts, 1) * self._size)
        self._memory = mmap.mmap(self.file.fileno(), max(accounts, 1) * self._size)

    def usage(self, account: int, process: int) -> SharedUsage:
        """Return the usage of an account for one process."""
        return SharedUsage(self, account, process)

    def end_process(self, process: int) -> None:
        """Subtract the requests of a process that has ended."""
        for account in range(self._accounts):
            with self.locked(account):
                self.set_requests(account, process, 0)

    @contextmanager
    def locked(self, account: int) -> Iterator[None]:
        """Lock an account against other processes."""
        start = account * self._size
        fcntl.lockf(self.file, fcntl.LOCK_EX, self._size, start)
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, self._size, start)

    def debt(self, account: int) -> tuple[float, float]:
        """Return the debt in bytes, and the time of its last update."""
        debt_bytes, debt_at = _DEBT.unpack_from(self._memory, account * self._size)
        return debt_bytes, debt_at

    def set_debt(self, account: int, debt_bytes: float, at: float) -> None:
        """Replace the debt."""
        _DEBT.pack_into(self._memory, account * self._size, debt_bytes, at)

    def requests(self, account: int) -> list[int]:
        """Return the number of current requests of each process."""
        start = account * self._size + _DEBT.size
        end = start + self._processes * _REQUESTS.size
        return [count for (count,) in _REQUESTS.iter_unpack(self._memory[start:end])]

    def set_requests(self, account: int, process: int, count: int) -> None:
        """Replace the requests of a process."""
        start = account * self._size + _DEBT.size
        _REQUESTS.pack_into(self._memory, start + process * _REQUESTS.size, count)
