# SPDX-License-Identifier: Apache-2.0
"""The changes of an instance as they arrive, for one viewer, no faster than people can read.

A viewer receives every change, or a count of the changes that were left out. Each tail ends when it reaches a
limit.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.client.fetch import BatchFrame, PositionFrame
from penstock.console.fleet import Fleet
from penstock.source.row_history import logged_values, plain_value, python_rows

# A daemon without changes ends its response after this many seconds. The console then checks whether the
# viewer has left.
_WAIT_SECONDS = 5.0
_SILENCE_SECONDS_MAX = 30.0
_ROWS_PER_SECOND_MAX = 50
ROWS_MAX = 2000
_SECONDS_MAX = 900.0

_BEFORE, _AFTER = "update_preimage", "update_postimage"


def tail_changes(
    fleet: Fleet,
    url: str,
    instance: str,
    wanted: dict[str, Any],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """Yield the changes after this moment as parts of the kinds `begin`, `row`, `skipped`, `idle` and `end`.

    The `begin` part contains the position after which every change is yielded, None if the log is empty.
    `wanted` holds the fields `tables`, `where` and `changes` of the daemon's `changes` call. A `skipped` part
    counts the rows left out since the previous part. An `idle` part says that nothing has arrived for a
    while. Raises the daemon's errors.
    """
    # Determine the position first: requesting "latest" each time would lose changes between two responses.
    head = fleet.ask_instance(url, instance, "head")["position"]
    start: dict[str, Any] | str = "earliest" if head is None else {"position": head}
    yield {"kind": "begin", "position": head}
    began = second_began = clock()
    shown = shown_this_second = skipped = 0
    while clock() - began < _SECONDS_MAX:
        body = {**wanted, "start": start, "wait_seconds": _WAIT_SECONDS, "subscriber": ""}
        for frame in fleet.changes(url, instance, body, _SILENCE_SECONDS_MAX):
            if isinstance(frame, PositionFrame):
                start = {"position": str(frame.position)}
                if frame.server_key:
                    start["server_key"] = frame.server_key
                continue
            for row in _rows_of(frame):
                if clock() - second_began >= 1.0:
                    second_began, shown_this_second = clock(), 0
                    if skipped:
                        yield {"kind": "skipped", "rows": skipped}
                        skipped = 0
                if shown_this_second >= _ROWS_PER_SECOND_MAX:
                    skipped += 1
                    continue
                shown_this_second += 1
                shown += 1
                yield row
                if shown >= ROWS_MAX:
                    yield {"kind": "end", "why": "rows"}
                    return
        if skipped:
            yield {"kind": "skipped", "rows": skipped}
            skipped = 0
        yield {"kind": "idle"}
    yield {"kind": "end", "why": "time"}


def _rows_of(frame: BatchFrame) -> Iterator[dict[str, Any]]:
    """Yield the changes in a batch, in the form of a history; the two images of an update are one change."""
    before: dict[str, Any] | None = None
    for row in python_rows(frame.to_arrow()):
        kind, commit_time = row["_change_type"], row["_commit_timestamp"]
        values = plain_value(logged_values(row))
        if kind == _BEFORE:
            before = values
            continue
        yield {
            "kind": "row",
            "table": frame.table,
            "change": "update" if kind == _AFTER else kind,
            "time": commit_time,
            "before": before if kind == _AFTER else values if kind == "delete" else None,
            "after": None if kind == "delete" else values,
        }
        before = None
