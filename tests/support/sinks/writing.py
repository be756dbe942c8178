# SPDX-License-Identifier: Apache-2.0
"""Write a batch into a sink without a pipeline."""

from penstock.changes import Changes
from penstock.sinks.sink import BatchMark, Evolution, Receipt, Sink

MARK = BatchMark("pipe", "g", 1)


def write(sink: Sink, *changes: Changes) -> Receipt:
    """Write changes as the only part of the batch `MARK`, which is not committed."""
    writer = sink.open(MARK, 0)
    for change in changes:
        sink.prepare(change.target, Evolution.EVOLVE)
        writer.write(change)
    return writer.finish()
