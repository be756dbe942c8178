# SPDX-License-Identifier: Apache-2.0
"""Finds problems that prevent capturing changes from a TiDB cluster, each with a command that solves it."""

from collections.abc import Iterator, Mapping
from contextlib import closing

from penstock.check.facts import Finding
from penstock.errors import PenstockError, TransientError
from penstock.model import ServerAddress
from penstock.mysql.connection import connect
from penstock.tidb.cluster import Cluster
from penstock.tidb.job_sources import JobSource
from penstock.tidb.messages import physical_us
from penstock.tidb.registry import Node, NodeKind, NodeState, Registry

# A node whose entry is older than this counts as silent. A Pump writes its entry every two seconds, a drainer
# every second.
_SILENT_SECONDS = 60.0
# From this version on, TiDB has no pump client.
_BINLOG_REMOVED = (8, 4)
# Releases in which PingCAP no longer supports the pump client.
_BINLOG_UNSUPPORTED = (7, 5)


def precheck_cluster(cluster: Cluster, jobs: JobSource, sql: ServerAddress | None) -> Iterator[Finding]:
    """Yield the findings about a cluster. An unreachable part is a finding, and the checks that depend on it
    are skipped.
    """
    try:
        now = cluster.timestamp()
    except PenstockError as problem:
        yield Finding("pd", "error", problem.message, problem.hint)
        return
    yield Finding("pd", "ok", f"PD answers; the cluster's id is {cluster.cluster_id}")
    try:
        registry = Registry(cluster)
        pumps, drainers = registry.list(NodeKind.PUMP), registry.list(NodeKind.DRAINER)
    except PenstockError as problem:
        yield Finding("registry", "error", problem.message, problem.hint)
        return
    yield from _check_pumps(pumps.nodes, now)
    yield from _check_drainers(drainers.nodes, now)
    for kind, listing in (("pump", pumps), ("drainer", drainers)):
        for node_id, why in listing.unreadable.items():
            yield Finding(f"{kind} {node_id}", "error", why, f"etcdctl get /tidb-binlog/v1/{kind}s/{node_id}")
    yield _check_jobs(jobs)
    if sql is not None:
        yield from _check_server(sql)


def _check_pumps(pumps: Mapping[str, Node], now: int) -> Iterator[Finding]:
    registered = [node for node in pumps.values() if node.state is not NodeState.OFFLINE]
    if not any(node.state is NodeState.ONLINE for node in registered):
        yield Finding(
            "pumps",
            "error",
            "no Pump is online, so TiDB servers with binlog.enable cannot commit",
            "Start one: penstock serve, with the role pump in tidb.roles",
        )
    for node in registered:
        name = f"pump {node.node_id}"
        silent = _silent_seconds(node, now)
        if node.state is not NodeState.ONLINE:
            yield Finding(
                name,
                "error",
                f"it is {node.state}, and every drainer waits for what it holds",
                f"Start it again; once it was drained: binlogctl -cmd offline-pump -node-id {node.node_id}",
            )
        elif silent > _SILENT_SECONDS:
            yield Finding(
                name,
                "error",
                f"it is registered as online at {node.host}, and has been silent for {silent:.0f} s",
                "Start it again: nothing later than its last transaction can be merged without it",
            )
        else:
            yield Finding(name, "ok", f"online at {node.host}")


def _check_drainers(drainers: Mapping[str, Node], now: int) -> Iterator[Finding]:
    for node in drainers.values():
        name, silent = f"drainer {node.node_id}", _silent_seconds(node, now)
        if node.state is NodeState.ONLINE and silent > _SILENT_SECONDS:
            yield Finding(
                name,
                "warning",
                f"it is registered as online, and has been silent for {silent:.0f} s: no Pump can start,"
                " because it announces itself to every online drainer",
                f"binlogctl -cmd update-drainer -node-id {node.node_id} -state paused",
            )
        elif node.state is not NodeState.OFFLINE:
            yield Finding(name, "ok", f"{node.state} at {node.host}")


def _silent_seconds(node: Node, now: int) -> float:
    return (physical_us(now) - physical_us(node.update_ts)) / 1e6


def _check_jobs(jobs: JobSource) -> Finding:
    try:
        newest = jobs.newest()
    except PenstockError as problem:
        return Finding(
            "definitions",
            "error",
            f"the DDL jobs cannot be read: {problem.message}",
            problem.hint or "Set tidb.sql to a TiDB server, or tidb.status to its status port",
        )
    version = max((job.schema_version for job in newest), default=0)
    return Finding("definitions", "ok", f"DDL jobs can be read; the newest schema version is {version}")


def _check_server(address: ServerAddress) -> Iterator[Finding]:
    try:
        with closing(connect(address)) as connection:
            row = connection.query("SELECT VERSION() AS version, @@log_bin AS binlog")[0]
            snapshot = connection.query("SHOW MASTER STATUS")
    except TransientError as problem:
        yield Finding("sql", "error", problem.message)
        return
    except PenstockError as problem:
        yield Finding("sql", "error", problem.message, problem.hint)
        return
    version = str(row["version"])
    numbers = tidb_version(version)
    if numbers is None:
        yield Finding("sql", "error", f"{address} is {version}, not TiDB", "Set tidb.sql to a TiDB server")
        return
    if numbers >= _BINLOG_REMOVED:
        yield Finding(
            "version",
            "error",
            f"TiDB {version} has no pump client any more",
            "Read what TiCDC writes: ticdc+s3://, ticdc+file:// or ticdc+kafka://",
        )
    elif numbers >= _BINLOG_UNSUPPORTED:
        yield Finding("version", "warning", f"TiDB {version}: PingCAP supports binlogs before v7.5 only")
    else:
        yield Finding("version", "ok", f"TiDB {version}")
    if str(row["binlog"]) not in ("1", "ON"):
        yield Finding(
            "binlog",
            "error",
            f"{address} writes no binlogs, so its changes are missing in every log",
            "Set in the configuration of every TiDB server: [binlog] enable = true, ignore-error = false",
        )
    else:
        yield Finding("binlog", "ok", "binlogs are written")
    if snapshot:
        yield Finding("snapshot", "ok", "timestamps for full loads can be read")


def tidb_version(text: str) -> tuple[int, ...] | None:
    """Return the release in a version such as 5.7.25-TiDB-v7.1.2; None if it is not TiDB's.

    Return () for a build without a release.
    """
    _, mark, release = text.partition("-TiDB-")
    if not mark:
        return None
    numbers = []
    for part in release.removeprefix("v").split("-", 1)[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
