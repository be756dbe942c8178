# SPDX-License-Identifier: Apache-2.0
"""Epochs and commit versions as numbers: counted epochs, epochs with a base, and how both increase.

This module derives commit versions from positions. In the log of a TiDB cluster, the commit version of a
transaction is instead its commit timestamp, which the log contains; positions have the same order.
"""

import re
from functools import lru_cache

from penstock.errors import LimitExceeded, PositionInvalid
from penstock.limits import (
    EPOCH_COUNTED_MAX,
    EPOCH_COUNTED_NEW_MAX,
    EPOCH_MAX,
    FILE_NUMBER_MAX,
    OFFSET_MAX,
)

_COUNTED = EPOCH_COUNTED_MAX + 1

_FILE_SUFFIX = re.compile(r"\.(\d+)\Z")
# A reader at the head of a log compares several positions for each transaction.
_FILE_NUMBERS_MAX = 256

# The file name, without its number, of the files that hold a TiDB cluster's changes.
TIDB_LOG_NAME = "tidb-binlog"


@lru_cache(_FILE_NUMBERS_MAX)
def file_number_of(file: str) -> int:
    """Return the number at the end of a binlog file's name. Raises PositionInvalid for a name without one."""
    match = _FILE_SUFFIX.search(file)
    if match is None:
        raise PositionInvalid(
            f"binlog file name {file!r} does not end in a number",
            hint="Name a binlog file as the server does, for example mysql-bin.000003",
        )
    return int(match.group(1))


def are_positional(file: str) -> bool:
    """Return whether the commit versions of a file's transactions can be computed from their positions.

    The commit versions of a TiDB cluster are its commit timestamps.
    """
    return file.rpartition(".")[0] != TIDB_LOG_NAME


def commit_version(epoch: int, file_number: int, offset: int) -> int:
    """Return the int64 that increases strictly with commit order.

    Its bits, from the top: a sign bit of 0, 31 bits for the sum of the epoch's base and the file number, and
    32 bits for the start offset in units of 16 bytes. Every transaction takes at least 16 bytes, so no two
    share a version. Raises PositionInvalid if the position exceeds a field.
    """
    place = epoch_base(epoch) + file_number
    if not (epoch >= 0 and place <= EPOCH_MAX and 0 <= file_number <= FILE_NUMBER_MAX) or not (
        0 <= offset <= OFFSET_MAX
    ):
        raise PositionInvalid(
            f"epoch {epoch}, file number {file_number}, offset {offset} do not fit a commit version",
            hint=f"The bounds are {EPOCH_MAX}, {FILE_NUMBER_MAX} and {OFFSET_MAX}",
        )
    return place << 32 | offset >> 4


def epoch_base(epoch: int) -> int:
    """Return the number that an epoch adds to its file numbers in a commit version.

    The sum takes the 31 bits above the offset. For a counted epoch, the file number takes the lower 23 of
    these bits. The number of a later epoch is its base plus 256, so that it is never equal to the number of a
    counted epoch. Negative numbers denote epochs of another log, which precede all epochs of this log.
    """
    if abs(epoch) <= EPOCH_COUNTED_MAX:
        return epoch << 23
    return epoch - _COUNTED if epoch > 0 else epoch + _COUNTED


def next_epoch(epoch: int, file_number: int) -> int:
    """Return the number of the epoch that follows `epoch`, in which `file_number` is the highest file number.

    The first epochs are counted, so that two daemons on one cluster number them alike. The base of a
    later epoch is one above the highest sum of base and file number used until then. Raises LimitExceeded.
    """
    if epoch < EPOCH_COUNTED_NEW_MAX:
        return epoch + 1
    following = epoch_base(epoch) + file_number + 1
    if following >= EPOCH_MAX:
        raise LimitExceeded(
            f"no commit version is left for an epoch after {epoch}, which reached file number {file_number}",
            hint="Begin a new log: move the folder of this one away, and read the tables again",
        )
    return _epoch_of_base(following)


def shifted_epoch(epoch: int, shift: int) -> int:
    """Return the number that an epoch has in a log whose epoch bases are higher by `shift`. The order of
    epochs is preserved.
    """
    return _epoch_of_base(epoch_base(epoch) + shift)


def _epoch_of_base(base: int) -> int:
    counted, left = divmod(base, 1 << 23)
    if left == 0 and abs(counted) <= EPOCH_COUNTED_MAX:
        return counted
    return base + _COUNTED if base > 0 else base - _COUNTED
