# SPDX-License-Identifier: Apache-2.0
"""Files of TiCDC's storage sink as transactions: their order, repetitions, and refused files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    ChecksumMismatch,
    EventMalformed,
    EventUnsupported,
    OptionInvalid,
    PenstockError,
    SchemaUnknown,
    SequenceGap,
    SourceMissing,
    ValueMalformed,
)
from penstock.settings.ticdc import TicdcSettings
from penstock.ticdc import data_files
from penstock.ticdc.layout import DataFile, SchemaFile, classify
from penstock.ticdc.row_changes import RowChange
from penstock.ticdc.sink_reader import SinkReader
from penstock.ticdc.storage import LocalStorage, open_storage
from tests.support.ticdc.sink import KEY, NAME, Sink, column, deleted, inserted, message, updated


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    """A sink with one table, created at 100."""
    sink = Sink(tmp_path / "sink")
    sink.table("t", 100, [KEY, NAME])
    return sink


def reader(sink: Sink, position: int = 0, **settings: Any) -> SinkReader:
    return SinkReader(LocalStorage(sink.folder), TicdcSettings.model_validate(settings), position)


def described(row: RowChange) -> tuple[Any, ...]:
    images = (image for image in (row.before, row.after) if image is not None)
    texts = ("".join((cell or b"-").decode() for cell in image) for image in images)
    return (row.change.value[0], *texts)


def read(reader: SinkReader) -> list[tuple[int, Any]]:
    """Return each commit timestamp with its statements or its rows."""
    transactions: list[tuple[int, Any]] = []
    for transaction in reader.read():
        if transaction.statements:
            statements = [schema.query for schema in transaction.statements]
            transactions.append((transaction.commit_ts, statements))
        else:
            rows = [described(row) for _, rows in transaction.rows for row in rows]
            transactions.append((transaction.commit_ts, rows))
    return transactions


def test_rows_of_all_files_come_in_commit_order_below_the_checkpoint(sink: Sink) -> None:
    sink.table("u", 105, [KEY, NAME], "CREATE TABLE u (...)", 3)
    sink.rows("t/100/CDC000001.json", inserted(110, 1), inserted(130, 2))
    sink.rows("t/100/CDC000002.json", updated(140, 1, "n", "m"), inserted(200, 3))
    sink.rows("u/105/2026-11-23/CDC000001.json", inserted(120, 7, table="u"), inserted(140, 8, table="u"))
    sink.rows("u/105/2026-11-23/meta/CDC.index", "CDC000001.json")
    sink.checkpoint(200)
    source = reader(sink)
    assert read(source) == [
        (105, ["CREATE TABLE u (...)"]),
        (110, [("i", "1n")]),
        (120, [("i", "7n")]),
        (130, [("i", "2n")]),
        (140, [("u", "1n", "1m"), ("i", "8n")]),
    ]
    assert source.position == 199
    assert read(source) == []
    sink.checkpoint(201)
    assert read(source) == [(200, [("i", "3n")])]
    assert read(reader(sink, 140)) == [(200, [("i", "3n")])]


def test_rows_are_those_of_the_version_of_their_folder(sink: Sink) -> None:
    sink.rows("t/100/CDC000001.json", inserted(110, 1))
    sink.table("t", 120, [KEY, NAME, column("c", "INT", 11)], "ALTER TABLE t ADD COLUMN c INT", 5)
    row = message(130, "INSERT", {"id": "2", "name": None, "c": "5"})
    sink.rows("t/120/CDC000001.json", row)
    sink.database(140, "DROP DATABASE shop", 2)
    sink.checkpoint(150)
    assert read(reader(sink)) == [
        (110, [("i", "1n")]),
        (120, ["ALTER TABLE t ADD COLUMN c INT"]),
        (130, [("i", "2-5")]),
        (140, ["DROP DATABASE shop"]),
    ]


def test_rows_that_a_restarted_changefeed_repeats_are_read_once(sink: Sink) -> None:
    first = [inserted(110, 1), inserted(120, 2), deleted(120, 9)]
    sink.rows("t/100/CDC000001.json", *first)
    # TiCDC is interrupted inside the transaction 120 and restarts from a checkpoint before it, twice.
    sink.rows("t/100/CDC000002.json", *first[1:2])
    sink.rows("t/100/CDC000003.json", *first, inserted(130, 3))
    sink.checkpoint(140)
    source = reader(sink)
    assert read(source) == [
        (110, [("i", "1n")]),
        (120, [("d", "9n"), ("i", "2n")]),
        (130, [("i", "3n")]),
    ]
    sink.rows("t/100/CDC000004.json", inserted(130, 3), inserted(150, 4))
    sink.checkpoint(160)
    assert read(source) == [(150, [("i", "4n")])]


class CountedStorage(LocalStorage):
    """A folder that counts how often each file is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read_files: Counter[str] = Counter()

    def read(self, path: str, start: int = 0, bytes_max: int | None = None) -> bytes:
        self.read_files[Path(path).name] += 1
        return super().read(path, start, bytes_max)


def test_file_that_was_read_to_its_end_is_not_read_again(sink: Sink) -> None:
    sink.rows("t/100/CDC000001.json", inserted(110, 1))
    sink.rows("t/100/CDC000002.json", inserted(120, 2))
    sink.checkpoint(130)
    storage = CountedStorage(sink.folder)
    first = SinkReader(storage, TicdcSettings(), 0)
    assert [commit_ts for commit_ts, _ in read(first)] == [110, 120]
    storage.read_files.clear()
    # The last file grows, and a later file follows.
    sink.rows("t/100/CDC000002.json", inserted(120, 2), inserted(140, 3))
    sink.rows("t/100/CDC000003.json", inserted(150, 4))
    sink.checkpoint(160)
    second = SinkReader(storage, TicdcSettings(), first.position, first.last_file, first.finished)
    for each in (first, second):
        assert read(each) == [(140, [("i", "3n")]), (150, [("i", "4n")])]
        assert each.last_file == "shop/t/100/CDC000003.json"
        assert "CDC000001.json" not in storage.read_files
    storage.read_files.clear()
    sink.checkpoint(170)
    third = SinkReader(storage, TicdcSettings(), second.position, second.last_file, second.finished)
    assert read(third) == []
    assert not [name for name in storage.read_files if name.startswith("CDC")]


def test_files_of_partitions_and_writers_are_merged(sink: Sink) -> None:
    sink.rows("t/100/71/2026/CDC00000000000000000001.json", inserted(110, 1))
    sink.rows("t/100/72/2026/CDC00000000000000000001.json", deleted(110, 1))
    sink.rows("t/100/CDC_5f3c-a1_000001.json", inserted(105, 5))
    sink.checkpoint(140)
    assert read(reader(sink)) == [(105, [("i", "5n")]), (110, [("u", "1n", "1n")])]


def test_file_that_grows_is_read_on(sink: Sink) -> None:
    whole = inserted(110, 1) + "\r\n" + inserted(120, 2) + "\r\n"
    sink.write("shop/t/100/CDC000001.json", whole[: len(whole) - 20])
    sink.checkpoint(115)
    source = reader(sink)
    assert read(source) == [(110, [("i", "1n")])]
    sink.write("shop/t/100/CDC000001.json", whole)
    sink.checkpoint(130)
    assert read(source) == [(120, [("i", "2n")])]


def test_file_that_stays_torn_is_refused(sink: Sink) -> None:
    sink.write("shop/t/100/CDC000001.json", inserted(110, 1) + "\r\n" + inserted(120, 2))
    sink.checkpoint(115)
    source = reader(sink)
    assert read(source) == [(110, [("i", "1n")])]
    sink.checkpoint(130)
    with pytest.raises(EventMalformed, match="ends inside a row"):
        read(source)


def test_file_that_was_replaced_is_refused(sink: Sink) -> None:
    sink.rows("t/100/CDC000001.json", inserted(110, 1), inserted(120, 2))
    sink.checkpoint(130)
    source = reader(sink)
    assert len(read(source)) == 2
    sink.rows("t/100/CDC000001.json", inserted(140, 1))
    sink.checkpoint(150)
    with pytest.raises(EventMalformed, match="bytes"):
        read(source)


def test_long_rows_and_many_files_are_read_in_pieces(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_CHUNK_BYTES", 50)
    monkeypatch.setattr(data_files, "_PROBE_BYTES", 10)
    for number in range(1, 6):
        rows = [inserted(100 * number + step, step) for step in range(1, 8)]
        sink.rows(f"t/100/CDC{number:06d}.json", *rows)
    sink.checkpoint(1000)
    assert [commit_ts for commit_ts, _ in read(reader(sink))] == [
        100 * number + step for number in range(1, 6) for step in range(1, 8)
    ]


@pytest.mark.parametrize(
    "path",
    [
        "notes.txt",
        "shop/notes.txt",
        "shop/t/100/CDC1.json",
        "shop/t/100/CDC000001.parquet",
        "shop/t/100/x/CDC000001.json",
        "shop/t/100/71/2026-11-23/9/CDC000001.json",
        "shop/t/meta/schema_100.json",
        "shop/t/x/meta/schema_100_0000000001.json",
        "CDC000001.json",
    ],
)
def test_file_that_the_sink_does_not_write_is_refused(path: str) -> None:
    with pytest.raises(EventMalformed, match="not a file of TiCDC"):
        classify(path)


def test_paths_tell_tables_versions_and_sequences() -> None:
    assert classify("metadata") is None
    assert classify("shop/t/100/2026-11/meta/CDC_a-1.index") is None
    assert classify("shop/t/100/CDC000001.json.tmp.5bd5ef63-0a3c-4f2c-8f5b-ab1da7f8c3a1") is None
    assert classify("shop/meta/schema_9_0000000012.json") == SchemaFile(
        "shop/meta/schema_9_0000000012.json", "shop", "", 9, 12
    )
    # A table may have the name of a folder.
    assert classify("shop/meta/meta/schema_9_0000000012.json") == SchemaFile(
        "shop/meta/meta/schema_9_0000000012.json", "shop", "meta", 9, 12
    )
    path = "shop/t/100/71/2026-11-23/CDC_w-1_000002.csv"
    assert classify(path) == DataFile(path, "shop", "t", 100, "shop/t/100/71/2026-11-23/w-1", 2, "csv")


@pytest.mark.parametrize(
    ("checksum", "columns"),
    [
        (3233644819, None),
        (
            785427252,
            [
                column("Id", "INT", 11, ColumnNullable="false", ColumnIsPk="true"),
                column("LastName", "VARCHAR", 128, ColumnNullable="false"),
                column("FirstName", "VARCHAR", 64),
                column("Birthday", "DATETIME"),
            ],
        ),
    ],
)
def test_checksums_of_definitions_are_those_of_ticdc(checksum: int, columns: Any) -> None:
    """The names are those of the files in tiflow's own tests."""
    from penstock.ticdc.schema_files import definition_checksum

    table = "table1" if columns else ""
    values = {"Table": table, "Schema": "schema1", "TableColumns": columns}
    assert definition_checksum(values) == checksum


@pytest.mark.parametrize(
    ("line", "error", "why"),
    [
        ("{", EventMalformed, "not JSON"),
        ("[" * 100_000, EventMalformed, "not JSON"),
        ("[]", EventMalformed, "not an object"),
        (message(110, "INSERT", {"id": "1", "name": "n"}, type=[]), EventMalformed, "type"),
        (inserted(110, 1).replace('"old": null', '"old": []'), EventMalformed, "one row"),
        (message(110, "INSERT", {"id": "1", "name": "n"}, extra=1), EventMalformed, "extra"),
        (message(110, "QUERY", {"id": "1", "name": "n"}), EventMalformed, "QUERY"),
        (message(110, "INSERT", {"id": "1", "name": "n"}, table="u"), EventMalformed, "shop.u"),
        (message(110, "INSERT", {"id": "1", "name": "n"}, _tidb=None), EventUnsupported, "commit timestamp"),
        (
            message(110, "DELETE", {"id": "1", "name": "n"}, _tidb={"commitTs": 110, "onlyHandleKey": True}),
            EventUnsupported,
            "not complete",
        ),
        (message(110, "INSERT", {"id": "1", "name": "n"}, _tidb={"commitTs": -1}), EventMalformed, "-1"),
        (message(110, "UPDATE", {"id": "1", "name": "n"}), EventUnsupported, "UPDATE"),
        (message(110, "DELETE", {"id": "1"}), EventUnsupported, "name"),
        (message(110, "INSERT", {"id": "1", "name": "n", "x": "1"}), EventUnsupported, "x"),
        (message(110, "INSERT", {"id": 1, "name": "n"}), ValueMalformed, "id"),  # type: ignore[dict-item]
    ],
)
def test_message_of_another_form_is_refused(
    sink: Sink, line: str, error: type[PenstockError], why: str
) -> None:
    sink.rows("t/100/CDC000001.json", line)
    sink.checkpoint(200)
    with pytest.raises(error, match=why) as caught:
        read(reader(sink))
    assert "CDC000001.json" in str(caught.value)


def test_rows_that_go_back_in_time_are_refused(sink: Sink) -> None:
    sink.rows("t/100/CDC000001.json", inserted(120, 1), inserted(110, 2))
    sink.checkpoint(200)
    with pytest.raises(EventMalformed, match="goes back"):
        read(reader(sink))


def test_missing_files_are_noticed(sink: Sink) -> None:
    sink.rows("t/100/CDC000003.json", inserted(110, 1))
    sink.checkpoint(105)
    source = reader(sink)
    # The rows are not due yet, so earlier files may still arrive.
    assert read(source) == []
    sink.checkpoint(200)
    with pytest.raises(SequenceGap, match="from number 1 on"):
        read(source)
    sink.rows("t/999/CDC000001.json", inserted(110, 1))
    with pytest.raises(SchemaUnknown, match="999"):
        read(reader(sink))


def test_sink_may_expire_while_it_is_read_without_changes(sink: Sink) -> None:
    sink.rows("t/100/2026-11-23/CDC000001.json", inserted(110, 1))
    sink.checkpoint(120)
    source = reader(sink)
    assert read(source) == [(110, [("i", "1n")])]
    sink.checkpoint(130)
    assert read(source) == []
    (sink.folder / "shop/t/100/2026-11-23/CDC000001.json").unlink()
    sink.rows("t/100/2026-11-24/CDC000001.json", inserted(130, 2))
    sink.checkpoint(140)
    assert read(source) == [(130, [("i", "2n")])]


def test_damaged_schema_file_is_refused(sink: Sink) -> None:
    path = next(sink.folder.glob("shop/t/meta/schema_*.json"))
    sink.checkpoint(200)
    good = path.read_text()
    path.write_text(good.replace('"20"', '"21"'))
    with pytest.raises(ChecksumMismatch):
        read(reader(sink))
    for damaged in (
        good.replace('"Type"', '"Kind"'),
        good.replace('"Version": 1', '"Version": 2'),
        good.replace('"TableVersion": 100', '"TableVersion": 101'),
        good.replace("VARCHAR", "VECTOR"),
        good[:-10],
        json.dumps([]),
    ):
        path.write_text(damaged)
        with pytest.raises((EventMalformed, EventUnsupported)):
            read(reader(sink))


def test_tables_without_a_key_are_read_from_one_file_a_transaction(sink: Sink) -> None:
    sink.table("k", 101, [NAME])
    row = message(110, "INSERT", {"name": "x"}, table="k")
    sink.rows("k/101/CDC000001.json", row, row)
    sink.checkpoint(200)
    assert read(reader(sink)) == [(110, [("i", "x"), ("i", "x")])]
    sink.rows("k/101/CDC000002.json", row)
    with pytest.raises(EventUnsupported, match="no primary key"):
        read(reader(sink))


def test_virtual_columns_are_left_out(sink: Sink) -> None:
    sink.table("v", 101, [KEY, column("twice", "INT", 11), NAME])
    sink.rows("v/101/CDC000001.json", inserted(110, 1, table="v"))
    sink.checkpoint(200)
    assert read(reader(sink, virtual_columns=("shop.v.twice",))) == [(110, [("i", "1n")])]
    with pytest.raises(EventUnsupported, match="twice"):
        read(reader(sink))


def timestamp_sink(sink: Sink, text: str) -> Sink:
    sink.table("z", 101, [KEY, column("at", "TIMESTAMP", ColumnScale="3")])
    sink.rows("z/101/CDC000001.json", message(110, "INSERT", {"id": "1", "at": text}, table="z"))
    sink.checkpoint(200)
    return sink


def test_timestamps_are_converted_from_the_zone_of_ticdc(sink: Sink) -> None:
    timestamp_sink(sink, "2026-11-23 08:00:00.120")
    source = reader(sink, time_zone="Asia/Shanghai")
    assert read(source) == [(110, [("i", "12026-11-23 00:00:00.120")])]
    with pytest.raises(OptionInvalid, match="TIMESTAMP"):
        read(reader(sink))


@pytest.mark.parametrize("text", ["2026-10-25 02:30:00", "2026-03-29 02:30:00", "soon"])
def test_timestamp_that_is_no_instant_is_refused(sink: Sink, text: str) -> None:
    timestamp_sink(sink, text)
    with pytest.raises(ValueMalformed):
        read(reader(sink, time_zone="Europe/Berlin"))


def test_zero_timestamp_has_no_zone(sink: Sink) -> None:
    timestamp_sink(sink, "0000-00-00 00:00:00")
    assert read(reader(sink, time_zone="Asia/Shanghai")) == [(110, [("i", "10000-00-00 00:00:00")])]


@pytest.mark.parametrize(
    "metadata",
    ["", "{}", '{"checkpoint-ts": "1"}', '{"checkpoint-ts": 1, "x": 2}', f'{{"checkpoint-ts": {1 << 63}}}'],
)
def test_metadata_of_another_form_is_refused(sink: Sink, metadata: str) -> None:
    sink.write("metadata", metadata)
    with pytest.raises(EventMalformed, match="checkpoint"):
        read(reader(sink))


def test_sink_without_a_checkpoint_is_named(sink: Sink) -> None:
    with pytest.raises(SourceMissing, match="metadata"):
        read(reader(sink))
    with pytest.raises(OptionInvalid, match="absolute path"):
        open_storage("ticdc+file://here")


def test_object_store_is_read_like_a_folder(sink: Sink) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    sink.rows("t/100/CDC000001.json", inserted(110, 1))
    sink.checkpoint(200)
    for path in sink.folder.rglob("*.*"):
        files.pipe(f"/ticdc-bucket/shop/{path.relative_to(sink.folder)}", path.read_bytes())
    files.pipe("/ticdc-bucket/shop/metadata", (sink.folder / "metadata").read_bytes())
    try:
        storage = open_storage("ticdc+memory://ticdc-bucket/shop")
        assert read(SinkReader(storage, TicdcSettings(), 0)) == [(110, [("i", "1n")])]
    finally:
        files.rm("/ticdc-bucket", recursive=True)
