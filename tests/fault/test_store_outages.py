# SPDX-License-Identifier: Apache-2.0
"""Stores that fail within a batch: the same sink completes the batch when it is retried."""

from typing import Any

import pytest

from penstock.changes import Changes
from penstock.errors import TransientError
from penstock.sinks.sink import BatchMark, Evolution, Sink
from tests.support.pipeline.changes_made import changes_of, insert, target_of
from tests.support.sinks.backends import sink_backends
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import wait_until
from tools.servers import PartMissing

TARGET = target_of({"id": "int", "name": "varchar(40)"}, name="outages.orders")


def write(sink: Sink, changes: Changes, kill: Any = None) -> None:
    """Write a batch; `kill` is called in the middle of the batch."""
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


def goes_through(sink: Sink, changes: Changes) -> bool:
    """Retry a batch, as a pipeline does while its store is unavailable."""
    try:
        write(sink, changes)
    except TransientError:
        return False
    return True


@pytest.mark.timing
@pytest.mark.deep(keep=("clickhouse", "mongodb", "redis"))
@pytest.mark.parametrize(
    "name", ["clickhouse", "mongodb", "opensearch", "redis", pytest.param("redis_cluster", id="cluster")]
)
def test_batch_completes_once_its_store_returns(
    name: str, missing_part: MissingPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sinks.mongodb.sink._SELECT_MILLISECONDS_MAX", 500)
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
        wait_until(lambda: goes_through(sink, changes))
        assert len(backend.rows(sink, TARGET)) == 5000
    finally:
        sink.close()
        backend.close()
