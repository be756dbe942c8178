# SPDX-License-Identifier: Apache-2.0
"""The daemon's monitoring: metrics to scrape or push, health, and notifications to the service manager.

All values are collected when they are requested. State that belongs to the event loop is read within the
loop, and the rest in a thread.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from starlette.routing import Route

from penstock.errors import PenstockError, TransientError
from penstock.serve import systemd
from penstock.serve.coordination import CoordinationProbe
from penstock.serve.health import Health
from penstock.serve.http import account as account_routes
from penstock.serve.http import alerts as alert_routes
from penstock.serve.http import charts as chart_routes
from penstock.serve.http import connections as connection_routes
from penstock.serve.http import events as event_routes
from penstock.serve.http import health as health_routes
from penstock.serve.http import metrics as metrics_routes
from penstock.serve.http import subscription_changes as subscription_change_routes
from penstock.serve.http import subscription_pause as pause_routes
from penstock.serve.http import subscription_reset as reset_routes
from penstock.serve.http import subscriptions as subscription_routes
from penstock.serve.ports import Ports
from penstock.serve.readings import copy_readers, read_listeners, read_readers
from penstock.serve.samples import Samples
from penstock.serve.served import Served
from penstock.serve.subscribers import Subscriber
from penstock.serve.threads import run_in
from penstock.settings.telemetry import MetricsSettings, TelemetrySettings
from penstock.telemetry.alerts import Alert, Alerts
from penstock.telemetry.channel import Channel
from penstock.telemetry.otlp import OtlpPush
from penstock.telemetry.process import read_process
from penstock.telemetry.readings import Readings, Report
from penstock.telemetry.recent_events import RECENT_EVENTS
from penstock.telemetry.ring import STEP_SECONDS

_log = structlog.get_logger(__name__)


# How often the conditions of alerts are checked.
_ALERT_SECONDS = 10.0


@dataclass(frozen=True)
class Alerting:
    """Which conditions raise an alert, and the channel that alerts are sent to. `conditions` may block, and
    sending to `channel` blocks.
    """

    conditions: Callable[[], list[Alert]]
    channel: Channel


class Telemetry:
    """Collects the metrics of a daemon and reports its health. Belongs to the event loop.

    `reports` add the metrics of the captures, in a thread. Raises DependencyMissing if OTLP is configured and
    its packages are missing.
    """

    def __init__(
        self,
        served: Served,
        ports: Ports,
        reports: Sequence[Report] = (),
        coordination: CoordinationProbe | None = None,
        metrics: MetricsSettings | None = None,
        telemetry: TelemetrySettings | None = None,
        alerting: Alerting | None = None,
    ) -> None:
        self._served = served
        self._ports = ports
        self._connections = ports.connections
        self._listening = frozenset(ports.sockets)
        self._reports = tuple(reports)
        self._coordination = coordination
        self._alias = (metrics or MetricsSettings()).alias
        telemetry = telemetry or TelemetrySettings()
        self._interval = telemetry.interval
        self._push = None if telemetry.otlp is None else OtlpPush(telemetry.otlp)
        self._alerting = alerting
        self._alerts = Alerts()
        self.samples = Samples(served)
        self.health = Health(served, self._listening, coordination)

    def routes(self) -> list[Route]:
        """Return the routes on which operators query the daemon itself."""
        return [
            *metrics_routes.routes(self.read, self._served.threads.reporting, self._alias),
            *health_routes.routes(self.health),
            *account_routes.routes(),
            *subscription_routes.routes(self._served, self._coordination),
            *reset_routes.routes(self._served, self._coordination),
            *pause_routes.routes(self._served, self._coordination),
            *subscription_change_routes.routes(self._served, self._coordination),
            *connection_routes.routes(self._served, self._ports),
            *event_routes.routes(self._served, RECENT_EVENTS),
            *chart_routes.routes(self._served, self.samples, self._served.threads.reporting),
            *alert_routes.routes(
                self._served,
                self._alerts.firing,
                None if self._alerting is None else self._alerting.channel,
            ),
        ]

    async def read(self) -> Readings:
        """Gather all metrics now."""
        readings = Readings()
        read_listeners(readings, self._connections, self._listening)
        readers = copy_readers(self._served.subscribers)
        await run_in(self._served.threads.reporting, self._read_blocking, readings, readers)
        return readings

    async def run(self) -> None:
        """Notify the service manager, push metrics and take samples for charts until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(systemd.notify_until_cancelled(self.health.is_started))
            tasks.create_task(_repeat(self._sample_once, STEP_SECONDS))
            if self._push is not None:
                tasks.create_task(_repeat(partial(self._push_once, self._push), self._interval))
            if self._alerting is not None:
                tasks.create_task(_repeat(partial(self._alert_once, self._alerting), _ALERT_SECONDS))

    def close(self) -> None:
        """Close the connections to the coordination store and the collector."""
        if self._coordination is not None:
            self._coordination.close()
        if self._push is not None:
            self._push.close()

    def _read_blocking(self, readings: Readings, readers: list[Subscriber]) -> None:
        """Gather the metrics that do not belong to the event loop."""
        for report in self._reports:
            report(readings)
        read_readers(readings, readers, lambda name: self._served.instance(name).log())
        if self._coordination is not None:
            self._coordination.read(readings)
        read_process(readings)

    async def _sample_once(self) -> None:
        await run_in(self._served.threads.reporting, self.samples.take)

    async def _push_once(self, push: OtlpPush) -> None:
        readings = await self.read()
        problem = await run_in(self._served.threads.delivering, push.push, readings)
        if problem is not None:
            _log.warning("metrics were not pushed", why=problem)

    async def _alert_once(self, alerting: Alerting) -> None:
        """Check the conditions and report what has begun or ended. A failed delivery is tried again."""
        current = await run_in(self._served.threads.reporting, alerting.conditions)
        now_us = time.time_ns() // 1000
        self._alerts.update(current, now_us)
        for notification in self._alerts.due(now_us):
            try:
                await run_in(self._served.threads.delivering, alerting.channel.send, notification)
            except PenstockError as problem:
                _log.error("an alert was not delivered", alert=notification.text(), why=str(problem))
                if isinstance(problem, TransientError):
                    # After a transient error, the channel would fail for the remaining alerts too.
                    break
                self._alerts.refused(notification, now_us)
            else:
                self._alerts.delivered(notification)


async def _repeat(report: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Report until cancelled, with a pause after each round.

    Every error is logged, and the next round tries again. Reporting must survive a shortage of file
    descriptors or memory, because the operator has to be alerted to it.
    """
    while True:
        (bug,) = await asyncio.gather(report(), return_exceptions=True)
        if bug is not None:
            _log.error("the daemon could not report on itself", error=type(bug).__name__, exc_info=bug)
        await asyncio.sleep(seconds)
