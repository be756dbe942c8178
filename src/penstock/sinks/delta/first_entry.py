# SPDX-License-Identifier: Apache-2.0
"""Writes the first entry of a Delta table's log on this host, with the actions that `deltalake` would write.

`deltalake` lists and reads the log before and after it writes an entry. For a new table this takes several
times as long as the rest, and there is nothing to read. Later entries are written by `deltalake`.
"""

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import deltalake
import pyarrow

from penstock.sinks.delta.table import add_actions
from penstock.sinks.lake.parquet_files import DataFile

FIRST_ENTRY = f"{0:020}.json"

# The versions of the protocol that every reader and writer supports.
_PROTOCOL: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}
# Times without a time zone are a feature, and features are listed since these versions.
_PROTOCOL_OF_ZONELESS_TIMES: dict[str, Any] = {
    "minReaderVersion": 3,
    "minWriterVersion": 7,
    "readerFeatures": ["timestampNtz"],
    "writerFeatures": ["timestampNtz"],
}


def write_first_entry(
    log: str,
    schema: pyarrow.Schema,
    name: str,
    properties: Mapping[str, str],
    files: Sequence[DataFile],
    numbers: Mapping[str, int],
) -> None:
    """Create a table with files and batch numbers. `log` is the folder of the table's log.

    Raises FileExistsError if the table has a version.
    """
    now = int(time.time() * 1000)
    has_zoneless_times = any(_has_zoneless_times(field.type) for field in schema)
    metadata: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "name": name,
        "description": None,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": deltalake.Schema.from_arrow(schema).to_json(),
        "partitionColumns": [],
        "createdTime": now,
        "configuration": dict(properties),
    }
    actions: list[dict[str, Any]] = [
        {"commitInfo": {"timestamp": now, "operation": "CREATE TABLE", "operationParameters": {}}},
        {"protocol": _PROTOCOL_OF_ZONELESS_TIMES if has_zoneless_times else _PROTOCOL},
        {"metaData": metadata},
    ]
    for application, number in numbers.items():
        actions.append({"txn": {"appId": application, "version": number, "lastUpdated": now}})
    for action in add_actions(files, now):
        added = {
            "path": action.path,
            "partitionValues": {},
            "size": action.size,
            "modificationTime": now,
            "dataChange": True,
            "stats": action.stats,
        }
        actions.append({"add": added})
    os.makedirs(log, exist_ok=True)
    # Readers ignore this name. Unlike a rename, a link fails if the entry exists.
    written = f"{log}/_commit_{uuid.uuid4()}.json.tmp"
    try:
        with open(written, "w", encoding="utf-8") as file:
            file.write("".join(json.dumps(action) + "\n" for action in actions))
        os.link(written, f"{log}/{FIRST_ENTRY}")
    finally:
        with suppress(FileNotFoundError):
            os.unlink(written)


def is_whole(entry: str) -> bool:
    """Return whether a log entry has all of its actions, as after a power loss it may not."""
    with open(entry, "rb") as file:
        content = file.read()
    if not content.endswith(b"\n"):
        return False
    try:
        for line in content.splitlines():
            json.loads(line)
    except ValueError:
        return False
    return True


def _has_zoneless_times(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_timestamp(kind):
        return kind.tz is None
    return any(_has_zoneless_times(kind.field(number).type) for number in range(kind.num_fields))
