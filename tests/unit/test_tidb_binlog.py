# SPDX-License-Identifier: Apache-2.0
"""Payloads written by TiDB are converted to a MySQL binlog: every reader receives the values that TiDB's own
client shows.
"""

import datetime
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock import read_binlog
from penstock._native import TidbTranscoder
from penstock.errors import EventMalformed, SchemaUnknown, ValueMalformed
from tests.support.binlog.decoding import Decoded, Row, decode, decode_range
from tests.support.binlog.events import MAGIC, events
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tests.support.tidb import sample_log
from tools.servers import PartMissing
from tools.servers.packages import install

SIX_STATEMENTS, ALL_TYPES, ONLY_NULLS = 2, 4, 5
CUT_STEP_BYTES = 61
LOCAL = datetime.datetime(2026, 11, 22, 11, 15, 0, 123456)
# The output of TiDB's client for the row with every type; BIT as its bytes, TIMESTAMP in UTC.
ROW_OF_ALL_TYPES = {
    "id": Decimal(9223372036854775809),
    "i8": -5,
    "u32": 4000000000,
    "f": 1.5,
    "d": -2.25,
    "dec1": Decimal("-12345.67890"),
    "b": 0b1010101010,
    "y": 2026,
    "dt": LOCAL,
    "ts": LOCAL.replace(microsecond=123000, tzinfo=datetime.UTC),
    "da": LOCAL.date(),
    "ti": -datetime.timedelta(hours=12, minutes=34, seconds=56, milliseconds=789),
    "c": "ch",
    "v": "héllo",
    "bi": b"\x01\x02\0\0",
    "vb": b"\xff\0",
    "bl": b"\0\x01\x02\x03",
    "tx": "text",
    "e": "y",
    "s": "p,r",
    "j": '{"a": [1, 2.5, "x", null, true]}',
}
NULLS = dict.fromkeys(ROW_OF_ALL_TYPES) | {"id": Decimal(7)}


@pytest.fixture(scope="module")
def content() -> bytes:
    """The bytes of the generated file."""
    return sample_log.log()


@pytest.fixture(scope="module")
def decoded(content: bytes) -> Decoded:
    """The changes of the file."""
    return decode(content, file=sample_log.FILE)


def values(row: Row) -> dict[str, Any]:
    """Return the columns of a row without the system columns."""
    return {name: value for name, value in row.items() if not name.startswith("_")}


def test_values_of_every_type_are_what_the_client_shows(decoded: Decoded) -> None:
    inserted, nulls, before, after = decoded.rows("shop.types")
    assert values(inserted) == ROW_OF_ALL_TYPES
    assert values(nulls) == values(before) == NULLS
    assert values(after) == NULLS | {"v": "changed", "j": "[1]"}


def test_statements_of_a_transaction_keep_their_order(decoded: Decoded) -> None:
    commit_ts = sample_log.commit_timestamps()[SIX_STATEMENTS]
    rows = [row for row in decoded.rows("shop.test") if row["_commit_version"] == commit_ts]
    assert [(row["_change_type"], row["id"], row["name"]) for row in rows] == [
        ("insert", 1, "a"),
        ("insert", 2, "b"),
        ("update_preimage", 1, "a"),
        ("update_postimage", 1, "c"),
        ("update_preimage", 2, "b"),
        ("update_postimage", 2, "d"),
        ("delete", 2, "d"),
        ("insert", 2, "c"),
    ]
    assert {row["_commit_timestamp"] for row in rows} == {
        datetime.datetime.fromtimestamp((commit_ts >> 18) / 1000, datetime.UTC)
    }


def test_rows_without_a_key_leave_out_the_hidden_row_id(decoded: Decoded) -> None:
    assert decoded.values("shop.nopk") == [("insert", 1, "x"), ("insert", 1, "x"), ("delete", 1, "x")]


def test_columns_of_a_clustered_key_come_from_the_handle(decoded: Decoded) -> None:
    assert decoded.values("shop.cpk") == [
        ("insert", "k", 1, 2),
        ("update_preimage", "k", 1, 2),
        ("update_postimage", "k", 1, 3),
    ]


def test_rows_of_partitions_are_rows_of_their_table(decoded: Decoded) -> None:
    assert decoded.values("shop.part") == [("insert", 1, 1), ("insert", 50, 2)]


def test_rows_have_the_columns_of_their_schema_version(decoded: Decoded) -> None:
    added, before, after = decoded.rows("shop.test")[-3:]
    assert values(added) == {"id": 5, "name": "e", "extra": 99}
    assert values(before) == {"id": 1, "name": "c", "extra": 42}
    assert values(after) == {"id": 1, "name": "zz", "extra": 42}
    # The row as written after the statement that drops the column.
    payload, offset = sample_log.payloads()[15], len(sample_log.head())
    late = TidbTranscoder(cluster_id=1, server_id=1)
    added_column, dropped_column = (sample_log.jobs()[number] for number in (94, 95))
    sample_log.define(late, added_column)
    sample_log.define(late, dropped_column | {"binlog": dropped_column["binlog"] | {"FinishedTS": 1}})
    dropped = decode(sample_log.head() + b"".join(late.transaction([payload], offset)), file=sample_log.FILE)
    assert dropped.values("shop.test") == [("update_preimage", 1, 42), ("update_postimage", 1, 42)]


def test_commit_versions_are_commit_timestamps(content: bytes, decoded: Decoded) -> None:
    versions = [row["_commit_version"] for row in decoded.rows()]
    assert versions == sorted(versions)
    assert set(versions) < set(sample_log.commit_timestamps())
    statements = {statement.commit_ts for statement in decoded.statements}
    assert statements <= set(sample_log.commit_timestamps())
    assert not statements & set(versions)


def test_any_cut_returns_every_row_once_with_its_commit_timestamp(content: bytes, decoded: Decoded) -> None:
    whole = decoded.rows()
    for cut in each(range(len(MAGIC), len(content), CUT_STEP_BYTES), least=10):
        parts = [
            row
            for start, stop in ((0, cut), (cut, len(content)))
            for row in decode_range(content, start, stop, file=sample_log.FILE).rows()
        ]
        assert parts == whole, cut


def test_transaction_states_its_length(content: bytes) -> None:
    # An anonymous GTID event ends with the byte 254, the transaction's length in 8 bytes, and the server's
    # version.
    stated = [int.from_bytes(event.body[50:58], "little") for event in events(content) if event.code == 34]
    assert stated == [len(transaction) for transaction in sample_log.transactions()]


def test_same_payloads_give_the_same_bytes_at_the_same_position(content: bytes) -> None:
    payload, transcoder = sample_log.payloads()[SIX_STATEMENTS], sample_log.defined(87)
    first, second = (b"".join(transcoder.transaction([payload], 4711)) for _ in range(2))
    assert first == second
    assert first != b"".join(transcoder.transaction([payload], 4712))


def test_payloads_of_one_commit_timestamp_are_one_transaction() -> None:
    payload, transcoder = sample_log.payloads()[SIX_STATEMENTS], sample_log.defined(87)
    offset = len(sample_log.head())
    joined = sample_log.head() + b"".join(transcoder.transaction([payload, payload], offset))
    rows = decode(joined, file=sample_log.FILE).rows("shop.test")
    assert len(rows) == 16
    assert [row["_metadata"]["row"] for row in rows] == sorted(row["_metadata"]["row"] for row in rows)
    with pytest.raises(EventMalformed, match="in one transaction"):
        transcoder.transaction([payload, sample_log.payloads()[ALL_TYPES]], offset)


def test_row_without_a_definition_is_refused_by_table_and_version() -> None:
    with pytest.raises(SchemaUnknown, match="table 86 at schema version 43"):
        sample_log.defined(85).transaction([sample_log.payloads()[SIX_STATEMENTS]], 4)


def test_value_that_does_not_fit_its_column_is_refused_by_name() -> None:
    transcoder = TidbTranscoder(cluster_id=1, server_id=1)
    job = sample_log.jobs()[87]
    job["binlog"]["TableInfo"]["cols"][1]["type"] = {"Tp": 3, "Flag": 0}
    sample_log.define(transcoder, job)
    with pytest.raises(ValueMalformed, match=r"table `shop`.`test`, column `name`: bytes in a column of int"):
        transcoder.transaction([sample_log.payloads()[SIX_STATEMENTS]], 4)


@pytest.mark.parametrize("charset", ["gbk", "latin1"])
def test_text_of_every_charset_is_utf8(charset: str) -> None:
    # TiDB's datums hold UTF-8 whatever the column's character set, as its client shows them.
    transcoder = TidbTranscoder(cluster_id=1, server_id=1)
    job = sample_log.jobs()[89]
    for column in job["binlog"]["TableInfo"]["cols"]:
        if column["name"]["O"] in ("c", "v", "tx"):
            column["type"] |= {"Charset": charset, "Collate": f"{charset}_bin"}
    sample_log.define(transcoder, job)
    offset = len(sample_log.head())
    bytes_of_row = b"".join(transcoder.transaction([sample_log.payloads()[ALL_TYPES]], offset))
    row = decode(sample_log.head() + bytes_of_row, file=sample_log.FILE).rows("shop.types")[0]
    assert values(row) == ROW_OF_ALL_TYPES


def test_file_is_read_as_one_of_a_server(tmp_path: Path, decoded: Decoded) -> None:
    path = sample_log.write_log(tmp_path)
    rows = [row for batch in read_binlog(path) for row in batch.to_arrow().to_pylist()]
    assert sorted(row["_commit_version"] for row in rows) == [
        row["_commit_version"] for row in decoded.rows()
    ]


def test_mysqlbinlog_reads_the_file(tmp_path: Path, missing_part: MissingPart) -> None:
    path = sample_log.write_log(tmp_path)
    try:
        words = install("mysql").argv("mysqlbinlog")
    except PartMissing as error:
        missing_part("mysqlbinlog", str(error))
    options = ["--no-defaults", "--verify-binlog-checksum", "--base64-output=decode-rows", "-vv"]
    done = subprocess.run(
        [*words, *options, path], capture_output=True, timeout=WAIT_SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    shown = done.stdout.decode(errors="replace")
    assert shown.count("### INSERT INTO `shop`.`test`") == 4
    assert "DROP COLUMN `name`" in shown
    for value in ("-12345.67890", "9223372036854775809", "2026-11-22 11:15:00.123456", '"x"'):
        assert value in shown, value
