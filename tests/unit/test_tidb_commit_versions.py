# SPDX-License-Identifier: Apache-2.0
"""Commit versions of a TiDB cluster are commit timestamps, which cannot be derived from positions."""

import pyarrow
import pytest

from penstock.client.split import Cut, split
from penstock.model import Position, TableName
from penstock.pipeline.load.watermark import Watermark
from penstock.source.logged_statement import LoggedStatement
from penstock.source.source import ByteRange
from penstock.spark.filters import Narrowing

COMMIT_TS = 470_639_217_768_660_992
POSITION = Position(0, "tidb-binlog.000003", 4711)


@pytest.mark.parametrize(("file", "kept"), [("tidb-binlog.000003", True), ("mysql-bin.000003", False)])
def test_filter_on_commit_versions_narrows_the_files_of_servers_alone(file: str, kept: bool) -> None:
    byte_range = ByteRange(0, file, 4, 5000, aligned=True)
    assert Narrowing(version_min=COMMIT_TS).keeps(byte_range) is kept
    assert Narrowing(version_max=3).keeps(byte_range) is kept


def statement(commit_ts: int | None, transaction: Position | None = None) -> LoggedStatement:
    """Return a TRUNCATE at a position."""
    table = frozenset({TableName("shop", "t")})
    return LoggedStatement(
        "TRUNCATE t", "shop", POSITION, POSITION, table, frozenset(), table, transaction, commit_ts=commit_ts
    )


def test_statement_of_a_cluster_empties_rows_up_to_its_commit_timestamp() -> None:
    assert statement(COMMIT_TS).version == statement(COMMIT_TS).emptied_to == COMMIT_TS
    assert statement(COMMIT_TS, POSITION).emptied_to == COMMIT_TS - 1
    assert statement(None).version == statement(None).emptied_to == POSITION.commit_version
    assert statement(None, POSITION).emptied_to == POSITION.commit_version - 1


def test_rows_read_at_a_commit_timestamp_contain_the_changes_up_to_it() -> None:
    watermark = Watermark(POSITION, 1, 2, exact=True, commit_ts=COMMIT_TS)
    assert (watermark.version, watermark.floor) == (COMMIT_TS, COMMIT_TS + 1)
    assert Watermark.from_json(watermark.to_json()) == watermark
    of_server = Watermark(POSITION, 1, 2)
    assert (of_server.version + 1, of_server.floor) == (POSITION.commit_version, POSITION.commit_version)
    # As in version 0.1, the record of a server's watermark has no commit timestamp.
    assert "commit_ts" not in of_server.to_json()
    assert Watermark.from_json(of_server.to_json()) == of_server


def test_subscriber_gets_the_same_commit_timestamps_from_every_daemon() -> None:
    rows = pyarrow.record_batch({"_commit_version": pyarrow.array([COMMIT_TS], pyarrow.int64())})
    # The other daemon counts one epoch more, and the epoch is part of a server's commit versions.
    shift = (
        Position(1, "mysql-bin.000003", 4).commit_version - Position(0, "mysql-bin.000003", 4).commit_version
    )
    ((_, kept),) = split(rows, 1, {0: Cut.at(POSITION, shift >> 32)})
    assert kept.column("_commit_version").to_pylist() == [COMMIT_TS]
