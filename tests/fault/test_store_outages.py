# SPDX-License-Identifier: Apache-2.0
"""Stores that die under a batch: the batch can be tried again, and the same sink goes on with it."""

from typing import Any

import pytest

from penstock.changes import Changes
from penstock.errors import TransientError
from penstock.sinks.sink import BatchMark, Evolution, Sink
from tests.changes_made import changes_of, insert, target_of
from tests.fixture_types import MissingPart
from tests.sink_backends import sink_backends
from tools.servers import PartMissing

TARGET = target_of({"id": "int", "name": "varchar(40)"}, name="outages.orders")


def write(sink: Sink, changes: Changes, kill: Any = None) -> None:
    """Write a batch; `kill` is called in its middle."""
    sink.prepare(TARGET, Evolution.EVOLVE)
    mark = BatchMark("outages", "1", 1)
    writer = sink.open(mark, 0)
    try:
        writer.write(changes)
        if kill is not None:
            kill()
        writer.write(changes)
        sink.commit(mark, [writer.finish()])
    except BaseException:
        writer.abort()
        raise


@pytest.mark.parametrize("name", ["clickhouse", "mongodb", "redis"])
def test_a_batch_goes_through_once_its_store_is_back(
    name: str, missing_part: MissingPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sinks.targets.mongodb._SELECT_MILLISECONDS_MAX", 500)
    backend: Any = sink_backends()[name]()
    try:
        backend.start()
    except PartMissing as error:
        missing_part(name, str(error))
    sink = backend.sink()
    changes = changes_of(TARGET, *(insert(1, number, id=number, name="a") for number in range(5000)))
    try:
        with pytest.raises(TransientError):
            write(sink, changes, backend.server.kill)
        with pytest.raises(TransientError):
            write(sink, changes)
        backend.server.start()
        write(sink, changes)
        assert len(backend.rows(sink, TARGET)) == 5000
    finally:
        sink.close()
        backend.close()
