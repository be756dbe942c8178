# SPDX-License-Identifier: Apache-2.0
"""What a real server's log has, as changes for a sink, with targets as its tables have them now."""

from collections.abc import Iterator, Sequence
from itertools import islice

import penstock
from penstock.changes import Changes, Target
from penstock.model import ServerAddress, TablePatterns
from penstock.pipeline.load.targets import targets_of
from penstock.sinks.sink import BatchMark, Evolution, Receipt, Sink
from tools.servers import Server


def targets_in(server: Server, database: str) -> dict[str, Target]:
    """Return the targets of a database's tables, by `database.table`."""
    address = ServerAddress.parse(server.url("root"))
    return {str(one.name): one for one in targets_of(address, TablePatterns(f"{database}.*"))}


def logged_changes(server: Server, database: str, rows_max: int = 65536) -> Iterator[Changes]:
    """Yield all that the log has of a database, table by table within each stretch of it."""
    targets = targets_in(server, database)
    for batch in penstock.read_binlog(server.url(), tables=f"{database}.*", batch_rows_max=rows_max):
        target = targets[batch.table]
        yield Changes(target, batch.to_arrow(), target.name)


def prepare_all(sink: Sink, server: Server, database: str) -> dict[str, Target]:
    """Make the target's tables, and return the targets."""
    targets = targets_in(server, database)
    for target in targets.values():
        sink.prepare(target, Evolution.EVOLVE)
    return targets


def write_batch(sink: Sink, changes: Sequence[Changes], number: int = 1, part: int = 0) -> Receipt:
    """Write changes as one part of a batch."""
    mark = BatchMark("test", "1", number)
    writer = sink.open(mark, part)
    try:
        for one in changes:
            writer.write(one)
        receipt = writer.finish()
    except BaseException:
        writer.abort()
        raise
    sink.commit(mark, [receipt])
    return receipt


def write_in_batches(sink: Sink, changes: Iterator[Changes], size: int) -> None:
    """Write changes in batches of so many pieces, each batch twice, as after a lost answer."""
    number = 1
    while some := list(islice(changes, size)):
        write_batch(sink, some, number)
        write_batch(sink, some, number)
        number += 1
