# SPDX-License-Identifier: Apache-2.0
"""The listeners of a daemon in this process, over a log of real binlog files: real sockets, no server."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from typing import Any

from penstock.coordinate.backends.memory import MemoryStore
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.access import Access
from penstock.serve.arrivals import Arrivals
from penstock.serve.coordination import CoordinationProbe
from penstock.serve.durable import DurableInstance
from penstock.serve.http import fleet_control as fleet_control_routes
from penstock.serve.http import instances as instance_routes
from penstock.serve.http import pumps as pump_routes
from penstock.serve.http import resume as resume_routes
from penstock.serve.http import server_check as check_routes
from penstock.serve.http import settings as settings_routes
from penstock.serve.listener import Listener
from penstock.serve.ports import Ports
from penstock.serve.served import Served
from penstock.serve.telemetry import Alerting, Telemetry
from penstock.settings.daemon import Settings
from penstock.settings.shown import shown_settings
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import Captured, open_log
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

INSTANCE = "shop"


class LogInstance:
    """An instance that serves a log without capturing anything."""

    name = INSTANCE

    def __init__(self, log: Log) -> None:
        self._log = log

    def status(self) -> dict[str, Any]:
        return {
            "instance": INSTANCE,
            "state": "running",
            "earliest": _text(self._log.earliest()),
            "position": _text(self._log.visible),
            "lag_seconds": 0.0,
            "tables": [],
            "exclude_tables": [],
        }

    def log(self) -> Log:
        return self._log


@dataclass(frozen=True)
class Answered:
    """A response to an HTTP request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class ServedLog:
    """A log and the listeners that serve it, which run in a thread of this process."""

    log: Log
    served: Served
    listener: Listener
    ports: Ports
    token: str | None

    def port(self, name: str = "http") -> int:
        """Return the port of a listener."""
        return int(self.ports.addresses()[name].rpartition(":")[2])

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        listener: str = "http",
        **more: str,
    ) -> Answered:
        """Send one request over a new connection; `more` are headers. Bytes are sent as they are."""
        connection = HTTPConnection("127.0.0.1", self.port(listener), timeout=WAIT_SECONDS_MAX)
        token = token or self.token
        headers = {name.replace("_", "-"): value for name, value in more.items()}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        try:
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return Answered(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def in_loop(self, call: Callable[[], Any]) -> Any:
        """Call a function in the listeners' event loop, and return its result."""

        async def called() -> Any:
            returned = call()
            return await returned if asyncio.iscoroutine(returned) else returned

        loop = self.listener.servers[0].get_loop()
        return asyncio.run_coroutine_threadsafe(called(), loop).result(WAIT_SECONDS_MAX)


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)


@contextmanager
def serving(
    log: Log,
    listen: Mapping[str, Any] | None = None,
    access: list[dict[str, Any]] | None = None,
    store: MemoryStore | None = None,
    hold_seconds: float | None = 3600.0,
    coordination: CoordinationProbe | None = None,
    check: Callable[[str], list[dict[str, Any]]] = lambda name: [],
    copies: int | None = None,
    resume: Callable[[str], None] | None = None,
    control: fleet_control_routes.Control | None = None,
    fleet_status: Callable[[], Mapping[str, Any]] | None = None,
    instances: instance_routes.Instances | None = None,
    alerting: Alerting | None = None,
    pumps: Mapping[str, pump_routes.RunningPump] | None = None,
) -> Iterator[ServedLog]:
    """Serve a log inside the block.

    `listen` and `access` are the sections of penstock.yaml with these names. `check` returns the findings
    about the servers of an instance, and `resume` restarts a capture that was set aside. `control` controls
    the jobs and members of a fleet, `fleet_status` returns the fleet's state, and `instances` gives access to
    the instances in its store. `alerting` contains the alert conditions and the channel, and `pumps` the
    Pumps by instance. With `copies`, readers only get data that this many members have synced.
    """
    settings = Settings.model_validate(
        {
            "listen": {"http": "127.0.0.1:0", **(listen or {})},
            "access": access or [],
            "instances": {INSTANCE: {"source": "mysql://nobody@127.0.0.1:1"}},
        },
        context={"accounts": bool(access)},
    )
    arrivals, instance = Arrivals(), LogInstance(log)
    shown = instance if copies is None else DurableInstance(instance, copies, arrivals.arrived)
    served = Served({INSTANCE: shown}, arrivals, hold_seconds={INSTANCE: hold_seconds})
    ports = Ports.take(settings.listen)
    store = store or MemoryStore("listeners")
    listener = Listener(
        settings.listen,
        served,
        Access.of_settings(settings.listen, settings.access),
        ports,
        lambda: store,
        Telemetry(served, ports, coordination=coordination, alerting=alerting),
        fleet_status,
        more_routes=[
            *settings_routes.routes(served, partial(shown_settings, settings)),
            *check_routes.routes(served, check, served.threads.searching),
            *resume_routes.routes(served, resume),
            *pump_routes.routes(served, pumps or {}),
            *fleet_control_routes.routes(served, control),
            *([] if instances is None else instance_routes.routes(served, instances)),
        ],
    )
    thread = threading.Thread(target=listener.serve_until_stopped)
    thread.start()
    try:
        wait_until(lambda: listener.started)
        yield ServedLog(log, served, listener, ports, (listen or {}).get("token"))
    finally:
        listener.stop()
        thread.join(WAIT_SECONDS_MAX)
        assert not thread.is_alive()


@contextmanager
def captured_log() -> Iterator[Log]:
    """Open a memory log that holds every binlog file of the tests."""
    with open_log(SimulatedDisk()) as log:
        Captured(log).run()
        yield log
