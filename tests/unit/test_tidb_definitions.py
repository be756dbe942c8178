# SPDX-License-Identifier: Apache-2.0
"""Definitions from DDL jobs: the jobs of a real cluster, and changes that affect several tables."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from penstock.errors import EventUnsupported, SchemaInvalid, ServerUnsupported
from penstock.logstore.disk import LocalDisk
from penstock.tidb.definition_log import FILE, DefinitionLog
from penstock.tidb.definitions import Definitions, LoggedStatement
from penstock.tidb.job_sources import StatusJobs
from penstock.tidb.jobs import Action, DdlJob

JOBS = json.loads((Path(__file__).parents[1] / "samples" / "tidb" / "ddl_jobs.json").read_text())


def _jobs() -> list[DdlJob]:
    return sorted((DdlJob.parse(json.dumps(job)) for job in JOBS), key=lambda job: job.schema_version)


def _defined() -> Definitions:
    definitions = Definitions()
    for job in _jobs():
        definitions.apply(job)
    return definitions


def _columns(info: dict[str, Any] | None) -> list[str]:
    return [column["name"]["O"] for column in (info or {})["cols"]]


def _job(definitions: Definitions, action: int, table_id: int = 0, **more: Any) -> DdlJob:
    table = more.pop("table", None)
    database = more.pop("database", None)
    values = {"id": 500, "type": action, "state": 6, "schema_id": 84, "table_id": table_id, **more}
    several = more.pop("tables", None)
    values["binlog"] = {
        "SchemaVersion": definitions.version + 1,
        "TableInfo": table,
        "DBInfo": database,
        "MultipleTableInfos": several,
    }
    return DdlJob.parse(json.dumps(values))


def _table(definitions: Definitions, name: str) -> dict[str, Any]:
    for table in definitions.tables():
        if table.name is not None and table.name.table == name:
            assert table.info is not None
            return table.info
    raise AssertionError(name)


def test_jobs_of_a_cluster_define_its_tables() -> None:
    tables = {str(table.name): _columns(table.info) for table in _defined().tables()}
    assert tables["shop.test"] == ["id", "extra"]
    assert tables["shop.cpk"] == ["a", "b", "c"]
    assert sorted(tables) == ["shop.cpk", "shop.nopk", "shop.part", "shop.test", "shop.types"]


def test_last_two_definitions_of_a_table_are_kept_by_version() -> None:
    versions = [(table.schema_version, _columns(table.info)) for table in _defined().versions()]
    of_test = [columns for version, columns in versions if version in (50, 54)]
    assert of_test == [["id", "name", "extra"], ["id", "extra"]]


def test_applying_a_job_again_changes_nothing() -> None:
    definitions = _defined()
    before = definitions.to_json()
    for job in _jobs():
        assert definitions.apply(job) == ()
    assert definitions.to_json() == before
    assert Definitions.from_json(before).to_json() == before


def test_cancelled_job_changes_nothing() -> None:
    job = json.loads(json.dumps(JOBS[1]))
    job["state"] = 5
    assert Definitions().apply(DdlJob.parse(json.dumps(job))) == ()


def test_statement_is_logged_with_its_database() -> None:
    definitions = Definitions()
    create_database, create_table = _jobs()[:2]
    assert definitions.statement_of(create_database, "CREATE DATABASE `shop`;") == LoggedStatement(
        "shop", "CREATE DATABASE `shop`"
    )
    definitions.apply(create_database)
    statement = definitions.statement_of(create_table, "CREATE TABLE `test` (`id` INT);")
    assert statement == LoggedStatement("shop", "CREATE TABLE `test` (`id` INT)")


def test_statements_that_mysql_does_not_have_are_left_out() -> None:
    definitions = _defined()
    job = _job(definitions, Action.SET_TIFLASH_REPLICA, 86, table=_table(definitions, "test"))
    assert definitions.statement_of(job, "ALTER TABLE `test` SET TIFLASH REPLICA 1") is None


def test_rename_is_logged_with_both_databases() -> None:
    definitions = _defined()
    definitions.apply(_job(definitions, 1, schema_id=200, database={"id": 200, "db_name": {"O": "old"}}))
    renamed = {**_table(definitions, "test"), "name": {"O": "Moved", "L": "moved"}}
    job = _job(definitions, Action.RENAME_TABLE, 86, schema_id=200, table=renamed)
    statement = definitions.statement_of(job, "RENAME TABLE `test` TO `old`.`Moved`")
    assert statement == LoggedStatement("old", "RENAME TABLE `shop`.`test` TO `old`.`Moved`")
    definitions.apply(job)
    assert "old.Moved" in {str(table.name) for table in definitions.tables()}


def test_tables_renamed_together_may_change_their_databases() -> None:
    definitions = _defined()
    first = {**_table(definitions, "test"), "name": {"O": "first", "L": "first"}}
    second = {**_table(definitions, "nopk"), "name": {"O": "second", "L": "second"}}
    job = _job(
        definitions,
        Action.RENAME_TABLES,
        86,
        schema_name="shop",
        query="rename table test to first, nopk to other.second",
        tables=[first, second],
    )
    statement = definitions.statement_of(job, job.query)
    assert statement is not None
    assert statement.text == (
        "RENAME TABLE `shop`.`test` TO `shop`.`first`, `shop`.`nopk` TO `other`.`second`"
    )
    assert [str(table.name) for table in definitions.apply(job)] == ["shop.first", "other.second"]


def test_truncate_replaces_the_table_under_a_new_id() -> None:
    definitions = _defined()
    table = {**_table(definitions, "test"), "id": 300}
    dropped, created = definitions.apply(_job(definitions, Action.TRUNCATE_TABLE, 86, table=table))
    assert (dropped.table_id, dropped.info, created.table_id) == (86, None, 300)


def test_dropped_database_drops_its_tables() -> None:
    definitions = _defined()
    database = {"id": 84, "db_name": {"O": "shop"}}
    dropped = definitions.apply(_job(definitions, Action.DROP_SCHEMA, database=database))
    assert len(dropped) == 5
    assert definitions.tables() == []


def test_exchanged_table_continues_under_the_id_of_the_partition() -> None:
    definitions = _defined()
    partitioned = json.loads(json.dumps(_table(definitions, "part")))
    single_id = _table(definitions, "test")["id"]
    partition = partitioned["partition"]["definitions"][0]
    old_id, partition["id"] = partition["id"], single_id
    job = _job(definitions, Action.EXCHANGE_PARTITION, single_id, table=partitioned)
    definitions.apply(job)
    names = {table.table_id: str(table.name) for table in definitions.tables()}
    assert names[old_id] == "shop.test"
    assert names[partitioned["id"]] == "shop.part"
    assert single_id not in names


# --- Definitions stored with the log
# -------------------------------------------------------------------------


@pytest.mark.parametrize("action", [Action.RECOVER_TABLE, Action.FLASHBACK_CLUSTER, Action.RECOVER_SCHEMA])
def test_change_of_rows_that_no_binlog_has_is_refused(tmp_path: Path, action: Action) -> None:
    kept = DefinitionLog(LocalDisk(), tmp_path)
    definitions = _defined()
    version = definitions.version
    kept.seed(definitions)
    with pytest.raises(EventUnsupported, match="in no binlog"):
        kept.apply(_job(definitions, action, query="RECOVER"), 0)
    assert definitions.version == version, "the next start refuses it again"


def test_log_begun_after_a_recovered_table_reads_its_definition() -> None:
    definitions = _defined()
    table = _table(definitions, "test")
    definitions.apply(_job(definitions, Action.DROP_TABLE, table["id"]))
    definitions.apply(_job(definitions, Action.RECOVER_TABLE, table["id"], table=table))
    assert _table(definitions, "test") == table


def test_kept_definitions_survive_a_torn_line(tmp_path: Path) -> None:
    kept = DefinitionLog(LocalDisk(), tmp_path)
    kept.seed(Definitions())
    for job in _jobs():
        kept.apply(job, 0)
    kept.close()
    path = tmp_path / FILE
    whole = path.read_bytes()
    last_line = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in (last_line + 1, (last_line + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        reopened = DefinitionLog(LocalDisk(), tmp_path)
        assert reopened.definitions is not None
        assert reopened.definitions.version == _jobs()[-2].schema_version
        reopened.apply(_jobs()[-1], 0)
        reopened.close()
        assert path.read_bytes() == whole


def test_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    DefinitionLog(LocalDisk(), tmp_path).seed(_defined())
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b"shop", b"shoq", 1))
    with pytest.raises(SchemaInvalid, match="is damaged"):
        DefinitionLog(LocalDisk(), tmp_path)


# --- Sources of jobs ------------------------------------------------------------------------


@pytest.fixture
def status_port() -> Iterator[str]:
    """The part of TiDB's status port that lists DDL jobs."""

    class StatusPort(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {name: int(values[0]) for name, values in parse_qs(url.query).items()}
            self.send_response(200 if url.path == "/ddl/history" else 404)
            self.end_headers()
            start = query.get("start_job_id", 1 << 40)
            jobs = sorted((job for job in JOBS if job["id"] <= start), key=lambda job: -job["id"])
            # Before the first job, TiDB's iterator reaches other data.
            foreign = {"id": 84, "type": 0, "state": 5, "schema_id": 0, "table_id": 0}
            self.wfile.write(json.dumps((jobs or [foreign])[: query["limit"]]).encode())

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), StatusPort)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("page", [1, 3, 256])
def test_status_port_returns_jobs(status_port: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tidb.job_sources._PAGE", page)
    source = StatusJobs(status_port, None)
    assert sorted(job.job_id for job in source.jobs()) == sorted(job["id"] for job in JOBS)
    job = source.job(87)
    assert job is not None
    assert job.query.startswith("create table test")
    assert source.job(88) is None, "the next job has another id"
    assert len(source.newest()) == min(len(JOBS), page)


def test_another_server_is_no_status_port(status_port: str) -> None:
    with pytest.raises(ServerUnsupported, match="404"):
        StatusJobs(f"{status_port}/elsewhere", None).job(87)


def test_definitions_without_commit_timestamps_are_in_force_for_all_rows() -> None:
    values = _defined().to_json()
    del values["early"]
    values["tables"] = [table[:4] for table in values["tables"]]
    definitions = Definitions.from_json(values)
    assert {table.commit_ts for table in definitions.versions()} == {0}
    assert definitions.version == _defined().version
