# SPDX-License-Identifier: Apache-2.0
"""Changes for a sink from a real server's log, with targets for the current tables.

`logged_corpus` caches the changes and the final rows of a busy workload. It is recorded once per process, and
the tests of all sinks write it into separate databases.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import pytest

import penstock
from penstock.changes import Changes, Target
from penstock.model import ServerAddress, TableName, TablePatterns
from penstock.pipeline.load.targets import targets_of
from penstock.sinks.sink import BatchMark, Evolution, Receipt, Sink
from tests.support.pipeline.oracle import Source, source_rows
from tests.support.pipeline.workload import Workload
from tools.servers import Server

_CORPORA = pytest.StashKey[dict[str, "LoggedCorpus"]]()
_CORPUS_DATABASE = "sink_corpus"
_ACTIONS = 150


@dataclass(frozen=True)
class LoggedCorpus:
    """The changes of a workload in log order, and the final rows of its tables.

    `targets` and `rows` are by table name, without the database.
    """

    changes: Sequence[Changes]
    targets: Mapping[str, Target]
    rows: Mapping[str, Source]

    def into(self, database: str, *, keyless: bool = True) -> "LoggedCorpus":
        """Return this corpus for targets in another database; `keyless` includes tables without a key."""
        targets = {
            table: replace(target, name=TableName(database, table))
            for table, target in self.targets.items()
            if keyless or target.primary_key
        }
        changes = [
            replace(piece, target=targets[piece.source.table])
            for piece in self.changes
            if piece.source.table in targets
        ]
        return LoggedCorpus(changes, targets, {table: self.rows[table] for table in targets})

    def prepare(self, sink: Sink) -> None:
        """Prepare all tables in a sink."""
        for target in self.targets.values():
            sink.prepare(target, Evolution.EVOLVE)


def logged_corpus(server: Server, config: pytest.Config) -> LoggedCorpus:
    """Return the corpus of a server's flavor; the first use in this process records it."""
    corpora = config.stash.setdefault(_CORPORA, {})
    if server.flavor not in corpora:
        corpora[server.flavor] = _write_corpus(server)
    return corpora[server.flavor]


def _write_corpus(server: Server) -> LoggedCorpus:
    server.sql(f"CREATE DATABASE {_CORPUS_DATABASE}")
    workload = Workload(server, _CORPUS_DATABASE, seed=11, keyless=True, truncates=False)
    workload.create()
    workload.run(_ACTIONS)
    targets = targets_in(server, _CORPUS_DATABASE)
    by_table = {target.name.table: target for target in targets.values()}
    changes = list(logged_changes(server, _CORPUS_DATABASE, rows_max=400))
    rows = {table: source_rows(server, _CORPUS_DATABASE, table) for table in by_table}
    server.sql(f"DROP DATABASE {_CORPUS_DATABASE}")
    assert all(rows.values()), "the workload left a table empty"
    return LoggedCorpus(changes, by_table, rows)


def targets_in(server: Server, database: str) -> dict[str, Target]:
    """Return the targets of a database's tables, by `database.table`."""
    address = ServerAddress.parse(server.url("root"))
    return {str(target.name): target for target in targets_of(address, TablePatterns(f"{database}.*"))}


def logged_changes(server: Server, database: str, rows_max: int = 65536) -> Iterator[Changes]:
    """Yield all logged changes of a database, table by table within each range of the log."""
    targets = targets_in(server, database)
    for batch in penstock.read_binlog(server.url(), tables=f"{database}.*", batch_rows_max=rows_max):
        target = targets[batch.table]
        yield Changes(target, batch.to_arrow(), target.name)


def write_batch(sink: Sink, changes: Sequence[Changes], number: int = 1, part: int = 0) -> Receipt:
    """Write changes as one part of a batch."""
    mark = BatchMark("test", "1", number)
    writer = sink.open(mark, part)
    try:
        for piece in changes:
            writer.write(piece)
        receipt = writer.finish()
    except BaseException:
        writer.abort()
        raise
    sink.commit(mark, [receipt])
    return receipt


def write_in_batches(sink: Sink, changes: Sequence[Changes], size: int) -> None:
    """Write changes in batches of `size` pieces, each batch twice, as after a lost response."""
    pieces = iter(changes)
    number = 1
    while batch := list(islice(pieces, size)):
        for _ in range(2):
            write_batch(sink, batch, number)
        number += 1
