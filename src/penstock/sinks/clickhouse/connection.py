# SPDX-License-Identifier: Apache-2.0
"""Connections to a ClickHouse server, whose errors are ours."""

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
from penstock.sinks.clickhouse.tables import Layout, Place, literal
from penstock.sinks.endpoint import Endpoint, lost
from penstock.sinks.sink import HINT_GONE, extra_missing
from penstock.sinks.sql.table_owner import owner_of

_CONNECT_SECONDS_MAX = 10
_ANSWER_SECONDS_MAX = 600

# What the numbers of ClickHouse's errors mean to us.
_BY_NUMBER: dict[int, tuple[type[PenstockError], str]] = {
    **dict.fromkeys((192, 193, 194, 516), (AuthenticationFailed, "Check user and password of the sink")),
    497: (PrivilegeMissing, "Grant it as the guide of the clickhouse sink shows"),
    # Too many parts, queries or connections, no memory, no time, no quorum, read-only for now.
    **dict.fromkeys(
        (159, 164, 201, 202, 203, 209, 210, 225, 241, 242, 252, 285, 319, 999),
        (ServerBusy, "The batch is tried again"),
    ),
    243: (DiskFailed, "Make room on the target's disk"),
    # No such column, table or database.
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
    """A connection. Used by one thread."""

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
        with told():
            self._client = clickhouse_connect.get_client(
                interface=parts.scheme,
                host=parts.hostname,
                port=parts.port or (8443 if parts.scheme == "https" else 8123),
                username=endpoint.user or "default",
                password=password.reveal() if password else "",
                ca_cert=str(endpoint.ca) if endpoint.ca else None,
                connect_timeout=_CONNECT_SECONDS_MAX,
                send_receive_timeout=_ANSWER_SECONDS_MAX,
                # One session would let one statement run at a time, and a retried one find it locked.
                autogenerate_session_id=False,
            )

    def run(self, statement: str) -> None:
        """Run a statement that gives nothing back."""
        with told():
            self._client.command(statement)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return what a small query gives."""
        with told():
            return [tuple(row) for row in self._client.query(statement).result_rows]

    def batches(self, statement: str) -> Iterator[pyarrow.RecordBatch]:
        """Yield what a large query gives; texts come as bytes."""
        with told(), self._client.query_arrow_stream(statement, use_strings=False) as stream:
            yield from stream

    def insert(self, place: Place, rows: pyarrow.Table, token: str | None = None) -> None:
        """Write rows in one insert; a token makes the same insert count once."""
        settings = {} if token is None else {"insert_deduplication_token": token}
        with told(place.sql):
            self._client.insert_arrow(place.table, rows, database=place.database, settings=settings)

    def columns(self, place: Place) -> dict[str, str]:
        """Return the types of the columns that take values, by name; {} where there is no such table."""
        found = self.rows(
            f"SELECT name, type FROM system.columns WHERE {_where(place)} AND default_kind IN ('', 'DEFAULT')"
            " ORDER BY position"
        )
        return {str(name): str(text) for name, text in found}

    def layout(self, place: Place) -> Layout | None:
        """Return what the target has, None where it has no such table."""
        where, columns = _where(place), self.columns(place)
        if not columns:
            return None
        named = where.replace(" table = ", " name = ")
        [(comment,)] = self.rows(f"SELECT comment FROM system.tables WHERE {named}")
        key = self.rows(
            f"SELECT name FROM system.columns WHERE {where} AND is_in_sorting_key ORDER BY position"
        )
        order = self.rows(f"SELECT sorting_key FROM system.tables WHERE {named}")[0][0]
        return Layout(columns, _in_order([name for (name,) in key], order), owner_of(comment))

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()


@contextmanager
def told(place: str | None = None) -> Iterator[None]:
    """Raise what the client raises as our own errors."""
    from clickhouse_connect.driver.exceptions import ClickHouseError

    try:
        yield
    except ClickHouseError as problem:
        number = getattr(problem, "code", None)
        if number is None:
            raise lost("ClickHouse", problem, place) from problem
        kind, hint = _BY_NUMBER.get(number, (ServerUnsupported, "See the message"))
        raise kind(f"ClickHouse answers: {problem}", position=place, hint=hint) from problem


def _where(place: Place) -> str:
    return f"database = {literal(place.database)} AND table = {literal(place.table)}"


def _in_order(names: list[str], text: str) -> tuple[str, ...]:
    """Return the columns of a sorting key in its order, which the server gives as a text alone."""
    return tuple(sorted(names, key=lambda name: _found(text, name)))


def _found(text: str, name: str) -> int:
    found = [part.strip().strip("`") for part in text.split(", ")]
    return found.index(name) if name in found else len(found)
