# SPDX-License-Identifier: Apache-2.0
"""Checks that the ranges of a batch leave no gap and do not overlap. The ends that the tasks report are
compared before the sink commits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import RangesDisagree
from penstock.pipeline.record import RangeWork
from penstock.source.source import Source


@dataclass(frozen=True)
class Ends:
    """Where a task began to read its range, and where it proved that the next range begins.

    `following` is None if no other range continues at that point.
    """

    opened: int
    following: int | None

    @classmethod
    def of(cls, source: Source, work: RangeWork) -> "Ends":
        """Return the ends of a range, as its task reads them from the source."""
        wanted = work.byte_range
        opened = wanted if wanted.aligned else source.align(wanted)
        return cls(opened.start, source.joint(wanted))


def prove_joints(ranges: Sequence[RangeWork], ends: Mapping[int, Ends]) -> None:
    """Raise RangesDisagree if, according to their tasks, two consecutive ranges of a file do not meet.

    `ends` maps the number of a work to its ends. A work without ends has failed and is skipped. The check
    also detects differing copies of a file on different hosts.
    """
    for (at, work), (following, after) in pairwise(enumerate(ranges)):
        if not work.byte_range.is_cut or at not in ends or following not in ends:
            continue
        joint = ends[at].following
        if joint != ends[following].opened or not _go_on(work, after):
            raise RangesDisagree(
                f"a range of {work.source} ends before the event at {joint}, and the next one begins at"
                f" {ends[following].opened}",
                position=str(after.byte_range.position),
                hint="Nothing was committed. Do all hosts see the same files? Then run the pipeline again",
            )


def _go_on(work: RangeWork, after: RangeWork) -> bool:
    earlier, later = work.byte_range, after.byte_range
    same_file = (work.source, earlier.epoch, earlier.file) == (after.source, later.epoch, later.file)
    return same_file and earlier.stop == later.start
