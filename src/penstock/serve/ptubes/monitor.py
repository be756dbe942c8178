# SPDX-License-Identifier: Apache-2.0
"""The requests of Ptubes monitors, on their own port: JSON, and never a password.

    /v1/basicInfo               start time and version of the daemon
    /v1/containerInfo           connections and bytes of the port for clients
    /v1/clientSessionInfo       each session
    /v1/readerTaskInfo          each instance
    /v1/readerTaskRuntimeConf   ?allTask=true, or ?taskName=a&taskName=b: settings of instances

An account sees the instances that it may read. Counters of Ptubes without an equivalent here are 0.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.logstore.followed_log import ServedLog
from penstock.model import Position
from penstock.serve.access import account_of
from penstock.serve.ptubes.messages import PtubesCheckpoint
from penstock.serve.ptubes.session import ClientReport, Clients, clients_of
from penstock.serve.served import Served, ServedInstance


def monitor_app(served: Served) -> Starlette:
    """Return the application of the port for monitors."""
    return Starlette(routes=[Mount("/", app=_Monitor(served))])


class _Monitor:
    """The handlers by path."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._clients: Clients = clients_of(served)
        self._handlers: dict[str, Callable[[Request], Any]] = {
            "/v1/basicInfo": self._basic,
            "/v1/containerInfo": self._container,
            "/v1/clientSessionInfo": self._sessions,
            "/v1/readerTaskInfo": self._tasks,
            "/v1/readerTaskRuntimeConf": self._settings,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        handler = self._handlers.get(request.url.path)
        if handler is None:
            response = Response(b"Bye", headers={"Connection": "close"}, media_type="text/plain")
        else:
            response = Response(json.dumps(handler(request)).encode(), media_type="application/json")
        await response(scope, receive, send)

    def _basic(self, request: Request) -> Any:
        started = datetime.fromtimestamp(self._clients.started_ms // 1000, UTC)
        return {"startTime": started.strftime("%Y-%m-%d %H:%M:%S"), "version": _version()}

    def _container(self, request: Request) -> Any:
        clients = self._clients.all()
        return {
            "numPeers": len(clients),
            "freqConnectionIdleTimeouts": 0,
            "inboundBytes": sum(client.figures.inbound_bytes for client in clients),
            "outboundBytes": sum(client.figures.outbound_bytes for client in clients),
        }

    def _sessions(self, request: Request) -> Any:
        account = account_of(request)
        return [
            _session(client) for instance, client in self._clients.sessions() if account.may_read(instance)
        ]

    def _tasks(self, request: Request) -> Any:
        return [_task(instance) for instance in self._readable(request).values()]

    def _settings(self, request: Request) -> Any:
        query, known = request.query_params, self._readable(request)
        names = query.getlist("taskName")
        if query.get("allTask", "").lower() == "true":
            names = list(known)
        return [_settings_of(known[name]) for name in dict.fromkeys(names) if name in known]

    def _readable(self, request: Request) -> dict[str, ServedInstance]:
        account = account_of(request)
        return {name: instance for name, instance in self._served.instances.items() if account.may_read(name)}


def _session(client: ClientReport) -> dict[str, Any]:
    figures = client.figures
    last = figures.last_checkpoint
    return {
        "writerTaskName": client.task,
        "remoteHost": client.peer,
        "port": client.port,
        "inboundBytes": figures.inbound_bytes,
        "outboundBytes": figures.outbound_bytes,
        "freqSubCalls": figures.subscribes,
        "latencySubCall": figures.subscribe_ms,
        "freqErrorSubs": figures.failed_subscribes,
        "lastSubTimestamp": figures.last_subscribe_ms,
        "connectTimestamp": figures.connected_ms,
        "freqBinlogGetCalls": figures.fetches,
        "latencyBinlogGetCall": figures.fetch_ms,
        "freqErrorBinlogGets": figures.failed_fetches,
        "lastBinlogGetTimestamp": figures.last_fetch_ms,
        "latestBinlogGetBinlogInfo": None if last is None else last.to_json(),
    }


def _task(instance: ServedInstance) -> dict[str, Any]:
    status, log = instance.status(), _log_of(instance)
    received_ms = (status["time_us"] or 0) // 1000
    lag_ms = round((status["lag_seconds"] or 0) * 1000)
    kept = None
    if log is not None:
        kept = {
            "minBinlogInfo": _checkpoint_json(log, log.earliest()),
            "maxBinlogInfo": _checkpoint_json(log, log.visible, received_ms),
            "readCount": 0,
        }
    return {
        "readerTaskName": instance.name,
        "readerTaskStartTime": 0,
        "freqWriteEvents": round(status["rows_per_second"]),
        "freqReadEvents": 0,
        "timestampEventReceive": received_ms,
        "latencyEventReceive": lag_ms,
        "latencyWriteEvent": 0,
        "latencyReadEvent": 0,
        "heartbeatTimestamp": 0,
        "heartbeatRecieveTimestamp": 0,
        "heartbeatBinlogInfo": None,
        "storageMode": _mode(log),
        "memStorageEngineDetail": None,
        "fileStorageEngineDetail": kept,
    }


def _settings_of(instance: ServedInstance) -> dict[str, Any]:
    status, log = instance.status(), _log_of(instance)
    settings = None if log is None else log.settings
    return {
        "readerTaskName": instance.name,
        "producerConfig": {
            "server": status["server"],
            "tables": status["tables"],
            "excludeTables": status["exclude_tables"],
        },
        # Leave out URLs, because they may contain credentials.
        "storageConfig": settings
        and {
            "storageMode": _mode(log),
            "memoryBytes": settings.memory_bytes,
            "segmentBytes": settings.segment_bytes,
            "blockBytes": settings.block_bytes,
            "fsync": settings.fsync,
            "retentionSeconds": settings.retention.age,
        },
    }


def _log_of(instance: ServedInstance) -> ServedLog | None:
    try:
        return instance.log()
    except PenstockError:
        # The log is being opened, or cannot be opened; the status says which of the two.
        return None


def _mode(log: ServedLog | None) -> str | None:
    return None if log is None else {"memory": "MEM", "file": "FILE", "mixed": "MIX"}[log.settings.mode]


def _checkpoint_json(
    log: ServedLog, position: Position | None, timestamp_ms: int = 0
) -> dict[str, Any] | None:
    if position is None:
        return None
    epoch = log.epochs.get(position.epoch)
    checkpoint = PtubesCheckpoint(
        server_id=0 if epoch is None else epoch.server_id,
        binlog_file=position.file_number,
        binlog_offset=position.offset,
        timestamp=timestamp_ms,
    )
    return {"changeId": position.epoch, **checkpoint.to_json()}


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        # A source tree that was never installed has no package metadata.
        return "0+uninstalled"
