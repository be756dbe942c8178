# SPDX-License-Identifier: Apache-2.0
"""Transactions in the formats of TiDB-Binlog's Drainer, compared with the original's output."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import penstock
from penstock._native import RowEventWriter, crc32c
from penstock.changes import Changes, DefiningStatement, Origin, Target
from penstock.errors import EventUnsupported, LimitExceeded, OptionInvalid, StateOutdated
from penstock.model import TableName
from penstock.pipeline.settings import pipeline_of_values
from penstock.protobuf import Message, encode
from penstock.sinks.drainer.sink import DrainerSink
from penstock.sinks.drainer.sink import Settings as FileSettings
from penstock.sinks.drainer_transactions import DrainerForm, DrainerTransactions
from penstock.sinks.kafka.sink import KafkaSink, Settings
from penstock.sinks.sink import BatchMark, Evolution, Spread
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.pipeline.local_runs import run_here
from tests.support.tidb.sample_log import SAMPLES, SERVER_ID, commit_timestamps, write_log

RECORD_HEAD = struct.Struct("<IQ")
ORDERS = target_of({"id": "bigint unsigned", "name": "varchar(20)"}, unique=(("name",),))
ITEMS = target_of({"id": "int", "price": "double"}, name="shop.items")


def sample_changes(folder: Path) -> list[Changes]:
    """Return the changes of the sample, in commit order. Each of its transactions changes a single table."""
    changes = []
    for batch in penstock.read_binlog(write_log(folder), tables="shop.*"):
        name = TableName.parse(batch.table)
        target = Target(name, batch.columns, batch.primary_key)
        changes.append(Changes(target, batch.to_arrow(), name))
    return sorted(changes, key=lambda change: change.rows.column("_commit_version")[0].as_py())


def written(form: DrainerForm, *changes: Changes) -> list[bytes]:
    transactions = DrainerTransactions(form)
    messages = [message for change in changes for message in transactions.add(change)]
    return messages + list(transactions.finish())


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file of a Drainer, with their checksums verified."""
    offset = 0
    while offset < len(content):
        magic, length = RECORD_HEAD.unpack_from(content, offset)
        start = offset + RECORD_HEAD.size
        record = content[start : start + length]
        (checksum,) = struct.unpack_from("<I", content, start + length)
        assert (magic, checksum) == (471_532_804, crc32c(record))
        yield record
        offset = start + length + 4


def without_timestamp(message: bytes) -> bytes:
    parts = Message(message)
    return encode((1, parts.unsigned(1)), (3, parts.view(3)))


def test_messages_for_kafka_are_those_of_the_original(tmp_path: Path) -> None:
    originals = Message((SAMPLES / "drainer_kafka.bin").read_bytes()).views(1)
    messages = written("kafka", *sample_changes(tmp_path))
    assert [without_timestamp(message) for message in messages] == [
        without_timestamp(bytes(original)) for original in originals
    ]


def test_records_of_files_are_those_of_the_original(tmp_path: Path) -> None:
    originals = [
        record
        for record in records((SAMPLES / "drainer_file.bin").read_bytes())
        if Message(record).unsigned(1) == 0
    ]
    assert written("file", *sample_changes(tmp_path)) == originals


def pipeline_records(folder: Path, *, statements: bool = True, last: str = "", **more: Any) -> list[bytes]:
    """Run a pipeline from the sample's log, with a `last` statement appended, into Drainer's files; return
    their records.
    """
    log, files = folder / "log", folder / "files"
    log.mkdir(exist_ok=True)
    path = write_log(log)
    if last:
        writer = RowEventWriter(cluster_id=0, server_id=SERVER_ID)
        commit_ts = max(commit_timestamps()) + 1
        event = writer.statement(commit_ts, path.stat().st_size, "shop", last, start_ts=commit_ts)
        path.write_bytes(path.read_bytes() + event)
    values = {
        "name": "files",
        "source": {"path": str(path), "name": "tidb", "tables": "shop.*"},
        "load": "none",
        "sink": {"drainer": {"path": str(files), "statements": statements}},
    }
    run_here(pipeline_of_values(values | more, folder))
    return [record for path in sorted(files.glob("binlog-*")) for record in records(path.read_bytes())]


def test_file_of_a_pipeline_has_the_statements_of_the_original(tmp_path: Path) -> None:
    created, *originals = records((SAMPLES / "drainer_file.bin").read_bytes())
    assert Message(created).text(4) == "CREATE DATABASE `shop`;;", "this statement names no selected table"
    assert pipeline_records(tmp_path) == originals


@pytest.mark.parametrize(
    "more",
    [{"steps": [{"route": {"to": "copy.{table}"}}]}, {"statements": False}],
    ids=["renamed tables", "setting"],
)
def test_statements_that_do_not_fit_the_target_are_not_written(tmp_path: Path, more: dict[str, Any]) -> None:
    kinds = {Message(record).unsigned(1) for record in pipeline_records(tmp_path, **more)}
    assert kinds == {0}


@pytest.mark.parametrize(
    "statement",
    ["TRUNCATE TABLE test", "DROP TABLE test", "DROP DATABASE shop", "ALTER TABLE part DROP PARTITION p0"],
)
@pytest.mark.parametrize("kinds", [["insert"], ["insert", "delete"]], ids=str)
def test_statement_that_removes_rows_is_written_if_deletes_are(
    statement: str, kinds: list[str], tmp_path: Path
) -> None:
    written = pipeline_records(tmp_path, last=statement, steps=[{"only": kinds}])
    texts = [Message(record).text(4) for record in written if Message(record).unsigned(1)]
    assert any("CREATE TABLE `test`" in text for text in texts)
    assert any(statement in text for text in texts) == ("delete" in kinds)


def test_statement_of_kafka_is_that_of_the_original() -> None:
    orders = TableName("shop", "orders")
    statement = DefiningStatement("DROP TABLE orders", "shop", (orders,), 7)
    transactions = DrainerTransactions("kafka")
    assert list(transactions.add(changes_of(ORDERS, insert(5, id=1, name="a")))) == []
    row, definition = map(Message, transactions.statement(statement))
    assert (row.unsigned(1), row.signed(2)) == (0, 5), "the open transaction precedes the statement"
    assert (definition.unsigned(1), definition.signed(2)) == (1, 7)
    content = definition.message(4)
    assert [content.text(number) for number in (1, 2, 3)] == ["shop", "orders", "DROP TABLE orders"]
    assert list(transactions.finish()) == []


@pytest.mark.parametrize(
    ("database", "tables", "names", "text"),
    [
        ("", ("shop.a",), ("shop", "a"), "DDL;"),
        ("other", ("shop.a",), ("other", "a"), "use `other`; DDL;"),
        ("a`b", ("shop.a", "shop.b"), ("a`b", ""), "use `a``b`; DDL;"),
        ("", ("shop.a", "shop.b"), ("", ""), "DDL;"),
    ],
)
def test_statement_runs_in_the_database_of_its_session(
    database: str, tables: tuple[str, ...], names: tuple[str, str], text: str
) -> None:
    statement = DefiningStatement("DDL", database, tuple(map(TableName.parse, tables)), 7)
    [message] = DrainerTransactions("kafka").statement(statement)
    content = Message(message).message(4)
    assert (content.text(1), content.text(2)) == names
    [record] = DrainerTransactions("file").statement(statement)
    assert Message(record).text(4) == text


def test_changes_of_a_transaction_are_one_message_by_table() -> None:
    messages = written(
        "kafka",
        changes_of(ORDERS, insert(5, 0, id=1, name="a")),
        changes_of(ITEMS, insert(5, 1, id=7, price=1.5)),
        changes_of(ORDERS, update(5, {"id": 1, "name": "a"}, {"id": 1, "name": None}, 2), delete(6, id=1)),
    )
    first, second = map(Message, messages)
    assert (first.signed(2), second.signed(2)) == (5, 6)
    orders, items = first.message(3).messages(1)
    assert [(table.text(2), len(table.messages(4))) for table in (orders, items)] == [
        ("orders", 2),
        ("items", 1),
    ]
    assert [mutation.unsigned(1) for mutation in orders.messages(4)] == [0, 1]
    new, old = orders.messages(4)[1].message(2), orders.messages(4)[1].message(3)
    assert [(column.unsigned(1), column.text(6)) for column in (new.messages(1)[1], old.messages(1)[1])] == [
        (1, ""),
        (0, "a"),
    ]
    assert [(key.text(1), key.text(2)) for key in orders.messages(5)] == [("PRIMARY", "id"), ("name", "name")]


def test_rows_of_a_load_are_messages_of_bounded_size() -> None:
    changes = changes_of(ORDERS, *(insert(5, row, id=row, name="x" * 20) for row in range(100_000)))
    loaded = Changes(changes.target, changes.rows, changes.source, Origin.LOAD)
    messages = written("kafka", loaded)
    assert len(messages) > 2
    assert max(map(len, messages)) < 600_000, "brokers accept 1,048,588 bytes by default"
    rows = sum(len(Message(message).message(3).messages(1)[0].views(4)) for message in messages)
    assert rows == 100_000
    assert len(written("kafka", changes)) == 1, "a transaction stays whole"


@pytest.mark.parametrize("form", ["kafka", "file"])
def test_transaction_above_the_limit_is_refused(form: DrainerForm) -> None:
    changes = [changes_of(ORDERS, insert(version, id=version, name="x" * 20)) for version in (5, 5, 6)]
    (size,) = {len(message) for message in written(form, changes[0])}
    fitting = DrainerTransactions(form, bytes_max=2 * size)
    assert len([message for change in changes for message in fitting.add(change)]) == 1
    limited = DrainerTransactions(form, bytes_max=size)
    assert list(limited.add(changes[0])) == []
    with pytest.raises(LimitExceeded, match="more than"):
        [message for _ in range(9) for message in limited.add(changes[1])]


def test_image_without_a_column_is_refused() -> None:
    made = insert(5, id=1)
    partial = [type(row)(row.change, row.version, row.values, absent=["name"]) for row in made]
    with pytest.raises(EventUnsupported, match="lacks a column"):
        written("kafka", changes_of(ORDERS, partial))


@pytest.mark.parametrize(
    ("type_text", "width"),
    [
        ("int", (11, 0)),
        ("int(10) unsigned", (10, 0)),
        ("smallint unsigned", (5, 0)),
        ("decimal(20,5)", (20, 5)),
        ("double", (22, -1)),
        ("time(6)", (17, 6)),
        ("datetime", (19, 0)),
        ("mediumblob", (16777215, 0)),
        ("enum('a','b''c')", (3, 0)),
        ("set('p','q','r')", (5, 0)),
    ],
)
def test_width_of_a_column_is_that_of_tidb(type_text: str, width: tuple[int, int]) -> None:
    [message] = written("kafka", changes_of(target_of({"id": "int", "v": type_text}), insert(1, id=1)))
    column = Message(message).message(3).messages(1)[0].messages(3)[1]
    assert (column.signed(4), column.signed(5)) == width


@pytest.mark.parametrize(
    "settings",
    [{"topic": "{table}"}, {"headers": True}, {"key": "none"}, {"order": "table"}, {"tombstones": False}],
)
def test_settings_that_whole_transactions_do_not_have_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="drainer"):
        Settings.model_validate({"servers": "b:9092", "topic": "t", "format": "drainer"} | settings)


def test_one_writer_gets_the_changes_of_all_tables() -> None:
    sink = KafkaSink(Settings.model_validate({"servers": "b:9092", "topic": "t", "format": "drainer"}))
    assert sink.spread is Spread.WHOLE
    assert sink.key(ORDERS) == ()


def read_folder(folder: Path) -> list[tuple[str, list[bytes]]]:
    """Return the index and the transactions of each file, with their checksums verified."""
    paths = sorted(folder.glob("binlog-*"))
    return [(path.name.split("-")[1], list(records(path.read_bytes()))) for path in paths]


def write_file(sink: DrainerSink, mark: BatchMark, *changes: Changes, commits: int = 1) -> None:
    writer = sink.open(mark, 0)
    for change in changes:
        writer.write(change)
    receipt = writer.finish()
    for _ in range(commits):
        sink.commit(mark, [receipt])


@pytest.fixture
def files(tmp_path: Path) -> DrainerSink:
    sink = DrainerSink(FileSettings(path=tmp_path / "out"))
    sink.prepare(ORDERS, Evolution.EVOLVE)
    return sink


def test_each_batch_is_a_file_of_transactions(files: DrainerSink) -> None:
    changes = changes_of(ORDERS, insert(5, id=1, name="a"), insert(6, id=2, name="b"))
    write_file(files, BatchMark("p", "1", 1), changes)
    write_file(files, BatchMark("p", "1", 2))
    write_file(files, BatchMark("p", "1", 3), changes_of(ORDERS, delete(7, id=1, name="a")))
    written_files = read_folder(files.settings.path)
    assert [index for index, _ in written_files] == [f"{0:016}", f"{1:016}"]
    versions = [Message(content).signed(2) for _, transactions in written_files for content in transactions]
    assert versions == [5, 6, 7]
    assert files.remembers("p", [ORDERS])
    assert not files.remembers("other", [ORDERS])


def test_replayed_batch_is_stored_once(files: DrainerSink) -> None:
    mark, changes = BatchMark("p", "1", 1), changes_of(ORDERS, insert(5, id=1, name="a"))
    write_file(files, mark, changes, commits=2)
    write_file(files, mark, changes)
    assert [len(transactions) for _, transactions in read_folder(files.settings.path)] == [1]
    assert not list(files.settings.path.glob(".penstock-staged-*"))


def test_batch_before_the_last_one_is_refused(files: DrainerSink) -> None:
    for number in (1, 2, 3):
        write_file(
            files, BatchMark("p", "1", number), changes_of(ORDERS, insert(number, id=number, name="a"))
        )
    with pytest.raises(StateOutdated, match="the target has batch 3"):
        write_file(files, BatchMark("p", "1", 2), changes_of(ORDERS, insert(4, id=4, name="a")))
    assert versions_of(files.settings.path) == [1, 2, 3]


def test_aborted_batch_leaves_nothing(files: DrainerSink) -> None:
    writer = files.open(BatchMark("p", "1", 1), 0)
    writer.write(changes_of(ORDERS, insert(5, id=1, name="a"), insert(6, id=2, name="b")))
    writer.abort()
    assert list(files.settings.path.iterdir()) == []


def test_pipeline_that_starts_over_continues_after_the_files_that_are_there(files: DrainerSink) -> None:
    for generation in ("1", "2"):
        write_file(files, BatchMark("p", generation, 1), changes_of(ORDERS, insert(5, id=1, name="a")))
    assert [index for index, _ in read_folder(files.settings.path)] == [f"{0:016}", f"{1:016}"]


def test_load_that_is_not_recorded_is_removed(files: DrainerSink) -> None:
    mark = BatchMark("p", "1", 1)
    write_file(files, mark, changes_of(ORDERS, insert(5, id=1, name="a")))
    assert files.settle_load(mark, [ORDERS]) is None
    assert read_folder(files.settings.path) == []


def versions_of(folder: Path) -> list[int]:
    return [Message(content).signed(2) for _, transactions in read_folder(folder) for content in transactions]


def test_replay_of_a_dead_letter_keeps_the_files_of_the_pipeline(files: DrainerSink) -> None:
    generations = [("1", 1), ("dead-letter/a", 1), ("1", 2), ("1", 3)]
    for version, (generation, number) in enumerate(generations):
        changes = changes_of(ORDERS, insert(version, id=version, name="a"))
        write_file(files, BatchMark("p", generation, number), changes, commits=2)
    assert versions_of(files.settings.path) == [0, 1, 2, 3]


def test_second_pipeline_in_a_folder_is_refused(files: DrainerSink) -> None:
    changes = changes_of(ORDERS, insert(5, id=1, name="a"))
    first, second = (files.open(BatchMark(name, "1", 1), 0) for name in ("a", "b"))
    for writer in (first, second):
        writer.write(changes)
    files.commit(BatchMark("a", "1", 1), [first.finish()])
    with pytest.raises(OptionInvalid, match=r"another pipeline \(a\)"):
        files.commit(BatchMark("b", "1", 1), [second.finish()])
    with pytest.raises(OptionInvalid, match=r"another pipeline \(a\)"):
        files.open(BatchMark("b", "1", 1), 0)
    assert versions_of(files.settings.path) == [5]


def test_commit_that_ended_before_its_file_had_a_name_is_completed(files: DrainerSink) -> None:
    mark = BatchMark("p", "1", 1)
    write_file(files, mark, changes_of(ORDERS, insert(5, id=1, name="a")))
    (path,) = files.settings.path.glob("binlog-*")
    path.unlink()
    write_file(files, BatchMark("p", "dead-letter/a", 1), changes_of(ORDERS, insert(4, id=2, name="a")))
    write_file(files, mark, changes_of(ORDERS, insert(5, id=1, name="a")))
    assert versions_of(files.settings.path) == [5, 4]


def test_unfinished_records_and_foreign_files_are_passed_over(files: DrainerSink) -> None:
    mark = BatchMark("p", "1", 1)
    write_file(files, mark, changes_of(ORDERS, insert(5, id=1, name="a")))
    (record,) = files.settings.path.glob(".penstock-*.json")
    record.rename(record.with_suffix(".new")).write_bytes(b"")
    (files.settings.path / "binlog-old-copy").mkdir()
    assert not files.remembers("p", [ORDERS])
    write_file(files, mark, changes_of(ORDERS, insert(6, id=2, name="b")))
    (files.settings.path / "binlog-old-copy").rmdir()
    assert versions_of(files.settings.path) == [5, 6]
