# SPDX-License-Identifier: Apache-2.0
"""Copies of one log on several members, compared byte for byte."""

from penstock.logstore.reader import LogReader


def assert_equal_logs(first: LogReader, other: LogReader) -> int:
    """Assert that two logs have the same bytes wherever both contain the log, and return the number of shared
    bytes.

    One log may begin later than the other, in a later epoch.
    """
    left_epochs, right_epochs = ([epoch.epoch for epoch in log.epochs.epochs] for log in (first, other))
    start = max(left_epochs[0], right_epochs[0])
    assert [epoch for epoch in left_epochs if epoch >= start] == [
        epoch for epoch in right_epochs if epoch >= start
    ]
    shared = 0
    for extent in first.extents():
        for there in other.extents():
            if (extent.epoch, extent.file) != (there.epoch, there.file):
                continue
            start, end = max(extent.start, there.start), min(extent.end, there.end)
            left, right = (
                b"".join(log.read(extent.epoch, extent.file, start, end)) for log in (first, other)
            )
            assert left == right
            shared += len(left)
    return shared
