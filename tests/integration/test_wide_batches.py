# SPDX-License-Identifier: Apache-2.0
"""One batch with rows of many tables: bounded memory for all of them together, and isolated failures."""

import random
from pathlib import Path
from typing import Any

import deltalake
import pyarrow.parquet as parquet
import pytest

from penstock.changes import Changes, Origin, Target
from penstock.errors import ConnectionLost
from penstock.sinks.delta.table import Delta
from penstock.sinks.files import sink as files_sink
from penstock.sinks.lake import copy_on_write, parquet_files
from penstock.sinks.lake import table as lake_table
from penstock.sinks.lake.buffered_tables import BufferedTables
from penstock.sinks.lake.parquet_files import PartFiles
from penstock.sinks.sink import BatchMark, Evolution, Sink, Writer, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update

TABLES = [target_of({"id": "int", "note": "varchar(200)"}, name=f"shop.t{number}") for number in range(12)]
MEMORY_BYTES = 12_000
Rows = dict[str, list[tuple[int, str]]]


def sink_of(kind: str, path: Path, **settings: Any) -> Sink:
    sink = make_sink(kind, settings_of(kind)(path=str(path), **settings))
    for target in TABLES:
        sink.prepare(target, Evolution.EVOLVE)
    # Tables without rows are created now.
    sink.close()
    return sink


def with_memory(sink: Sink, memory_bytes: int) -> Sink:
    """Return a lake sink with less memory than its settings allow."""
    sink.settings = sink.settings.model_copy(update={"memory_bytes": memory_bytes})  # type: ignore[attr-defined]
    return sink


def write_batch(sink: Sink, mark: BatchMark, batch: list[Changes]) -> None:
    writer = sink.open(mark, 0)
    for changes in batch:
        writer.write(changes)
    sink.commit(mark, [writer.finish()])


def random_changes(chance: random.Random, state: dict[str, dict[int, str]]) -> list[Changes]:
    """Return changes of all tables in turn, and apply them to their state by table."""
    batch = []
    for step in range(6):
        for target in chance.sample(TABLES, len(TABLES)):
            rows, made = state.setdefault(target.name.table, {}), []
            for _ in range(chance.randrange(1, 40)):
                key, version = chance.randrange(60), step * 1_000 + len(made)
                if key not in rows:
                    rows[key] = f"{version} {'x' * chance.randrange(100)}"
                    made.append(insert(version, id=key, note=rows[key]))
                elif chance.random() < 0.3:
                    made.append(delete(version, id=key, note=rows.pop(key)))
                else:
                    before, rows[key] = rows[key], f"{version} updated"
                    made.append(update(version, {"id": key, "note": before}, {"id": key, "note": rows[key]}))
            batch.append(changes_of(target, *made))
    return batch


def delta_rows(path: Path) -> Rows:
    return {
        target.name.table: sorted(
            (row["id"], row["note"])
            for row in deltalake.DeltaTable(str(path / "shop" / target.name.table))
            .to_pyarrow_table()
            .to_pylist()
        )
        for target in TABLES
    }


def file_rows(path: Path) -> Rows:
    return {
        target.name.table: [
            (row["id"], row["note"])
            for file in sorted((path / "shop" / target.name.table).glob("[!_]*.parquet"))
            for row in parquet.read_table(file).to_pylist()
        ]
        for target in TABLES
    }


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of all buffers of a writer after each write."""
    sizes: list[int] = []
    note = BufferedTables.note

    def noted(self: BufferedTables, buffer: Any) -> None:
        note(self, buffer)
        sizes.append(sum(other.bytes for other in self._buffers.values()))

    monkeypatch.setattr(BufferedTables, "note", noted)
    return sizes


def test_mirrors_of_a_batch_share_the_memory_and_have_the_same_rows(
    tmp_path: Path, buffered: list[int]
) -> None:
    chance, state = random.Random(4), dict[str, dict[int, str]]()
    roomy, narrow = sink_of("delta", tmp_path / "roomy"), sink_of("delta", tmp_path / "narrow")
    with_memory(narrow, MEMORY_BYTES)
    for number in (1, 2):
        batch = random_changes(chance, state)
        write_batch(roomy, BatchMark("wide", "g", number), batch)
        assert max(buffered) > 4 * MEMORY_BYTES, "the batch exceeds the bound"
        buffered.clear()
        write_batch(narrow, BatchMark("wide", "g", number), batch)
        assert max(buffered) <= MEMORY_BYTES
        buffered.clear()
        expected = {table: sorted(rows.items()) for table, rows in state.items()}
        assert delta_rows(tmp_path / "roomy") == expected
        assert delta_rows(tmp_path / "narrow") == expected


@pytest.mark.parametrize("kind", ["files", "delta"])
def test_load_of_many_tables_is_written_in_bounded_memory(
    tmp_path: Path, buffered: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    chance = random.Random(8)
    batch = [
        changes_of(
            target,
            *(
                insert(1, id=step * 50 + row, note=f"{row} {'y' * chance.randrange(120)}")
                for row in range(50)
            ),
            origin=Origin.LOAD,
        )
        for step in range(6)
        for target in chance.sample(TABLES, len(TABLES))
    ]
    mark = BatchMark("wide", "g", 1, loads=True)
    roomy, narrow = sink_of(kind, tmp_path / "roomy"), sink_of(kind, tmp_path / "narrow")
    write_batch(roomy, mark, batch)
    assert max(buffered) > 4 * MEMORY_BYTES, "the batch exceeds the bound"
    buffered.clear()
    if kind == "delta":
        with_memory(narrow, MEMORY_BYTES)
    else:
        monkeypatch.setattr(files_sink, "_BUFFERED_BYTES_MAX", MEMORY_BYTES)
    write_batch(narrow, mark, batch)
    assert max(buffered) <= MEMORY_BYTES
    if kind == "delta":
        assert delta_rows(tmp_path / "narrow") == delta_rows(tmp_path / "roomy")
    else:
        narrow_rows, roomy_rows = file_rows(tmp_path / "narrow"), file_rows(tmp_path / "roomy")
        assert {table: sorted(rows) for table, rows in narrow_rows.items()} == {
            table: sorted(rows) for table, rows in roomy_rows.items()
        }


def test_small_files_are_rewritten_like_larger_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, state = random.Random(5), dict[str, dict[int, str]]()
    whole, divided = sink_of("delta", tmp_path / "whole"), sink_of("delta", tmp_path / "divided")
    for number in (1, 2, 3):
        batch = random_changes(chance, state)
        write_batch(whole, BatchMark("wide", "g", number), batch)
        with monkeypatch.context() as patch:
            patch.setattr(copy_on_write, "_WHOLE_BYTES_MAX", 0)
            patch.setattr(parquet_files, "_PLAIN_ROWS_MAX", 0)
            write_batch(divided, BatchMark("wide", "g", number), batch)
        expected = {table: sorted(rows.items()) for table, rows in state.items()}
        assert delta_rows(tmp_path / "whole") == expected
        assert delta_rows(tmp_path / "divided") == expected


@pytest.mark.parametrize("loads", [False, True])
def test_log_entries_of_a_batch_are_synced_together_also_if_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    synced: list[list[str]] = []
    monkeypatch.setattr(lake_table, "sync_paths", lambda paths: synced.append(sorted(paths)))
    sink = sink_of("delta", tmp_path)
    synced.clear()
    origin = Origin.LOAD if loads else Origin.LOG
    batch = [changes_of(target, insert(1, id=1, note="a"), origin=origin) for target in TABLES]
    entries = sorted(
        str(tmp_path / "shop" / target.name.table / f"_delta_log/{1:020}.json") for target in TABLES
    )
    for _ in range(2):
        write_batch(sink, BatchMark("wide", "g", 1, loads=loads), batch)
        assert [paths for paths in synced if paths] == [entries]
        synced.clear()


def test_no_file_is_open_for_a_table_without_buffered_rows(tmp_path: Path) -> None:
    """Thousands of tables would otherwise exceed the number of files that a process may open."""
    (tmp_path / "t").mkdir()
    sink = sink_of("delta", tmp_path)
    table = sink.open_prepared(TABLES[0])  # type: ignore[attr-defined]
    files: PartFiles = sink.output(table)  # type: ignore[attr-defined]
    files.write(table.schema.empty_table().from_pylist([{"id": 1, "note": "a"}], schema=table.schema))
    assert files.bytes > 0
    files.spill()
    assert files.bytes == 0
    assert files._stream is None


def fail_once(patch: pytest.MonkeyPatch, target: Target) -> None:
    """Let the next commit of a table fail."""
    commit, failed = Delta.commit, list[str]()

    def failing(self: Delta, *words: Any) -> None:
        if self._url.endswith(f"/{target.name.table}") and not failed:
            failed.append(self._url)
            raise ConnectionLost("no answer")
        commit(self, *words)

    patch.setattr(Delta, "commit", failing)


def test_failed_commit_names_its_table_and_the_batch_is_complete_after_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, state = random.Random(9), dict[str, dict[int, str]]()
    sink, mark = sink_of("delta", tmp_path), BatchMark("wide", "g", 1)
    batch = random_changes(chance, state)
    fail_once(monkeypatch, TABLES[7])
    writer: Writer = sink.open(mark, 0)
    for changes in batch:
        writer.write(changes)
    with pytest.raises(ConnectionLost):
        writer.finish()
    assert writer.at == TABLES[7].name
    writer.abort()
    write_batch(sink, mark, batch)
    expected = {table: sorted(rows.items()) for table, rows in state.items()}
    assert delta_rows(tmp_path) == expected
    versions = [deltalake.DeltaTable(str(tmp_path / "shop" / t.name.table)).version() for t in TABLES]
    assert versions == [1] * len(TABLES), "no table has the batch twice"


def test_aborted_batch_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table whose rows are refused keeps the files of the others from being committed."""
    chance, state = random.Random(2), dict[str, dict[int, str]]()
    sink = with_memory(sink_of("delta", tmp_path), MEMORY_BYTES)
    refused = str(tmp_path / "shop" / TABLES[-1].name.table)
    files = Delta.files

    def refuse(self: Delta) -> Any:
        if self._url == refused:
            raise ConnectionLost("no answer")
        return files(self)

    monkeypatch.setattr(Delta, "files", refuse)
    writer = sink.open(BatchMark("wide", "g", 1), 0)
    for changes in random_changes(chance, state):
        writer.write(changes)
    with pytest.raises(ConnectionLost):
        writer.finish()
    assert writer.at == TABLES[-1].name
    writer.abort()
    assert list(tmp_path.rglob("*.parquet")) == []
