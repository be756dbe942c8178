# SPDX-License-Identifier: Apache-2.0
"""Alerts: conditions that are true now, and the notifications of their beginning and end.

Pending states, silences and routing are left to Prometheus' Alertmanager. A daemon reports an alert once when
it begins and once when it ends, no matter how often its numbers change.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

# A notification that a receiver refuses, because of its text or its addressee, is sent again after this time.
# The pause doubles with each refusal.
_REFUSED_US = 10_000_000
_REFUSED_US_MAX = 600_000_000


@dataclass(frozen=True)
class Alert:
    """A condition that is currently true.

    `name` and `instance` identify the alert. `summary` may change while the condition lasts. With
    `is_pipeline`, `instance` is the name of a pipeline and its sink, or the name of a state store.
    """

    name: str
    instance: str
    summary: str
    hint: str | None = None
    since_us: int = 0
    is_pipeline: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """The values that identify the alert. The conditions of instances and of pipelines have different
        names.
        """
        return self.name, self.instance


@dataclass(frozen=True)
class Notification:
    """The beginning or the end of an alert."""

    alert: Alert
    resolved: bool

    @property
    def key(self) -> tuple[str, str, bool]:
        """The key that identifies the notification, independent of its text."""
        return *self.alert.key, self.resolved

    def text(self) -> str:
        """Return the notification as a message. The word Penstock satisfies chat robots that require a
        keyword.
        """
        alert = self.alert
        lines = [
            f"Penstock {'resolved' if self.resolved else 'alert'}: {alert.instance} {alert.name}",
            alert.summary,
        ]
        if alert.hint and not self.resolved:
            lines.append(alert.hint)
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"status": "resolved" if self.resolved else "firing", **asdict(self.alert)}


@dataclass(frozen=True)
class _RefusedPause:
    """The pause after the last refusal of a notification, and its end."""

    pause_us: int
    until_us: int


class Alerts:
    """The alerts of a daemon. For one thread or task.

    A notification stays pending until `delivered` is called for it, so that no notification is lost while the
    channel is down. A `refused` notification is sent again after a pause, so that it does not block other
    notifications. An alert that ends before its beginning was delivered is not reported at all.
    """

    def __init__(self) -> None:
        self._firing: dict[tuple[str, str], Alert] = {}
        self._reported: dict[tuple[str, str], Alert] = {}
        self._refused: dict[tuple[str, str, bool], _RefusedPause] = {}

    def update(self, current: Iterable[Alert], now_us: int) -> None:
        """Replace the alerts with the conditions that are true now."""
        self._firing = {alert.key: replace(alert, since_us=self._since(alert, now_us)) for alert in current}

    def firing(self) -> list[Alert]:
        """Return the alerts, the oldest first."""
        return sorted(self._firing.values(), key=lambda alert: (alert.since_us, alert.key))

    def pending(self) -> list[Notification]:
        """Return the notifications to be sent: ends first, then beginnings."""
        ended = [alert for key, alert in self._reported.items() if key not in self._firing]
        begun = [alert for alert in self.firing() if alert.key not in self._reported]
        return [Notification(alert, True) for alert in ended] + [
            Notification(alert, False) for alert in begun
        ]

    def due(self, now_us: int) -> list[Notification]:
        """Return the pending notifications, without those that were refused lately."""
        pending = {known.key: known for known in self.pending()}
        self._refused = {key: pause for key, pause in self._refused.items() if key in pending}
        waiting = {key for key, pause in self._refused.items() if pause.until_us > now_us}
        return [known for key, known in pending.items() if key not in waiting]

    def refused(self, notification: Notification, now_us: int) -> None:
        """Record that the receiver refused a notification."""
        known = self._refused.get(notification.key)
        pause_us = _REFUSED_US if known is None else min(2 * known.pause_us, _REFUSED_US_MAX)
        self._refused[notification.key] = _RefusedPause(pause_us, now_us + pause_us)

    def delivered(self, notification: Notification) -> None:
        """Record that a notification was delivered."""
        if notification.resolved:
            self._reported.pop(notification.alert.key, None)
        else:
            self._reported[notification.alert.key] = notification.alert

    def _since(self, alert: Alert, now_us: int) -> int:
        known = self._firing.get(alert.key)
        return now_us if known is None else known.since_us
