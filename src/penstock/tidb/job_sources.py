# SPDX-License-Identifier: Apache-2.0
"""The sources of a cluster's DDL jobs:

SQL, TiDB's status port, or TiKV.
"""

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.errors import ConnectionLost, EventMalformed, ServerUnsupported
from penstock.model import ServerAddress
from penstock.mysql.connection import Connection, connect
from penstock.tidb.channels import ClusterTls
from penstock.tidb.cluster import Cluster, memcomparable
from penstock.tidb.jobs import DdlJob

_PAGE = 256
_ANSWER_SECONDS = 30.0

# Key of a job: m, the name of the hash, its kind of data, the job's id.
_HISTORY_PREFIX = b"m" + memcomparable(b"DDLJobHistory") + ord("h").to_bytes(8, "big")


class JobSource(Protocol):
    """Reads the finished DDL jobs of a cluster. Propagates errors from its connection."""

    def job(self, job_id: int) -> DdlJob | None:
        """Return a finished job, None if it is not finished."""

    def jobs(self) -> Iterator[DdlJob]:
        """Yield all finished jobs."""

    def newest(self) -> Sequence[DdlJob]:
        """Return at most the last few hundred jobs, in no particular order."""

    def close(self) -> None:
        """End the session."""


class SqlJobs:
    """Reads jobs over a MySQL session with a TiDB server."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._connection: Connection | None = None

    def job(self, job_id: int) -> DdlJob | None:
        """Return a finished job, None if it is not finished."""
        jobs = self._read("WHERE job_id = %s", job_id)
        return jobs[0] if jobs else None

    def jobs(self) -> Iterator[DdlJob]:
        """Yield all finished jobs."""
        last = -1
        while jobs := self._read(f"WHERE job_id > %s ORDER BY job_id LIMIT {_PAGE}", last):
            yield from jobs
            last = jobs[-1].job_id

    def newest(self) -> Sequence[DdlJob]:
        """Return at most the last few hundred jobs, in no particular order."""
        return self._read(f"WHERE job_id > %s ORDER BY job_id DESC LIMIT {_PAGE}", -1)

    def _read(self, where: str, value: int) -> list[DdlJob]:
        if self._connection is None:
            self._connection = connect(self._address, _ANSWER_SECONDS)
        try:
            rows = self._connection.query(f"SELECT job_meta FROM mysql.tidb_ddl_history {where}", [value])
        except ConnectionLost:
            self.close()
            raise
        return [DdlJob.parse(row["job_meta"]) for row in rows]

    def close(self) -> None:
        """End the session."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class StatusJobs:
    """Reads jobs from the HTTP status port of a TiDB server, which lists the newest jobs first."""

    def __init__(self, url: str, tls: ClusterTls | None) -> None:
        self._url = url.rstrip("/")
        self._context: ssl.SSLContext | None = None
        if self._url.startswith("https:"):
            self._context = ssl.create_default_context(cafile=None if tls is None else str(tls.ca))
            if tls is not None:
                self._context.load_cert_chain(tls.cert, tls.key)

    def job(self, job_id: int) -> DdlJob | None:
        """Return a finished job, None if it is not finished."""
        jobs = self._read(start_job_id=job_id + 1, limit=2)
        return next((job for job in jobs if job.job_id == job_id), None)

    def jobs(self) -> Iterator[DdlJob]:
        """Yield all finished jobs."""
        jobs = self._read(limit=_PAGE)
        while jobs:
            yield from jobs
            least = min(job.job_id for job in jobs)
            jobs = [
                job for job in self._read(start_job_id=max(least - 1, 1), limit=_PAGE) if job.job_id < least
            ]

    def newest(self) -> Sequence[DdlJob]:
        """Return at most the last few hundred jobs, in no particular order."""
        return self._read(limit=_PAGE)

    def _read(self, **query: int) -> list[DdlJob]:
        """Return jobs in descending order of their ids, starting with `start_job_id` or the newest."""
        url = f"{self._url}/ddl/history?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS, context=self._context) as response:
                values = json.loads(response.read())
        except urllib.error.HTTPError as problem:
            raise ServerUnsupported(
                f"{self._url} answered {problem.code} to a request for DDL jobs",
                hint="Set tidb.status to the status port of a TiDB server: http://host:10080",
            ) from problem
        except OSError as problem:
            raise ConnectionLost(f"{self._url}: {problem}") from problem
        except ValueError as problem:
            raise EventMalformed(f"{self._url} answered something else than JSON") from problem
        # Below the first job, TiDB returns the next value in its storage, as a job without a type.
        return [DdlJob.parse(json.dumps(job)) for job in values or () if job["type"]]

    def close(self) -> None:
        """Do nothing: each request has its own connection."""


class TikvJobs:
    """Reads jobs from TiKV, where TiDB stores them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def job(self, job_id: int) -> DdlJob | None:
        """Return a finished job, None if it is not finished."""
        key = _job_key(job_id)
        pairs = self._cluster.scan(key, key + b"\0", 1)
        return DdlJob.parse(pairs[0][1]) if pairs else None

    def jobs(self) -> Iterator[DdlJob]:
        """Yield all finished jobs."""
        start = _job_key(0)
        while pairs := self._cluster.scan(start, _job_key((1 << 64) - 1), _PAGE):
            yield from (DdlJob.parse(value) for _, value in pairs)
            start = pairs[-1][0] + b"\0"

    def newest(self) -> Sequence[DdlJob]:
        """Return at most the last few hundred jobs, in no particular order."""
        pairs = self._cluster.scan(_job_key(0), _job_key((1 << 64) - 1), _PAGE, newest=True)
        return [DdlJob.parse(value) for _, value in pairs]

    def close(self) -> None:
        """Do nothing: the cluster's connections belong to another object."""


def _job_key(job_id: int) -> bytes:
    return _HISTORY_PREFIX + memcomparable(job_id.to_bytes(8, "big"))
