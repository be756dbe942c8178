# SPDX-License-Identifier: Apache-2.0
"""A Ptubes client that behaves like the SDK: one connection, one request at a time, no Host header.

The SDK is not published as a package, so this client reimplements its states: ask, connect, subscribe, fetch.
"""

import http.client
import json
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from google.protobuf import json_format

from tests.support.ptubes.packet import RdsEnvelope, shards_of
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

EARLIEST = {"checkpointMode": "EARLIEST", "versionTs": 1}
LATEST = {"checkpointMode": "LATEST", "versionTs": 1}


def normal(checkpoint: Any) -> dict[str, Any]:
    """Return a checkpoint of an event in the form in which a client sends it back."""
    plain = json_format.MessageToDict(checkpoint, always_print_fields_with_no_presence=True)
    # The JSON form of protobuf writes int64 as text; Ptubes writes numbers.
    numbers = {name: int(value) for name, value in plain.items() if name != "uuid"}
    return {**numbers, "uuid": checkpoint.uuid, "checkpointMode": "NORMAL"}


class PtubesClient:
    """One connection to a daemon's port for Ptubes clients. `events` contains the events of each shard, in
    order.
    """

    def __init__(
        self,
        port: int,
        tables: Iterable[str],
        *,
        instance: str = "shop",
        shards: Iterable[int] = (0,),
        shard_count: int = 1,
        task: str = "test",
        **more: Any,
    ) -> None:
        databases: dict[str, list[str]] = {}
        for name in tables:
            database, _, table = name.partition(".")
            databases.setdefault(database, []).append(table)
        self.config: dict[str, Any] = {
            "partitionClusterInfo": {"partitionTotal": shard_count, "partitionSet": list(shards)},
            "serviceGroupInfo": {
                "taskName": task,
                "serviceGroupName": instance,
                "databaseInfoSet": [
                    {"databaseName": database, "tableNames": tables} for database, tables in databases.items()
                ],
            },
            "buffaloCheckpoint": EARLIEST,
            **more,
        }
        self.events: dict[int, list[Any]] = {}
        self.latest: Any = None
        self._port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @property
    def local_port(self) -> int:
        """The port of this end of the connection."""
        port: int = self._connection.sock.getsockname()[1]
        return port

    def call(self, path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
        """Return the response of a call; a status other than 200 is a failure."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.putrequest("POST", path, skip_host=True, skip_accept_encoding=True)
        self._connection.putheader("content-length", str(len(content)))
        for name, value in (headers or {}).items():
            self._connection.putheader(name, value)
        self._connection.endheaders(content)
        response = self._connection.getresponse()
        assert response.status == 200, response.read()
        return response.read()

    def server_info(self, **changes: Any) -> dict[str, Any]:
        """Return the response of getServerInfo."""
        actual: dict[str, Any] = json.loads(self.call("/v1/getServerInfo", {**self.config, **changes}))
        return actual

    def subscribe(self, checkpoint: Any = None, **changes: Any) -> str:
        """Subscribe, and return the response."""
        if checkpoint is not None:
            changes["buffaloCheckpoint"] = checkpoint
        self.config.update(changes)
        return self.call("/v1/subscribe", self.config).decode()

    def fetch(self, batch: int = 1000, timeout_ms: int = 50, size: int = 1_000_000) -> Any:
        """Return the next envelope, and keep its events."""
        request = {"batchSize": batch, "timeoutMs": timeout_ms, "maxByteSize": size}
        content = self.call("/v1/fetchMessages", request)
        assert content != b"fail"
        envelope = RdsEnvelope.FromString(content)
        assert not envelope.error_code, envelope.error_message
        for shard, events in shards_of(envelope).items():
            self.events.setdefault(shard, []).extend(events)
        if envelope.HasField("latestCheckpoint"):
            self.latest = envelope.latestCheckpoint
        return envelope

    def fetch_until(self, is_done: Callable[[Self], bool], batch: int = 1000) -> None:
        """Fetch until a condition holds."""

        def comes_nearer() -> bool:
            if not is_done(self):
                self.fetch(batch)
            return is_done(self)

        wait_until(comes_nearer)
