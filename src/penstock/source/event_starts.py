# SPDX-License-Identifier: Apache-2.0
"""Where events begin in plain binlog files, found by following event headers from the first one.

An event's value may hold a copy of anything, so no event is ever recognized by its bytes alone. What was
followed is remembered for as long as the file is the same one.
"""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from penstock._native import follow_events
from penstock.errors import SourceMissing
from penstock.limits import FILES_FOLLOWED_MAX, READ_BYTES

# One event start is remembered for about so many bytes.
_SPACING_BYTES = READ_BYTES


@dataclass(frozen=True)
class _Fingerprint:
    """What tells whether a file is the one that was followed."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> "_Fingerprint":
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass
class _Followed:
    """The starts that are remembered of one file, rising."""

    fingerprint: _Fingerprint
    starts: list[int] = field(default_factory=list)


_followed: OrderedDict[Path, _Followed] = OrderedDict()
_lock = threading.Lock()


def last_event_start(path: Path, first: int, target: int) -> int:
    """Return where the last event begins that begins at or before an offset of a plain file.

    `first` is where the first event begins. Where the file ends before the target, it is the last whole
    header. Raises SourceMissing, and EventMalformed for a header that no event has.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as problem:
        raise SourceMissing(f"{path} cannot be read: {problem.strerror}") from problem
    try:
        with _lock:
            starts = _starts_of(path, _Fingerprint.of(descriptor), first)
            return _follow(descriptor, starts, target)
    finally:
        os.close(descriptor)


def _starts_of(path: Path, fingerprint: _Fingerprint, first: int) -> list[int]:
    followed = _followed.get(path)
    if followed is None or followed.fingerprint != fingerprint:
        followed = _followed[path] = _Followed(fingerprint, [first])
    _followed.move_to_end(path)
    if len(_followed) > FILES_FOLLOWED_MAX:
        _followed.popitem(last=False)
    return followed.starts


def _follow(descriptor: int, starts: list[int], target: int) -> int:
    """Follow headers from the last start that is remembered before the target, and remember more of them."""
    last = start = starts[max(bisect_right(starts, target) - 1, 0)]
    while start <= target:
        found, start = follow_events(os.pread(descriptor, READ_BYTES, start), start, target)
        if found is None:
            break
        last = found
        if last >= starts[-1] + _SPACING_BYTES:
            starts.append(last)
    return last
