# SPDX-License-Identifier: Apache-2.0
"""Compare stores with their source: differences are reported and repaired by overwriting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import clickhouse_connect
import elasticsearch
import pymongo
import pytest

from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.verify import verify
from tests.support.pipeline.by_hand import HandDriven
from tests.support.pipeline.workload import Workload
from tests.support.sinks.backends import running_backend
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Server


def _spoil_clickhouse(url: str, database: str) -> None:
    client = clickhouse_connect.get_client(dsn=url)
    try:
        client.command(f"DELETE FROM {database}.accounts WHERE id = 9001")
        client.command(
            f"ALTER TABLE {database}.accounts UPDATE owner = 'spoilt' WHERE id = 9002",
            settings={"mutations_sync": 1},
        )
    finally:
        client.close()


def _spoil_mongodb(url: str, database: str) -> None:
    with pymongo.MongoClient[Any](url) as client:
        client[database].accounts.delete_one({"_id": 9001})
        client[database].accounts.update_one({"_id": 9002}, {"$set": {"owner": "spoilt"}})


def _spoil_elasticsearch(url: str, database: str) -> None:
    with elasticsearch.Elasticsearch(url, request_timeout=WAIT_SECONDS_MAX) as client:
        index = f"{database}.accounts"
        client.delete(index=index, id="9001")
        document = client.get(index=index, id="9002")["_source"]
        client.index(index=index, id="9002", document=document | {"owner": "spoilt"})


SPOILERS: dict[str, Callable[[str, str], None]] = {
    "clickhouse": _spoil_clickhouse,
    "elasticsearch": _spoil_elasticsearch,
    "mongodb": _spoil_mongodb,
}


@pytest.fixture(params=sorted(SPOILERS))
def store(
    request: pytest.FixtureRequest, server_of: Callable[[str], Server], missing_part: MissingPart
) -> Any:
    """Yield each shared store."""
    return running_backend(request.param, request.config, server_of, missing_part)


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_verify.py::test_differences_are_reported_despite_an_advancing_source"
)
def test_differences_are_reported_and_repaired(
    store: Any, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=5, rows=120, big_rows=500, truncates=False)
    workload.create()
    sink = {store.NAME: {"url": store.server.url}}
    pipeline = HandDriven(mysql_server, f"{database}.*", sink, tmp_path)
    pipeline.load()
    workload.run(60)
    mysql_server.sql(
        "INSERT INTO accounts (id, owner, balance) VALUES (9001, 'kept', 1), (9002, 'kept', 2)",
        database=database,
    )
    pipeline.follow()
    verification = verify(pipeline.settings)
    assert verification.equal, [comparison.found for comparison in verification.results if comparison.found]
    SPOILERS[store.NAME](store.server.url, database)
    verification = verify(pipeline.settings, mend=True)
    differing = {
        (difference.row["id"], difference.kind)
        for result in verification.results
        for difference in result.found
    }
    assert differing == {(9001, Kind.MISSING), (9002, Kind.CHANGED)}
    assert verify(pipeline.settings).equal


# The values that each target cannot hold, and the columns that the source fills with such values.
_NOT_HELD = {
    "clickhouse": ("(1, '1820-01-01', '2400-01-01 00:00:00', 'kept')", {"day": 1, "at": 1}),
    "postgres": ("(1, '1820-01-01', '2400-01-01 00:00:00', CONCAT('a', CHAR(0), 'b'))", {"note": 1}),
}


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_comparison.py::test_value_that_a_target_cannot_hold_is_expected_to_be_null"
)
@pytest.mark.parametrize("kind", sorted(_NOT_HELD))
def test_values_that_a_target_cannot_hold_are_distinguished_from_differences(
    kind: str,
    mysql_server: Server,
    fresh_database: FreshDatabase,
    server_of: Callable[[str], Server],
    missing_part: MissingPart,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    target = running_backend(kind, request.config, server_of, missing_part)
    rows, not_held = _NOT_HELD[kind]
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY, day DATE, at DATETIME, note VARCHAR(9));"
        f" INSERT INTO t VALUES {rows}, (2, '2026-01-01', '2026-01-01 00:00:00', 'kept')",
        database=database,
    )
    pipeline = HandDriven(mysql_server, f"{database}.*", {kind: {"url": target.server.url}}, tmp_path)
    pipeline.load()
    for repair in (False, True):
        verification = verify(pipeline.settings, mend=repair)
        (result,) = verification.results
        assert verification.equal, result.found
        assert result.not_held == not_held
        assert verification.repaired == 0
    # A row is still compared if it has a value that the target cannot represent. A difference in another
    # column is reported and repaired.
    mysql_server.sql("UPDATE t SET id = 3 WHERE id = 1", database=database)
    pipeline.follow()
    assert verify(pipeline.settings).equal
