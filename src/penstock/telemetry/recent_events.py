# SPDX-License-Identifier: Apache-2.0
"""The newest lines of this process's log, kept in memory for the page of events."""

import threading
import time
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any

# Audit records are kept apart, so that a flood of other lines does not remove them.
_EVENTS_MAX = 500
_VALUE_CHARS_MAX = 300
_FIELDS_MAX = 20
_LEVELS = ("info", "warning", "error", "critical")
# Fields that have their own columns, or are not text.
_OWN_FIELDS = frozenset({"event", "level", "timestamp", "exc_info", "stack_info", "exception"})


class RecentEvents:
    """Keeps the most recent audit records, and the most recent other log lines of level info or above.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._audit: deque[dict[str, Any]] = deque(maxlen=_EVENTS_MAX)
        self._others: deque[dict[str, Any]] = deque(maxlen=_EVENTS_MAX)

    def record(self, logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Record a line, and return it unchanged: a processor of structlog."""
        level = str(line.get("level", method))
        if level in _LEVELS:
            event = {
                "time_us": time.time_ns() // 1000,
                "level": level,
                "what": str(line.get("event", ""))[:_VALUE_CHARS_MAX],
                "fields": _shown_fields(line),
            }
            with self._lock:
                (self._audit if event["what"] == "audit" else self._others).append(event)
        return line

    def newest(self, limit: int, *, audit: bool | None = None) -> list[dict[str, Any]]:
        """Return up to `limit` events, the newest first: audit records, other lines, or both (None)."""
        with self._lock:
            events = [
                *(self._audit if audit is not False else ()),
                *(self._others if audit is not True else ()),
            ]
        events.sort(key=lambda event: event["time_us"], reverse=True)
        return events[:limit]


def _shown_fields(line: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in line if name not in _OWN_FIELDS][:_FIELDS_MAX]
    return {name: str(line[name])[:_VALUE_CHARS_MAX] for name in names}


# Loggers belong to the process, and so do its recent events.
RECENT_EVENTS = RecentEvents()
