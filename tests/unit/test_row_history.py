# SPDX-License-Identifier: Apache-2.0
import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest

from penstock._native import BlockCutter
from penstock.cli import history as history_verb
from penstock.cli.shared import change_lines
from penstock.console.changed_cells import changed_cells
from penstock.errors import ChecksumMismatch, OptionInvalid
from penstock.limits import HISTORIES_MAX
from penstock.logstore.log import Log
from penstock.logstore.records import BLOCK_DTYPE, COVERS_XA_COMMITS
from penstock.logstore.records import block_records as records_of
from penstock.model import TableName
from penstock.serve.http import history
from penstock.serve.own_log import OwnSource
from penstock.serve.threads import run_in
from penstock.source import row_history
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import read_range
from penstock.source.row_history import (
    Progress,
    RowChange,
    RowHistory,
    RowKey,
    TableStatement,
    Unreadable,
    candidate_ranges,
    cut_newest_first,
    part_to_json,
    python_rows,
)
from penstock.source.shown_values import shown_text
from penstock.source.source import ByteRange
from tests.support.binlog.xa_log import XaLog
from tests.support.daemon.served_log import INSTANCE, captured_log, serving
from tests.support.logstore.kept_log import penstock
from tests.support.logstore.source import feed_whole
from tests.support.suite.nonempty import each

BIT = numpy.uint64(4)


@pytest.fixture
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small logs of these tests into many ranges."""
    monkeypatch.setattr(row_history, "_RANGE_BYTES_FIRST", 300)
    monkeypatch.setattr(row_history, "_GAP_BYTES_MAX", 0)


def history_of(log: Log, table: str, *key: str, columns: tuple[str, ...] = ()) -> list[Any]:
    row = RowKey(TableName.parse(table), key, columns)
    return list(RowHistory(log, lambda: OwnSource(INSTANCE, log), row).parts())


def changes(parts: list[Any]) -> list[RowChange]:
    return [part for part in parts if isinstance(part, RowChange)]


def all_rows(log: Log) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Yield table, key columns and images of the whole log, decoded from its start to its end."""
    source = OwnSource(INSTANCE, log)
    for extent in log.extents():
        byte_range = ByteRange(extent.epoch, extent.file, extent.start, extent.end, aligned=True)
        for batch in read_range(source, byte_range, None, LoggedTables(source)):
            for row in batch.to_arrow().to_pylist():
                yield batch.table, batch.primary_key, row


def test_history_of_every_row_equals_a_search_of_the_whole_log(log: Log) -> None:
    expected: dict[tuple[str, tuple[str, ...]], list[tuple[int, str]]] = {}
    for table, columns, row in all_rows(log):
        key = tuple(str(row[column]) for column in columns)
        # A partial image of an update lacks the key, which the before image has.
        if key and not set(columns) & set(row["_metadata"]["absent"] or ()):
            images = expected.setdefault((table, key), [])
            images.append((row["_commit_version"], row["_change_type"]))
    compared = 0
    for (table, key), images in each(expected.items(), 5):
        found = changes(history_of(log, table, *key))
        # Images of updates that keep the key come in pairs.
        assert [change.commit_version for change in reversed(found)] == [
            version
            for (version, kind), after in itertools.zip_longest(images, images[1:])
            if not (kind == "update_preimage" and after == (version, "update_postimage"))
        ]
        compared += len(found)
    assert compared > 15


def test_changes_come_newest_first_with_both_images_and_their_origin(log: Log) -> None:
    parts = history_of(log, "fuzzed.t", "1")
    found = changes(parts)
    assert [change.commit_version for change in found] == sorted(
        (change.commit_version for change in found), reverse=True
    )
    for change in each(found):
        assert (change.before is None) == (change.change == "insert")
        assert (change.after is None) == (change.change == "delete")
        image = change.before or change.after
        assert image is not None
        assert image["id"] == 1
        assert not any(name.startswith("_") for name in image)
        assert change.server_id > 0
        assert change.gtid
    progress = [part for part in parts if isinstance(part, Progress)]
    assert progress[-1].searched_bytes == progress[-1].candidate_bytes
    assert 0 < progress[-1].candidate_bytes < progress[-1].log_bytes
    json.dumps([part_to_json(part) for part in parts])


def test_statement_that_empties_the_table_is_part_of_the_history(log: Log) -> None:
    statements = [part for part in history_of(log, "fuzzed.t", "1") if isinstance(part, TableStatement)]
    assert any(statement.empties and "DROP TABLE" in statement.text for statement in statements)
    assert any("CREATE TABLE" in statement.text.upper() for statement in statements)


def test_float_has_its_shortest_digits() -> None:
    floats = pyarrow.array([1.1, 16777216.0, None], pyarrow.float32())
    vectors = pyarrow.array([[0.1, None], None, []], pyarrow.list_(pyarrow.float32()))
    rows = pyarrow.record_batch({"f": floats, "v": vectors})
    assert python_rows(rows) == [
        {"f": 1.1, "v": [0.1, None]},
        {"f": 16777216.0, "v": None},
        {"f": None, "v": []},
    ]


def test_null_is_told_from_every_text() -> None:
    values = [None, "NULL", '"NULL"', "(not logged)", "(masked)", "-", "", '"', "null", 1.1, [0.1]]
    texts = [shown_text(value) for value in values]
    assert texts[:2] == ["NULL", '"NULL"']
    assert len(set(texts)) == len(values)
    assert [history_verb._cell({"a": value}, "a") for value in values] == texts
    page = changed_cells({"before": {"a": None}, "after": {"a": "NULL"}})
    assert page == [("a", "NULL", '"NULL"', True)]
    row = {"id": 1, "a": None, "b": "NULL", "c": b"\0"}
    assert change_lines._shown(row, ["id"]) == 'id=1, a=NULL, b="NULL", c=0x00'


def test_unknown_row_and_table_have_no_changes(log: Log) -> None:
    assert changes(history_of(log, "fuzzed.t", "4711")) == []
    assert changes(history_of(log, "nowhere.t", "1")) == []


@pytest.mark.parametrize(
    ("key", "columns", "problem"),
    [
        (("seven",), (), "'seven' is no value of the column id"),
        (("1", "2"), (), "the key of fuzzed.t is id, and 2 values are given"),
        (("1",), ("nonesuch",), "no column"),
    ],
)
def test_wrong_key_is_refused(log: Log, key: tuple[str, ...], columns: tuple[str, ...], problem: str) -> None:
    with pytest.raises(OptionInvalid, match=problem):
        history_of(log, "fuzzed.t", *key, columns=columns)


def test_other_columns_than_the_primary_key_can_name_the_row(log: Log) -> None:
    by_text = changes(history_of(log, "fuzzed.t", "one", columns=("text",)))
    assert by_text
    assert {(change.after or change.before or {})["text"] for change in by_text} <= {"one", *_texts(by_text)}


def _texts(found: list[RowChange]) -> set[Any]:
    return {image["text"] for change in found for image in (change.before, change.after) if image}


def test_unreadable_part_is_reported_and_the_rest_is_searched(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = changes(history_of(log, "fuzzed.t", "1"))
    newest = whole[0].position
    read = row_history.read_in_order

    def damaged(source: Any, byte_range: ByteRange, *arguments: Any, **options: Any) -> Iterator[Any]:
        holds = byte_range.file == newest.file and byte_range.epoch == newest.epoch
        if holds and byte_range.start <= newest.offset < (byte_range.stop or 0):
            raise ChecksumMismatch("a wrong checksum", position=str(newest))
        yield from read(source, byte_range, *arguments, **options)

    monkeypatch.setattr(row_history, "read_in_order", damaged)
    parts = history_of(log, "fuzzed.t", "1")
    (unreadable,) = [part for part in parts if isinstance(part, Unreadable)]
    assert unreadable.start <= newest < unreadable.end
    assert changes(parts) == [
        change for change in whole if not unreadable.start <= change.position < unreadable.end
    ]


def test_closed_search_decodes_no_further(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[Any] = []
    read = row_history.read_in_order
    monkeypatch.setattr(
        row_history,
        "read_in_order",
        lambda *arguments, **options: ranges.append(1) or read(*arguments, **options),
    )
    history_of(log, "fuzzed.t", "1")
    whole = len(ranges)
    ranges.clear()
    parts = RowHistory(
        log, lambda: OwnSource(INSTANCE, log), RowKey(TableName("fuzzed", "t"), ("1",))
    ).parts()
    next(parts)
    next(parts)
    parts.close()
    assert len(ranges) < whole


# --- The index ---------------------------------------------------------------------------------


def block_records(*blocks: tuple[int, int, int, int, int]) -> Any:
    """Return records of blocks: start, end, transaction start, last boundary, tables."""
    records = numpy.zeros(len(blocks), BLOCK_DTYPE)
    names = ("source_start", "source_end", "transaction_start", "last_boundary", "tables")
    for name, values in zip(names, zip(*blocks, strict=True), strict=True):
        records[name] = values
    records["flags"] = COVERS_XA_COMMITS
    return records


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (block_records((4, 100, 4, 100, 0), (100, 200, 100, 200, 4)), [[100, 200]]),
        # The transaction begins in an earlier block, and its rows continue in the next two.
        (
            block_records(
                (4, 100, 4, 60, 0), (100, 200, 60, 0, 4), (200, 300, 60, 250, 0), (300, 400, 250, 400, 0)
            ),
            [[60, 250]],
        ),
        # The records do not yet contain the end of the last transaction.
        (block_records((4, 100, 4, 60, 4)), [[4, 500]]),
        # The part of the log after the last record is always searched.
        (block_records((4, 100, 4, 100, 0)), [[100, 500]]),
        (block_records((4, 500, 4, 500, 0)), []),
    ],
    ids=["block", "spanning", "open", "tail", "nothing"],
)
def test_ranges_cover_whole_transactions(records: Any, expected: list[list[int]]) -> None:
    end = 500 if records["source_end"][-1] < 200 or len(records) == 1 else int(records["source_end"][-1])
    assert candidate_ranges(records, BIT, 4, end).tolist() == expected


def test_records_of_an_earlier_version_are_searched_for_xa_commits() -> None:
    records = block_records((4, 100, 4, 100, 0))
    records["flags"] = 0
    assert candidate_ranges(records, BIT, 4, 100).tolist() == [[4, 100]]


def test_ranges_are_cut_at_boundaries_from_the_newest() -> None:
    ranges = numpy.array([[0, 100], [200, 300]])
    boundaries = numpy.array([40, 60, 100, 200, 240, 300])
    cut = list(cut_newest_first(ranges, boundaries, itertools.repeat(50)))
    assert cut == [(240, 300), (200, 240), (40, 100), (0, 40)]


# --- The daemon and the command line -----------------------------------------------------------


def test_history_over_http_is_limited_to_permitted_tables(log: Log) -> None:
    accounts = [{"name": "u", "token": "u-token", "tables": ["fuzzed.u"]}]
    with serving(log, {"token": "a-token"}, accounts) as daemon:
        path = f"/v1/instances/{INSTANCE}/history"
        answer = daemon.ask("POST", path, {"table": "fuzzed.t", "key": ["1"]})
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert lines[-1] == {"kind": "end", "why": "whole"}
        assert sum(line["kind"] == "change" for line in lines) == len(
            changes(history_of(log, "fuzzed.t", "1"))
        )
        limited = daemon.ask("POST", path, {"table": "fuzzed.t", "key": ["1"], "limit": 1})
        assert json.loads(limited.body.splitlines()[-1]) == {"kind": "end", "why": "limit"}
        refused = daemon.ask("POST", path, {"table": "fuzzed.t", "key": ["1"]}, token="u-token")
        assert (refused.status, refused.json["type"]) == (403, "AccessDenied")
        wrong = daemon.ask("POST", path, {"table": "fuzzed.t", "key": ["x"]})
        assert json.loads(wrong.body.splitlines()[-1])["type"] == "OptionInvalid"
        assert daemon.ask("POST", path, {"table": "fuzzed.t"}).status == 400


def test_requests_that_arrive_together_do_not_exceed_the_bound_of_histories(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = HISTORIES_MAX + 1
    arrived, released = asyncio.Event(), asyncio.Event()
    waiting: list[str] = []

    async def run_together(pool: Executor, work: Callable[..., Any], *arguments: Any) -> Any:
        is_arrival = work is history.visible_holds
        waiting.append("arrival" if is_arrival else "search")
        # If all requests get this far, none was refused; release them, so that the test does not hang.
        for kind, event in (("arrival", arrived), ("search", released)):
            if waiting.count(kind) >= requests:
                event.set()
        await (arrived if is_arrival else released).wait()
        return await run_in(pool, work, *arguments)

    monkeypatch.setattr(history, "run_in", run_together)
    body = {"table": "fuzzed.t", "key": ["1"]}
    with serving(log) as daemon, ThreadPoolExecutor(requests) as pool:
        path = f"/v1/instances/{INSTANCE}/history"
        answers = [pool.submit(daemon.ask, "POST", path, body) for _ in range(requests)]
        first = next(as_completed(answers)).result()
        daemon.in_loop(released.set)
        statuses = sorted(answer.result().status for answer in answers)
    assert first.json["type"] == "QuotaReached"
    assert statuses == [200] * HISTORIES_MAX + [429]


def test_each_change_names_the_readers_that_have_not_confirmed_it(log: Log, tmp_path: Path) -> None:
    accounts = [{"name": "t", "token": "t-token", "tables": ["fuzzed.t"]}]
    every = changes(history_of(log, "fuzzed.t", "1"))
    newest, oldest = every[0], every[-1]
    assert newest.position != oldest.position
    with serving(log, {"token": "a-token"}, accounts) as daemon:
        instance = f"/v1/instances/{INSTANCE}"
        for reader, position in (("behind", log.earliest()), ("cache", log.visible)):
            assert (
                daemon.ask("POST", f"{instance}/position?reader={reader}&position={position}").status == 200
            )

        def ask(**more: str) -> list[dict[str, Any]]:
            answer = daemon.ask("POST", f"{instance}/history", {"table": "fuzzed.t", "key": ["1"]}, **more)
            return [json.loads(line) for line in answer.body.splitlines()]

        first, *lines = ask()
        assert [reader["reader"] for reader in first["readers"]] == ["behind", "cache"]
        pending = {line["position"]: line["pending"] for line in lines if line["kind"] == "change"}
        assert pending[str(newest.position)] == pending[str(oldest.position)] == ["behind"]
        # The account does not see the readers of other accounts.
        first, *lines = ask(token="t-token")
        assert first == {"kind": "readers", "readers": []}
        assert not any(line.get("pending") for line in lines)
        token = tmp_path / "token"
        token.write_text("a-token")
        url = f"http://127.0.0.1:{daemon.port()}?token_file={token}"
        shown = penstock("history", "fuzzed.t", "1", "--url", url)
        assert "not confirmed by behind" in shown.out, shown.err


def test_command_line_shows_the_history(log: Log) -> None:
    with serving(log) as daemon:
        url = f"http://127.0.0.1:{daemon.port()}"
        shown = penstock("history", "fuzzed.t", "1", "--url", url)
        assert shown.code == 0, shown.err
        assert "insert" in shown.out
        assert "before" in shown.out
        listed = penstock("history", "fuzzed.t", "1", "--url", url, "--json")
        kinds = [json.loads(line)["kind"] for line in listed.lines]
        assert kinds.count("change") == len(changes(history_of(log, "fuzzed.t", "1")))
        nothing = penstock("history", "fuzzed.t", "4711", "--url", url, "--json")
        assert {json.loads(line)["kind"] for line in nothing.lines} <= {"readers", "statement"}
        assert penstock("history", "fuzzed.t", "x", "--url", url).code == 2


def test_command_line_names_a_missing_folder(tmp_path: Path) -> None:
    missing = penstock("history", "fuzzed.t", "1", "--log", str(tmp_path / "nothing"))
    assert missing.code == 2


@pytest.mark.parametrize(("sample", "flavor"), [("mysql-9.7-2", "mysql"), ("mariadb-10.11-2", "mariadb")])
def test_block_of_an_xa_commit_has_the_bits_of_all_tables(sample: str, flavor: str, tmp_path: Path) -> None:
    xa = XaLog(sample)
    files = {
        name: xa.write(tmp_path / "mysql-bin.000001", [*xa.before, xa.prepare, *groups]).read_bytes()
        for name, groups in (("prepared", []), ("rolled back", [xa.rollback()]), ("committed", [xa.commit]))
    }
    last_tables = {}
    for name, content in files.items():
        cutter = BlockCutter(epoch=0, file="mysql-bin.000001", offset=0, live=False, flavor=flavor)
        feed_whole(cutter, content[: len(files["prepared"])])
        cutter.close_block()
        cutter.take_records()
        feed_whole(cutter, content[len(files["prepared"]) :])
        cutter.close_block()
        last_tables[name] = [int(record["tables"]) for record in records_of(cutter.take_records())]
    assert last_tables == {"prepared": [], "rolled back": [0], "committed": [(1 << 64) - 1]}


@pytest.mark.parametrize(
    ("kind", "value", "spellings"),
    [
        (pyarrow.duration("us"), timedelta(), ["00:00:00", "00:00", "-00:00:00"]),
        (pyarrow.duration("us"), timedelta(microseconds=-500_000), ["-00:00:00.5", "-00:00:00.500000"]),
        (pyarrow.duration("us"), timedelta(hours=838, minutes=59, seconds=59), ["838:59:59"]),
        (
            pyarrow.timestamp("us", "UTC"),
            datetime(2024, 2, 29, tzinfo=UTC),
            ["2024-02-29", "2024-02-29 00:00:00", "2024-02-29 00:00:00+00:00", "2024-02-29T02:00:00+02:00"],
        ),
    ],
)
def test_key_is_written_as_a_history_shows_it(
    kind: pyarrow.DataType, value: Any, spellings: list[str]
) -> None:
    """The key may contain a TIME as the server writes it, and a TIMESTAMP with a zone, or in UTC without a
    zone.
    """
    rows = pyarrow.record_batch({"key": pyarrow.array([value, None], kind)})
    for spelling in each(spellings):
        key = RowKey(TableName("shop", "events"), (spelling,))
        assert key.matches(rows, ["key"]).to_pylist() == [True, False], spelling
    with pytest.raises(OptionInvalid, match="no value of the column key"):
        RowKey(TableName("shop", "events"), ("noon",)).matches(rows, ["key"])
