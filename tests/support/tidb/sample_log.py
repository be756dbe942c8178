# SPDX-License-Identifier: Apache-2.0
"""The binlog to which the sample payloads of a TiDB cluster are written."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock._native import TidbTranscoder, tidb_ddl, tidb_file_head, tidb_heads
from tests.conftest import ROOT

SAMPLES = ROOT / "tests/samples/tidb"
FILE = "tidb-binlog.000001"
CLUSTER_ID, SERVER_ID = 7001, 9
DELETE_ONLY = 1


def payloads() -> list[bytes]:
    """Return the payloads that a Pump gave to a Drainer, in commit order."""
    return [path.read_bytes() for path in sorted((SAMPLES / "payloads").glob("*.bin"))]


def jobs() -> dict[int, dict[str, Any]]:
    """Return the DDL jobs of the payloads by their numbers."""
    return {job["id"]: job for job in json.loads((SAMPLES / "ddl_jobs.json").read_text())}


def defined(last_job: int | None = None) -> TidbTranscoder:
    """Return a transcoder with the definitions of all jobs up to the given job."""
    transcoder = TidbTranscoder(cluster_id=CLUSTER_ID, server_id=SERVER_ID)
    for number, job in jobs().items():
        if last_job is None or number <= last_job:
            define(transcoder, job)
    return transcoder


def define(transcoder: TidbTranscoder, job: dict[str, Any]) -> None:
    """Set the table definition that results from a job, if the job has one."""
    info = job["binlog"].get("TableInfo")
    if info is not None:
        binlog = job["binlog"]
        # The definition applies from this timestamp, shortly after the commit timestamp of the job's
        # statement.
        finished_ts = binlog["FinishedTS"]
        transcoder.define(job["schema_name"], json.dumps(info).encode(), binlog["SchemaVersion"], finished_ts)


def transactions(received: Sequence[bytes] | None = None, offset: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of each transaction, the first of which starts after the file's head."""
    transcoder, definitions = TidbTranscoder(cluster_id=CLUSTER_ID, server_id=SERVER_ID), jobs()
    end = len(head()) if offset is None else offset
    for payload in payloads() if received is None else received:
        text, job_id, state = tidb_ddl(payload)
        if state == DELETE_ONLY:
            continue
        if job_id:
            define(transcoder, definitions[job_id])
            database = "" if text.startswith("CREATE DATABASE") else definitions[job_id]["schema_name"]
            events = transcoder.ddl(payload, database, end)
        else:
            events = b"".join(transcoder.transaction([payload], end))
        end += len(events)
        yield events


def head() -> bytes:
    """Return the first bytes of the file."""
    return tidb_file_head(server_id=SERVER_ID, time_s=1_795_346_137)


def log() -> bytes:
    """Return the whole file."""
    return head() + b"".join(transactions())


def write_log(folder: Path) -> Path:
    """Write the file into a folder."""
    path = folder / FILE
    path.write_bytes(log())
    return path


def commit_timestamps() -> list[int]:
    """Return the commit timestamps of the payloads."""
    return [commit_ts for _, _, commit_ts, _ in tidb_heads(payloads())]
