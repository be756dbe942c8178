# SPDX-License-Identifier: Apache-2.0
"""Writes a batch of keyed rows with a sink, to be killed in the middle of the batch.

    python -m tests.support.programs.write_keys KIND SETTINGS

SETTINGS are the sink's settings as JSON. `batch` defines the content of the batch.
"""

import json
import sys

from penstock.changes import Changes
from penstock.sinks.sink import BatchMark, Evolution, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, insert, target_of

ORDERS = target_of({"id": "int", "name": "varchar(20)"})
ROWS = 60_000
_ROWS_AT_ONCE = 500


def batch() -> list[Changes]:
    """Return the batch, in pieces."""
    return [
        changes_of(ORDERS, *(insert(5, row, id=row, name="a") for row in range(start, start + _ROWS_AT_ONCE)))
        for start in range(0, ROWS, _ROWS_AT_ONCE)
    ]


def main() -> None:
    """Write the batch."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    sink = make_sink(kind, settings_of(kind)(**settings))
    sink.prepare(ORDERS, Evolution.EVOLVE)
    writer = sink.open(BatchMark("killed", "g", 1), 0)
    for changes in batch():
        writer.write(changes)
    writer.finish()


if __name__ == "__main__":
    main()
