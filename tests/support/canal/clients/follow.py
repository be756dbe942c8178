# SPDX-License-Identifier: Apache-2.0
"""Follows a destination with the Canal client from PyPI, and prints entries as JSON until an entry of the
table "stop" arrives.

Runs in an interpreter whose path has that client and the old protobuf library that it requires.
"""

import json
import sys
import time
from typing import Any

from canal.client import Client  # type: ignore[import-not-found]
from canal.protocol import EntryProtocol_pb2  # type: ignore[import-not-found]


def columns(row_columns: Any) -> dict[str, dict[str, Any]]:
    """Return columns as plain values."""
    return {
        column.name: {
            "value": None if column.isNull else column.value,
            "sqlType": column.sqlType,
            "mysqlType": column.mysqlType,
            "isKey": column.isKey,
            "updated": column.updated,
        }
        for column in row_columns
    }


def tell(entry: Any) -> dict[str, Any]:
    """Return an entry as plain values."""
    change = EntryProtocol_pb2.RowChange()
    if entry.entryType == EntryProtocol_pb2.EntryType.ROWDATA:
        change.MergeFromString(entry.storeValue)
    is_change = entry.entryType == EntryProtocol_pb2.EntryType.ROWDATA
    return {
        "entry": EntryProtocol_pb2.EntryType.Name(entry.entryType),
        "event": EntryProtocol_pb2.EventType.Name(change.eventType) if is_change else "",
        "schema": entry.header.schemaName,
        "table": entry.header.tableName,
        "sql": change.sql,
        "rows": [
            {"before": columns(row.beforeColumns), "after": columns(row.afterColumns)}
            for row in change.rowDatas
        ],
    }


def main(port: str, destination: str, user: str, password: str, table_filter: str) -> None:
    """Follow the destination and print its entries."""
    client = Client()
    client.connect("127.0.0.1", int(port))
    client.check_valid(user.encode(), password.encode())
    client.subscribe(b"1001", destination.encode(), table_filter.encode())
    stopped = False
    while not stopped:
        message = client.get_without_ack(100)
        for entry in message["entries"]:
            line = tell(entry)
            print(json.dumps(line))
            stopped = stopped or (line["table"] == "stop" and bool(line["rows"]))
        client.ack(message["id"])
        if not message["entries"]:
            time.sleep(0.01)
    client.disconnect()


main(*sys.argv[1:])
