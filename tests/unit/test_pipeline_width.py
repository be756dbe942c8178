# SPDX-License-Identifier: Apache-2.0
"""The cost of planning a batch of a pipeline with many tables: the work does not grow with the number of
pairs of tables.
"""

import json
import zlib
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.changes import Target
from penstock.engine.loading import Loading
from penstock.engine.shared_targets import SharedTargets
from penstock.engine.tables_record import TablesRecord
from penstock.engine.tracked_table import TrackedTable
from penstock.model import Column, TableName
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import Checkpoint, PipelineState, TableLoad, table_key
from penstock.pipeline.step import Step
from penstock.pipeline.verify.merges import may_share_rows, shard_of

TABLES = 300


def settings_of(tmp_path: Path, *steps: dict[str, Any], sink: Any = "stdout") -> PipelineSettings:
    return pipeline_of_values(
        {
            "name": "wide",
            "sources": [{"name": name, "url": "mysql://nobody@127.0.0.1:1"} for name in ("one", "two")],
            "sink": sink,
            "load": "none",
            "steps": list(steps),
        },
        tmp_path,
    )


def tables_of(count: int, random: Random | None = None) -> dict[str, TrackedTable]:
    """Return tables of two sources. With `random`, some names occur in both."""
    tables = {}
    for number in range(count):
        name = TableName("shop", f"t{number if random is None else random.randrange(count)}")
        source = "one" if random is None or random.random() < 0.5 else "two"
        tables[table_key(source, name)] = TrackedTable(target_of(name), {1: target_of(name)})
    return tables


def target_of(name: TableName) -> Target:
    return Target(name, (Column("id", "int", None, False), Column("v", "varchar(9)", "utf8mb4")), ("id",))


def count_targets(steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with each call of the first step's `target`."""
    calls: list[None] = []
    target = steps[0].target

    def counted(source: Target) -> Target | None:
        calls.append(None)
        return target(source)

    monkeypatch.setattr(steps[0], "target", counted)
    return calls


@pytest.mark.parametrize(
    "step",
    [
        {"route": {"to": "lake.{table}"}},
        {"route": {"to": "lake.{table}", "shard_column": "shard", "shard_value": "{instance}"}},
        {"route": {"to": "lake.{table}", "shard_column": "shard", "shard_value": "{table}"}},
    ],
    ids=["no shards", "shards of sources", "shards of tables"],
)
def test_tables_whose_rows_may_meet_are_those_of_which_a_pair_may(
    tmp_path: Path, step: dict[str, Any]
) -> None:
    settings = settings_of(tmp_path, step)
    steps = settings.make_steps()
    results = set()

    def pair_meets(shared: SharedTargets, *pair: str) -> bool:
        first, second = (shared.target_of(key) for key in pair)
        shards = [
            shard_of(steps, settings.steps, shared._tables[key].current, key.partition("/")[0])
            for key in pair
        ]
        assert first is not None
        assert second is not None
        return first.name == second.name and may_share_rows(*shards)

    for seed in range(60):
        random = Random(seed)
        tables = tables_of(random.randrange(1, 12), random)
        keys = set(random.sample(sorted(tables), random.randrange(len(tables) + 1)))
        shared = SharedTargets(settings, steps, tables)

        slow = any(pair_meets(shared, key, other) for key in keys for other in tables if other != key)
        assert shared.may_meet(keys) == slow, f"seed {seed}"
        results.add(slow)
    assert results == ({False} if "instance" in str(step) else {False, True})


def test_one_look_at_each_table_tells_whether_rows_may_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path, {"route": {"to": "lake.{table}"}})
    steps, tables = settings.make_steps(), tables_of(TABLES)
    calls = count_targets(steps, monkeypatch)
    assert not SharedTargets(settings, steps, tables).may_meet(tables.keys())
    assert len(calls) == TABLES


def test_loads_look_at_each_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, tables = settings_of(tmp_path), tables_of(TABLES)
    looks: list[None] = []

    class Known:
        """Tables that count how often their definitions are read."""

        def __init__(self) -> None:
            self.shared = SharedTargets(settings, [], tables)
            self.stopped: dict[str, str] = {}

        def known_targets(self) -> dict[str, Target]:
            looks.extend(None for _ in tables)
            return {key: table.current for key, table in tables.items()}

        def there(self) -> list[str]:
            return list(tables)

        def is_keyless(self, key: str) -> bool:
            return False

        def check_columns(self) -> None:
            """Report no missing columns."""

    with closing(PipelineState.open(settings.state, settings.name)) as state:
        loads = {key: TableLoad(1, pages="p", done=number % 2) for number, key in enumerate(tables)}
        checkpoint = replace(state.take(), loads=loads, planned=True)
        loading = Loading(settings, state, settings.make_sink(), 2)
        known: Any = Known()
        assert loading.planned(checkpoint, known) == checkpoint
        assert loading.is_loading(checkpoint)
    assert len(looks) <= TABLES


@pytest.mark.parametrize(("sink", "count"), [({"files": {"path": "feed"}}, TABLES * 10), ("stdout", 1_024)])
def test_batch_of_a_load_into_a_single_writer_is_small(tmp_path: Path, sink: Any, count: int) -> None:
    """A run that is killed again and again makes progress only by whole batches."""
    names = [TableName("shop", f"t{number}") for number in range(TABLES * 10)]
    settings = settings_of(tmp_path, sink=sink)
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        loading = Loading(settings, state, settings.make_sink(), 2)
        loading._chunks["p"] = {table_key("one", name): [Chunk(name, rows=10).to_json()] for name in names}
        loads = {key: TableLoad(1, pages="p") for key in loading._chunks["p"]}
        works, done, _ = loading.next(Checkpoint("1", loads=loads, planned=True))
        assert len(works) == len(done) == count


def test_record_of_tables_is_written_only_if_a_part_was_replaced(tmp_path: Path) -> None:
    settings, tables = settings_of(tmp_path), tables_of(3)
    targets = {table.current.name: table.current for table in tables.values()}
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        record = TablesRecord(state)
        version = -1

        def is_written() -> bool:
            nonlocal version
            before = version
            record.save(tables, targets, set())
            stored = state.store.get(state._at("tables"))
            assert stored is not None
            assert TablesRecord(state).read() == (tables, targets, set())
            version = stored.version
            return version != before

        first, second, _ = tables.values()
        assert is_written()
        assert not is_written()
        name = first.current.name
        first.current = first.definitions[2] = replace(first.current, primary_key=())
        assert is_written()
        targets[name] = first.current
        assert is_written()
        second.gone = True
        record.save(tables, targets, set())
        second.was_gone = True
        assert is_written(), "a table is gone once its batch is done"
        # A column that became visible or invisible is equal, but not identical.
        second.logged = (replace(second.current.columns[0], visible=True),)
        assert is_written()
        second.logged = (replace(second.current.columns[0], visible=False),)
        assert is_written()
        del tables[next(iter(tables))]
        assert is_written()
        assert not is_written()

        restarted = TablesRecord(state)
        read = restarted.read()
        restarted.save(*read)
        stored = state.store.get(state._at("tables"))
        assert stored is not None
        assert stored.version == version, "a restart writes nothing that it has only read"
        table = next(iter(read[0].values()))
        table.was_gone = not table.was_gone
        restarted.save(*read)
        assert TablesRecord(state).read()[0] != tables


def test_checkpoint_has_the_values_of_all_its_fields(tmp_path: Path) -> None:
    random = Random(17)
    for _ in range(20):
        loads = {
            f"one/shop.t{number}": TableLoad(
                random.randrange(9), random.randrange(9), where=random.choice((None, "id > 1")), floor=number
            )
            for number in range(random.randrange(5))
        }
        checkpoint = Checkpoint(
            "1", random.randrange(9), {"one": {"file": "b.1", "offset": 4}}, loads, {"one/shop.t9": "why"}
        )
        assert json.loads(zlib.decompress(checkpoint.encode())) == json.loads(json.dumps(asdict(checkpoint)))
        assert Checkpoint.decode(checkpoint.encode()) == checkpoint
