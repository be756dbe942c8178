# SPDX-License-Identifier: Apache-2.0
"""The daemon's health, for service managers and orchestrators.

    alive      the event loop answers
    started    every log has been opened once, here or by another member of the fleet, and every listener but
               Canal's accepts connections
    ready      every log is open, every listener accepts connections, and the coordination store answers

Canal's listener is not part of `started`, because it waits for the coordination store, and restarting the
daemon does not repair the store. No check depends on a MySQL server: restarting the daemon does not repair
its source. An instance that has stopped needs an operator, not a restart, so it does not count unless all
instances have stopped.
"""

import asyncio
from collections.abc import Collection

from penstock.errors import PenstockError, ServerBusy, TransientError
from penstock.serve.coordination import CoordinationProbe
from penstock.serve.durable import stored_log_of
from penstock.serve.served import Served
from penstock.serve.threads import run_in


class Health:
    """Checks the health of a daemon. Belongs to the event loop. `listening` contains the listeners that
    already accept connections.
    """

    def __init__(
        self, served: Served, listeners: Collection[str], coordination: CoordinationProbe | None
    ) -> None:
        self._served = served
        self._listeners = frozenset(listeners)
        self._coordination = coordination
        self.listening: set[str] = set()
        self._opened: set[str] = set()
        self._has_started = False
        self._asking: asyncio.Future[PenstockError | None] | None = None

    def is_started(self) -> bool:
        """Return whether the daemon has started. Remains true."""
        if not self._has_started:
            self._opened |= self._served.instances.keys() - self._unopened()
            are_opened = not self._served.instances.keys() - self._opened
            self._has_started = are_opened and self._listeners - {"canal"} <= self.listening
        return self._has_started

    async def checks(self) -> dict[str, bool]:
        """Return the readiness checks by name. The daemon is ready if all of them are true."""
        checks = {
            "log": not self._unopened() and not self._all_stopped(),
            "listeners": self._listeners <= self.listening,
            "serving": not self._served.arrivals.closing,
        }
        if self._coordination is not None:
            checks["coordination"] = await self._coordination_answers(self._coordination)
        return checks

    async def _coordination_answers(self, coordination: CoordinationProbe) -> bool:
        """Ask the store once for all waiting probes: probes need no credentials, and the store's timeout is
        long.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(run_in(self._served.threads.reporting, coordination.failure))
        # If a probe gives up, the other probes still get the answer.
        return await asyncio.shield(self._asking) is None

    def _unopened(self) -> set[str]:
        """Return the instances whose log is not open yet, or is being reopened."""
        unopened = set()
        for name, instance in self._served.instances.items():
            if not self._served.is_here(name):
                # Another member of the fleet has the log open. Finding out which member would cost a read of
                # the store.
                continue
            try:
                # Check the stored log: members that copy the log must be able to start before anything is
                # confirmed.
                stored_log_of(instance)
            except (ServerBusy, TransientError):
                unopened.add(name)
            except PenstockError:
                # The instance has stopped.
                continue
        return unopened

    def _all_stopped(self) -> bool:
        here = [instance for name, instance in self._served.instances.items() if self._served.is_here(name)]
        return bool(here) and all(instance.status()["state"] == "stopped" for instance in here)
