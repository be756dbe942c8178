# SPDX-License-Identifier: Apache-2.0
"""Writes batches into a lake, and kills itself with SIGKILL at the n-th step of a batch.

    python -m tests.support.programs.write_lake KIND SETTINGS

SETTINGS are the sink's settings as JSON. Each input line contains the number of a batch and a number n. The
output is "killed", or "done" if the batch had fewer than n steps. There is a step before and a step after
each operation that makes something durable: closing a file, moving it, and committing.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from penstock.changes import Changes
from penstock.sinks.lake.parquet_files import PartFiles
from penstock.sinks.sink import BatchMark, Evolution, Sink, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "note": "varchar(20)"})
VISITS = target_of({"id": "int", "note": "varchar(20)"}, name="shop.visits")
# For each kind of sink: the functions whose calls are steps, in addition to finished files.
STEPS = {
    "delta": [
        ("penstock.sinks.delta.table", "Delta", "commit"),
        ("penstock.sinks.delta.unwritten_table", None, "save_tables"),
        ("penstock.sinks.delta.unwritten_table", "UnwrittenDelta", "put_in_place"),
        ("penstock.sinks.delta.unwritten_table", "UnwrittenDelta", "commit"),
        ("penstock.sinks.delta.unwritten_table", None, "write_first_entry"),
    ],
    "iceberg": [("penstock.sinks.iceberg.table", "Iceberg", "commit")],
    "files": [
        ("penstock.sinks.files.sink", "FilesSink", "_publish"),
        ("penstock.sinks.files.sink", None, "_write_atomically"),
    ],
}


def batch(number: int) -> list[list[Changes]]:
    """Return the parts of a batch, which inserts one row, updates the previous row, and deletes the row
    before that.
    """
    change = [insert(10 * number, id=number, note="new")]
    if number > 1:
        change.append(
            update(10 * number + 1, {"id": number - 1, "note": "new"}, {"id": number - 1, "note": "old"})
        )
    if number > 2:
        change.append(delete(10 * number + 2, id=number - 2, note="old"))
    return [[changes_of(target, *change)] for target in (ORDERS, VISITS)]


def write(sink: Sink, number: int) -> None:
    """Write a batch as a pipeline does."""
    mark = BatchMark("shop", "g", number)
    receipts = []
    for part, changes in enumerate(batch(number)):
        for change in changes:
            sink.prepare(change.target, Evolution.EVOLVE)
        writer = sink.open(mark, part)
        for change in changes:
            writer.write(change)
        receipts.append(writer.finish())
    sink.commit(mark, receipts)


def main() -> None:
    """Read lines until the input ends."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    sink = make_sink(kind, settings_of(kind)(**settings))
    for module, _, _ in STEPS[kind]:
        import_module(module)
    for line in sys.stdin:
        number, last_step = map(int, line.split())
        child = os.fork()
        if not child:
            _die_at(kind, last_step)
            write(sink, number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status):
            raise SystemExit("the writer failed")
        print("killed" if os.WIFSIGNALED(status) else "done", flush=True)


def _die_at(kind: str, last_step: int) -> None:
    steps = 0

    def step() -> None:
        nonlocal steps
        if steps == last_step:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    def around(work: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **named: Any) -> Any:
            step()
            result = work(*arguments, **named)
            step()
            return result

        return stepped

    PartFiles.finish = around(PartFiles.finish)  # type: ignore[method-assign]
    for module, name, method in STEPS[kind]:
        owner: Any = import_module(module)
        owner = owner if name is None else getattr(owner, name)
        setattr(owner, method, around(getattr(owner, method)))


if __name__ == "__main__":
    main()
