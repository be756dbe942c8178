# SPDX-License-Identifier: Apache-2.0
"""Notifications for systemd, by the protocol of sd_notify(3): READY, STOPPING, and the watchdog.

The event loop sends the watchdog's keepalives. If the loop hangs, systemd restarts the daemon.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping

import structlog

_log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.1


async def notify_until_cancelled(
    is_started: Callable[[], bool], environment: Mapping[str, str] = os.environ
) -> None:
    """Report READY once the daemon has started, then feed the watchdog; report STOPPING at the end.

    Returns at once if there is no service manager, according to `NOTIFY_SOCKET`.
    """
    path = environment.get("NOTIFY_SOCKET", "")
    if not path:
        return
    while not is_started():
        await asyncio.sleep(_POLL_SECONDS)
    _notify(path, "READY=1")
    try:
        seconds = watchdog_seconds(environment)
        while seconds is not None:
            # Half of the deadline, as sd_watchdog_enabled(3) recommends.
            await asyncio.sleep(seconds / 2)
            _notify(path, "WATCHDOG=1")
        await asyncio.Event().wait()
    finally:
        _notify(path, "STOPPING=1")


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """Return the deadline of the service manager's watchdog for this process, None without one."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    for_process = environment.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or not int(microseconds):
        return None
    return int(microseconds) / 1e6 if for_process in ("", str(os.getpid())) else None


def _notify(path: str, state: str) -> None:
    # A leading @ stands for the zero byte of an abstract socket.
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifying:
            notifying.setblocking(False)
            notifying.sendto(state.encode(), address)
    except OSError as problem:
        # Ignore the error: the service manager notices that the notification is missing.
        _log.warning("the service manager could not be notified", state=state, why=str(problem))
