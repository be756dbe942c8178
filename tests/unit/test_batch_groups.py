# SPDX-License-Identifier: Apache-2.0
"""Tests which chunks share a task, and that a batch's record keeps the groups."""

from dataclasses import replace
from random import Random

from penstock.engine.batch_plan import groups_for
from penstock.limits import SMALL_TABLE_ROWS
from penstock.model import TableName
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.record import BatchRecord, ChunkWork


def chunk_of(number: int, rows: int, *, exact: bool = False) -> ChunkWork:
    name = TableName("shop", f"t{number}")
    return ChunkWork("one", name, Chunk(name, rows=rows).to_json(), exact=exact)


def record_of(chunks: list[ChunkWork], groups: tuple[int, ...]) -> BatchRecord:
    return BatchRecord(1, {}, {}, (), tuple(chunks), 2, groups=groups)


def test_small_chunks_share_tasks_and_others_have_their_own() -> None:
    random = Random(7)
    for _ in range(200):
        cores = random.randrange(1, 9)
        chunks = [
            chunk_of(number, random.choice((0, 10, SMALL_TABLE_ROWS, SMALL_TABLE_ROWS + 1)))
            for number in range(random.randrange(60))
        ]
        record = record_of(chunks, groups_for(chunks, cores))
        assert [number for task in record.tasks for number in task] == list(range(len(chunks)))
        small = [chunk.chunk["rows"] <= SMALL_TABLE_ROWS for chunk in chunks]
        for task in record.tasks:
            assert len(task) == 1 or all(small[number] for number in task)
            assert len(task) <= max(1, sum(small) // cores), "every core has something to do"


def test_thousands_of_small_tables_need_few_tasks() -> None:
    chunks = [chunk_of(number, 10) for number in range(4_096)]
    assert len(groups_for(chunks, 2)) == 16


def test_exact_load_is_alone() -> None:
    chunks = [chunk_of(0, 1), chunk_of(1, 1, exact=True), chunk_of(2, 1)]
    assert groups_for(chunks, 1) == (1, 1, 1)


def test_record_keeps_its_groups_and_one_without_has_a_task_for_each_chunk() -> None:
    """If an earlier version began a batch, the sink identifies the parts by chunk number."""
    record = record_of([chunk_of(number, 1) for number in range(5)], (2, 3))
    assert BatchRecord.from_json(record.to_json()) == record
    assert record.tasks == (range(2), range(2, 5))
    earlier = replace(record, groups=())
    assert "groups" not in earlier.to_json()
    assert BatchRecord.from_json(earlier.to_json()).tasks == tuple(range(n, n + 1) for n in range(5))
