# SPDX-License-Identifier: Apache-2.0
"""Writes a batch into a SQL target, and kills itself with SIGKILL before its n-th statement.

    python -m tests.support.programs.write_batch KIND SETTINGS

SETTINGS are the sink's settings as JSON. Each input line contains a number n. The output is "killed", or
"done" if the batch had fewer than n statements. `batch` defines the content of the batch.
"""

import json
import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any

from penstock.changes import Changes
from penstock.sinks.sink import make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.pipeline.logged_changes import write_batch

SEATS = target_of({"id": "int", "seat": "int", "label": "varchar(20)"}, name="hall.seats", unique=[["seat"]])
VISITS = target_of({"page": "varchar(20)", "count": "int"}, [], name="hall.visits")
# The everyday run has fewer rows, in shorter statements.
SCALE = 1 if os.environ.get("PENSTOCK_LONG") else 4
ROWS = 1600 // SCALE
DELETED_ROWS = 300 // SCALE


def first_batch() -> list[Changes]:
    """Return the batch that precedes the tested batch."""
    return [
        changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(ROWS))),
        changes_of(VISITS, *(insert(1, row, page="p", count=row % 2) for row in range(4))),
    ]


def batch() -> list[Changes]:
    """Return the batch: rows rotate their seats, a key changes, and keyless rows are inserted and deleted."""
    half = ROWS // 2
    moved = [
        update(2, {"id": row, "seat": row}, {"id": row, "seat": (row + 1) % half}, row) for row in range(half)
    ]
    moved.append(update(3, {"id": half, "seat": half}, {"id": -1, "seat": half}))
    moved += [delete(4, row, id=row, seat=row) for row in range(half + 1, half + DELETED_ROWS)]
    visits = [insert(2, page="q", count=7), delete(3, page="p", count=1), insert(4, page="p", count=0)]
    return [changes_of(SEATS, *moved), changes_of(VISITS, *visits)]


def expected() -> tuple[list[Any], list[Any]]:
    """Return the rows of both tables after the batch."""
    half = ROWS // 2
    seats = [(row, (row + 1) % half, None) for row in range(half)] + [(-1, half, None)]
    seats += [(row, row, None) for row in range(half + DELETED_ROWS, ROWS)]
    return sorted(seats), sorted([("p", 0), ("p", 0), ("p", 1), ("q", 7), ("p", 0)])


def main() -> None:
    """Read numbers until the input ends."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    sink = make_sink(kind, settings_of(kind)(**settings))
    session = import_module(f"penstock.sinks.{kind}.connection").Session
    changes = batch()
    for line in sys.stdin:
        # A forked child starts with all modules loaded, and can be killed without ending this process.
        child = os.fork()
        if child == 0:
            _die_before(session, int(line))
            write_batch(sink, changes, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else f"done {os.waitstatus_to_exitcode(status)}", flush=True)


def _die_before(session: Any, count: int) -> None:
    lock = threading.Lock()
    done = 0

    def counted(run: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            with lock:
                done += 1
                if done >= count:
                    os.kill(os.getpid(), signal.SIGKILL)
            return run(*arguments, **named)

        return call

    for name in ("execute", "run", "copy_in", "commit", "close"):
        if hasattr(session, name):
            setattr(session, name, counted(getattr(session, name)))


if __name__ == "__main__":
    main()
