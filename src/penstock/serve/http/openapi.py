# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI 3.1 description of the HTTP port: `GET /v1/openapi.json`."""

import functools
from importlib.metadata import version
from typing import Any

from penstock.serve.http.alerts import AlertTestRequest
from penstock.serve.http.as_of import AsOfRequest
from penstock.serve.http.change_frames import MEDIA_TYPE
from penstock.serve.http.changes_request import ChangesRequest
from penstock.serve.http.definitions import DefinitionRequest
from penstock.serve.http.fleet_control import CHANGES as FLEET_CHANGES
from penstock.serve.http.history import MEDIA_TYPE as HISTORY_MEDIA_TYPE
from penstock.serve.http.history import HistoryRequest
from penstock.serve.http.instances import ForgetRequest
from penstock.serve.http.json_request import JsonRequest
from penstock.serve.http.pumps import DecisionRequest
from penstock.serve.http.subscription_changes import CALLS as SUBSCRIPTION_CALLS
from penstock.serve.http.subscription_reset import ResetRequest
from penstock.serve.problems import PROBLEM_TYPE

_JSON = "application/json"
_BYTES = "application/octet-stream"
_TEXT = "text/plain"
_INSTANCE = "/v1/instances/{instance}"

# The query parameters by name, each with its JSON type and description.
_QUERY = {
    "after": ("string", "Wait until the log has grown past this position"),
    "timeout": ("number", "Maximum wait in seconds"),
    "follow": ("number", "Send frames of new transactions for up to this many seconds; 204 if it cannot"),
    "version": ("integer", "The commit version that names a file of definitions"),
    "listing": ("integer", "1: return the epochs, the extents and the GTID set of that end too"),
    "time_us": ("integer", "Microseconds UTC since 1970"),
    "gtid": ("string", "A transaction's GTID: uuid:5, or 0-1-5 of MariaDB"),
    "limit": ("integer", "Return at most this many rows, segments or events"),
    "gtid_set": ("string", "A GTID set, as in @@gtid_executed"),
    "position": ("string", "A position: mysql-bin.000003:1542, or 2/mysql-bin.000003:1542 in epoch 2"),
    "epoch": ("integer", "The epoch, 0 by default"),
    "file": ("string", "A binlog file of the server"),
    "start": ("integer", "The first byte, an offset of the file"),
    "stop": ("integer", "The offset after the last byte"),
    "from": ("string", "The position of the first event, the start of the log by default"),
    "to": ("string", "The position after the last event, the end of the log by default"),
    "kind": ("string", "audit: what accounts have changed; other: the rest; default: both"),
    "table": ("string", "One table: shop.orders"),
    "again": ("integer", "1: read the table's definition from the server again, even if it is not in doubt"),
    "reader": ("string", "The holder's name"),
    "span": ("integer", "The last seconds: 3600 by default, 86400 at most"),
    "points": ("integer", "Values of each series: 240 by default, 1440 at most"),
    "dry_run": ("integer", "1: report what would happen, and change nothing"),
    "seconds": ("integer", "Lifetime of the hold in seconds"),
}

# Each call: method, path, summary, query parameters (required ones end in !), media type of the response.
_CALLS: tuple[tuple[str, str, str, str, str], ...] = (
    ("get", "/v1/status", "The status of every instance", "", _JSON),
    ("get", "/v1/instances", "The instances and their states", "", _JSON),
    ("get", "/v1/listeners", "The address of each listener", "", _JSON),
    ("get", "/v1/fleet", "The members of the fleet, and who captures each instance", "", _JSON),
    ("get", "/v1/pumps", "The Pumps of TiDB clusters that this daemon runs; administrators only", "", _JSON),
    (
        "get",
        "/v1/stored-instances",
        "The instances of the coordination store, without secrets; full administrators only",
        "",
        _JSON,
    ),
    ("get", "/v1/jobs", "The jobs of the fleet; full administrators only", "", _JSON),
    (
        "get",
        "/v1/jobs/{job}",
        "A job with the newest lines of its output; full administrators only",
        "",
        _JSON,
    ),
    ("get", "/v1/subscribers", "Connected subscribers and their positions", "", _JSON),
    ("get", "/v1/subscriptions", "Subscriptions with their members and shards", "", _JSON),
    ("get", "/v1/account", "The name and the rights of the client's account", "", _JSON),
    ("get", "/v1/openapi.json", "This description", "", _JSON),
    ("get", "/v1/alerts", "The conditions that operators are alerted on and that are true now", "", _JSON),
    ("get", "/v1/settings", "The settings in force, without secrets; administrators only", "", _JSON),
    ("get", "/v1/charts", "Lag and rows per second of each instance, up to 24 hours", "span points", _JSON),
    (
        "get",
        "/v1/events",
        "The newest events of the daemon; full administrators only",
        "kind limit",
        _JSON,
    ),
    ("get", "/v1/connections", "Open connections by listener; full administrators only", "", _JSON),
    ("get", "/metrics", "Metrics as Prometheus text or OpenMetrics", "", _TEXT),
    ("get", "/livez", "Whether the daemon is alive", "", _TEXT),
    ("get", "/readyz", "Whether the daemon is ready", "", _TEXT),
    ("get", "/startupz", "Whether the daemon has started", "", _TEXT),
    ("get", f"{_INSTANCE}/status", "The status of an instance", "", _JSON),
    ("get", f"{_INSTANCE}/epochs", "The server of each epoch", "", _JSON),
    ("get", f"{_INSTANCE}/extents", "Contiguous byte ranges in the log", "", _JSON),
    ("get", f"{_INSTANCE}/disk", "The free space on the log's disk", "", _JSON),
    ("get", f"{_INSTANCE}/head", "The end of the last complete transaction", "after timeout listing", _JSON),
    ("get", f"{_INSTANCE}/earliest", "The start of the log", "", _JSON),
    (
        "get",
        f"{_INSTANCE}/locate",
        "The position of a time, GTID set or position",
        "time_us gtid_set position",
        _JSON,
    ),
    ("get", f"{_INSTANCE}/gtid_set", "Every GTID before a position", "position!", _JSON),
    ("get", f"{_INSTANCE}/head_bytes", "A file's magic and format description", "epoch file!", _BYTES),
    ("get", f"{_INSTANCE}/bytes", "Raw bytes of a file", "epoch file! start! stop timeout follow", _BYTES),
    ("get", f"{_INSTANCE}/schema", "Table definitions at a position", "position! table again", _JSON),
    (
        "post",
        f"{_INSTANCE}/schema",
        "Set a table's definition from a position on, as JSON; administrators only",
        "position! table!",
        _JSON,
    ),
    (
        "post",
        f"{_INSTANCE}/position",
        "Hold the log from a position on",
        "reader! position! seconds",
        _JSON,
    ),
    ("get", f"{_INSTANCE}/holds", "The holds that are visible to the account", "", _JSON),
    ("delete", f"{_INSTANCE}/holds/{{reader}}", "Remove a hold", "", _JSON),
    (
        "get",
        f"{_INSTANCE}/copy/listing",
        "What a copy of the log lacks",
        "after timeout",
        _JSON,
    ),
    (
        "get",
        f"{_INSTANCE}/copy/metadata",
        "The end, holds and definition files, for a copy",
        "",
        _JSON,
    ),
    (
        "get",
        f"{_INSTANCE}/copy/definitions",
        "A file of definitions, for a copy",
        "version!",
        _BYTES,
    ),
    (
        "put",
        _INSTANCE,
        "Add an instance or change its settings; administrators of all instances only",
        "",
        _JSON,
    ),
    (
        "delete",
        _INSTANCE,
        "Remove an instance, whose log stays; administrators of all instances only",
        "dry_run",
        _JSON,
    ),
    ("post", f"{_INSTANCE}/resume", "Capture an instance again that was set aside", "", _JSON),
    (
        "get",
        f"{_INSTANCE}/check",
        "Settings of the servers that break or hide changes; administrators of all tables and columns only",
        "",
        _JSON,
    ),
    ("get", f"{_INSTANCE}/charts", "Lag, rates and size of the log, up to 24 hours", "span points", _JSON),
    (
        "get",
        f"{_INSTANCE}/export",
        "A range of the log as a binlog file; with dry_run, its files",
        "from to dry_run",
        _BYTES,
    ),
    ("get", f"{_INSTANCE}/segments", "The segments of the log, newest first", "limit", _JSON),
    (
        "get",
        f"{_INSTANCE}/definitions",
        "Each definition of a table, with the statement that made it; without a table, the tables' names",
        "table",
        _JSON,
    ),
    (
        "get",
        f"{_INSTANCE}/transaction",
        "One transaction with its rows, by GTID or by the position of one of its events",
        "gtid position limit",
        _JSON,
    ),
    (
        "post",
        f"{_INSTANCE}/subscriptions/{{subscription}}/reset",
        "Set the checkpoints of a subscription, or say what that would do; administrators only",
        "",
        _JSON,
    ),
    (
        "post",
        f"{_INSTANCE}/subscriptions/{{subscription}}/pause",
        "Stop delivering to a subscription, whose checkpoints stay; administrators only",
        "",
        _JSON,
    ),
    (
        "post",
        f"{_INSTANCE}/subscriptions/{{subscription}}/resume",
        "Let a paused subscription go on at its checkpoints; administrators only",
        "",
        _JSON,
    ),
    (
        "post",
        f"{_INSTANCE}/history",
        "Every change of one row in the log, newest first, as lines of JSON. Kinds of lines: change,"
        " statement, unreadable, progress, end, problem.",
        "",
        HISTORY_MEDIA_TYPE,
    ),
    (
        "post",
        f"{_INSTANCE}/verify",
        "Every byte of the log verified, as lines of JSON; administrators only. Kinds of lines: progress,"
        " finding, end, problem.",
        "",
        HISTORY_MEDIA_TYPE,
    ),
    (
        "post",
        f"{_INSTANCE}/as-of",
        "The rows of a table as they stood at a moment, as far as the log has changed them",
        "",
        _JSON,
    ),
    (
        "post",
        f"{_INSTANCE}/changes",
        "Stream changes as frames: the header's length (u32, big-endian), the header as JSON, and a"
        " payload of"
        " `bytes` bytes. Kinds of frames: batch (an Arrow IPC stream, or JSON lines), position (everything"
        " before it was sent), problem (an error), end.",
        "",
        MEDIA_TYPE,
    ),
)


# Calls that change something after a dry run: path, body and summary.
_CHANGES: tuple[tuple[str, type[JsonRequest], str], ...] = (
    *(
        (
            f"{_INSTANCE}/subscriptions/{{subscription}}/{word}",
            request_type,
            f"{summary}; administrators only",
        )
        for word, (request_type, summary, _) in SUBSCRIPTION_CALLS.items()
    ),
    *(
        (path, request_type, f"{summary}; full administrators only")
        for path, request_type, summary, _ in FLEET_CHANGES
    ),
    (
        f"{_INSTANCE}/definitions",
        DefinitionRequest,
        "Set a table's definition by its CREATE TABLE from a position on; administrators only",
    ),
    (
        "/v1/pumps/{instance}/decide",
        DecisionRequest,
        "Decide a transaction that a Pump cannot decide; administrators only",
    ),
    (
        "/v1/alerts/test",
        AlertTestRequest,
        "Send an alert and its end to the channel of alerts; full administrators only",
    ),
    (
        f"{_INSTANCE}/forget",
        ForgetRequest,
        "Let the settings files decide about an instance again; full administrators only",
    ),
)


@functools.cache
def description() -> dict[str, Any]:
    """Return the complete description as plain JSON values."""
    body = ChangesRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    parts: dict[str, Any] = body.pop("$defs", {})
    paths: dict[str, Any] = {}
    for method, path, summary, query, answer in _CALLS:
        paths.setdefault(path, {})[method] = _call(path, summary, query.split(), answer)
    paths[f"{_INSTANCE}/changes"]["post"]["requestBody"] = {
        "required": True,
        "content": {_JSON: {"schema": {"$ref": "#/components/schemas/ChangesRequest"}}},
    }
    paths[f"{_INSTANCE}/history"]["post"]["requestBody"] = {
        "required": True,
        "content": {_JSON: {"schema": HistoryRequest.model_json_schema()}},
    }
    paths[f"{_INSTANCE}/as-of"]["post"]["requestBody"] = {
        "required": True,
        "content": {_JSON: {"schema": AsOfRequest.model_json_schema()}},
    }
    reset = ResetRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    parts |= reset.pop("$defs", {})
    paths[f"{_INSTANCE}/subscriptions/{{subscription}}/reset"]["post"]["requestBody"] = {
        "required": True,
        "content": {_JSON: {"schema": reset}},
    }
    for path, request_type, summary in _CHANGES:
        content = {_JSON: {"schema": request_type.model_json_schema()}}
        post = {**_call(path, summary, [], _JSON), "requestBody": {"required": True, "content": content}}
        paths.setdefault(path, {})["post"] = post
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": version("penstock"),
            "description": "The kept binary logs of MySQL and MariaDB, and their row changes.",
        },
        "security": [{"token": []}, {"password": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**parts, "ChangesRequest": body, "Problem": _PROBLEM},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "password": {"type": "http", "scheme": "basic"},
            },
        },
    }


def _call(path: str, summary: str, query: list[str], answer: str) -> dict[str, Any]:
    parameters = [
        {
            "name": name.rstrip("!"),
            "in": "query",
            "required": name.endswith("!"),
            "description": _QUERY[name.rstrip("!")][1],
            "schema": {"type": _QUERY[name.rstrip("!")][0]},
        }
        for name in query
    ]
    if "{instance}" in path:
        parameters.insert(
            0, {"name": "instance", "in": "path", "required": True, "schema": {"type": "string"}}
        )
    for name in ("reader", "subscription", "job", "member"):
        if f"{{{name}}}" in path:
            parameters.insert(1, {"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    schema = {"type": "object"} if answer == _JSON else {"type": "string", "format": "binary"}
    problem = {"description": "A problem", "content": {PROBLEM_TYPE: {"schema": _PROBLEM_REFERENCE}}}
    return {
        "summary": summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": summary, "content": {answer: {"schema": schema}}},
            "default": problem,
        },
    }


_PROBLEM_REFERENCE = {"$ref": "#/components/schemas/Problem"}
_PROBLEM = {
    "type": "object",
    "description": "RFC 9457. `type` is the error class; clients should select by it.",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "position": {"type": ["string", "null"]},
        "hint": {"type": ["string", "null"]},
    },
}
