# SPDX-License-Identifier: Apache-2.0
"""Aligns where several sinks end their batches in one source's log, so that they can share ranges.

Sinks that plan at different moments see different ends of the log. If another sink has already planned a
batch from the same position, a sink uses the same end. A sink that lags ends its batch where another sink's
batch begins or ends, so that both sinks are then at the same position.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from penstock.source.offsets import Offset
from penstock.source.source import place_of

# A sink that is further behind makes its own, larger batches.
_STRETCHES_KEPT = 8


@dataclass(frozen=True)
class Stretch:
    """The part of the log that a batch covers, between two offsets. `head` was the end of the log when the
    batch was planned.
    """

    begin: Offset
    end: Offset
    head: Offset


class SharedEnds:
    """The last stretches that the sinks of a pipeline have planned in one source's log. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stretches: OrderedDict[Offset, Stretch] = OrderedDict()

    def stretch_from(self, begin: Offset) -> Stretch | None:
        """Return the stretch that another sink has planned from an offset, None if there is none."""
        with self._lock:
            return self._stretches.get(begin)

    def agree(self, stretch: Stretch) -> Stretch:
        """Return the stretch to read: the planned stretch, or a shorter one that another sink has agreed
        on.
        """
        with self._lock:
            known = self._stretches.get(stretch.begin)
            if known is not None and _is_before(known.end, stretch.end):
                return known
            meetings = [
                offset
                for other in self._stretches.values()
                for offset in (other.begin, other.end)
                if _is_before(stretch.begin, offset) and _is_before(offset, stretch.end)
            ]
            if meetings:
                end = max(meetings, key=lambda offset: place_of(offset.position))
                stretch = Stretch(stretch.begin, end, stretch.head)
            self._stretches[stretch.begin] = stretch
            self._stretches.move_to_end(stretch.begin)
            while len(self._stretches) > _STRETCHES_KEPT:
                self._stretches.popitem(last=False)
            return stretch


def _is_before(first: Offset, second: Offset) -> bool:
    """Return whether an offset is before another in the log of the same server."""
    is_same_log = (first.server_key, first.position.epoch) == (second.server_key, second.position.epoch)
    is_exact = not (first.by_set or second.by_set)
    return is_same_log and is_exact and place_of(first.position) < place_of(second.position)
