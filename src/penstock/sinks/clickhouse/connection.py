# SPDX-License-Identifier: Apache-2.0
"""Connects to a ClickHouse server, and translates the server's errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pyarrow

from penstock.errors import (
    AuthenticationFailed,
    DiskFailed,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    ServerUnsupported,
    ValueMalformed,
)
from penstock.model import Secret
from penstock.sinks.clickhouse.tables import Layout, TableLocation, literal
from penstock.sinks.endpoint import Endpoint, connection_error
from penstock.sinks.sink import HINT_GONE, extra_missing
from penstock.sinks.sql.table_owner import owner_of

_CONNECT_SECONDS_MAX = 10
_ANSWER_SECONDS_MAX = 600

# How ClickHouse's error numbers are translated.
_BY_NUMBER: dict[int, tuple[type[PenstockError], str]] = {
    **dict.fromkeys((192, 193, 194, 516), (AuthenticationFailed, "Check user and password of the sink")),
    497: (PrivilegeMissing, "Grant it as the guide of the clickhouse sink shows"),
    # Temporary: too many parts, queries or connections, out of memory, timeout, no quorum, read-only.
    **dict.fromkeys(
        (159, 164, 201, 202, 203, 209, 210, 225, 241, 242, 252, 285, 319, 999),
        (ServerBusy, "The batch is tried again"),
    ),
    243: (DiskFailed, "Make room on the target's disk"),
    # The column, table or database does not exist.
    **dict.fromkeys((16, 60, 81), (SchemaChanged, HINT_GONE)),
    469: (
        ValueMalformed,
        "A constraint of the target's table is in the way: drop it there, or filter such rows",
    ),
    **dict.fromkeys(
        (6, 27, 53, 69, 70, 117, 131, 321, 349),
        (ValueMalformed, "The target's column cannot hold a value: change its type there, or drop the table"),
    ),
}


class ClickHouseSession:
    """A connection to a ClickHouse server. Used by one thread."""

    def __init__(self, endpoint: Endpoint, password: Secret | None) -> None:
        try:
            import clickhouse_connect
        except ImportError as problem:
            raise extra_missing("clickhouse-connect", "clickhouse") from problem
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionInvalid(
                f"{endpoint.url!r} is no ClickHouse server",
                hint="Write http://host:8123 or https://host:8443",
            )
        with translate_errors():
            self._client = clickhouse_connect.get_client(
                interface=parts.scheme,
                host=parts.hostname,
                port=parts.port or (8443 if parts.scheme == "https" else 8123),
                username=endpoint.user or "default",
                password=password.reveal() if password else "",
                ca_cert=str(endpoint.ca) if endpoint.ca else None,
                connect_timeout=_CONNECT_SECONDS_MAX,
                send_receive_timeout=_ANSWER_SECONDS_MAX,
                # A session would serialise statements, and a retried statement would find it locked.
                autogenerate_session_id=False,
            )

    def run(self, statement: str) -> None:
        """Run a statement without a result."""
        with translate_errors():
            self._client.command(statement)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a small result."""
        with translate_errors():
            return [tuple(row) for row in self._client.query(statement).result_rows]

    def batches(self, statement: str) -> Iterator[pyarrow.RecordBatch]:
        """Yield the batches of a large result, with text as bytes."""
        with translate_errors(), self._client.query_arrow_stream(statement, use_strings=False) as stream:
            yield from stream

    def insert(self, location: TableLocation, rows: pyarrow.Table, token: str | None = None) -> None:
        """Write rows in one insert. The server deduplicates inserts with the same token."""
        settings = {} if token is None else {"insert_deduplication_token": token}
        with translate_errors(location.sql):
            self._client.insert_arrow(location.table, rows, database=location.database, settings=settings)

    def columns(self, location: TableLocation) -> dict[str, str]:
        """Return the types of writable columns by name; {} if the table does not exist."""
        rows = self.rows(
            f"SELECT name, type FROM system.columns WHERE {_where(location)}"
            " AND default_kind IN ('', 'DEFAULT') ORDER BY position"
        )
        return {str(name): str(text) for name, text in rows}

    def column_names(self, location: TableLocation) -> set[str]:
        """Return all columns of a table, empty if the table does not exist."""
        return {
            str(name) for (name,) in self.rows(f"SELECT name FROM system.columns WHERE {_where(location)}")
        }

    def layout(self, location: TableLocation) -> Layout | None:
        """Return the layout of a target table, None if the table does not exist."""
        where, columns = _where(location), self.columns(location)
        if not columns:
            return None
        where_name = where.replace(" table = ", " name = ")
        [(comment,)] = self.rows(f"SELECT comment FROM system.tables WHERE {where_name}")
        key = self.rows(
            f"SELECT name FROM system.columns WHERE {where} AND is_in_sorting_key ORDER BY position"
        )
        order = self.rows(f"SELECT sorting_key FROM system.tables WHERE {where_name}")[0][0]
        return Layout(columns, _in_order([name for (name,) in key], order), owner_of(comment))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@contextmanager
def translate_errors(location: str | None = None) -> Iterator[None]:
    """Translate the client's exceptions into Penstock errors."""
    from clickhouse_connect.driver.exceptions import ClickHouseError

    try:
        yield
    except ClickHouseError as problem:
        number = getattr(problem, "code", None)
        if number is None:
            raise connection_error("ClickHouse", problem, location) from problem
        kind, hint = _BY_NUMBER.get(number, (ServerUnsupported, "See the message"))
        raise kind(f"ClickHouse answers: {problem}", position=location, hint=hint) from problem


def _where(location: TableLocation) -> str:
    return f"database = {literal(location.database)} AND table = {literal(location.table)}"


def _in_order(names: list[str], text: str) -> tuple[str, ...]:
    """Return the columns of a sorting key in key order, which the server reports only as text."""
    return tuple(sorted(names, key=lambda name: _index_in_key(text, name)))


def _index_in_key(text: str, name: str) -> int:
    parts = [part.strip().strip("`") for part in text.split(", ")]
    return parts.index(name) if name in parts else len(parts)
