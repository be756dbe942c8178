# SPDX-License-Identifier: Apache-2.0
"""A session on a PostgreSQL target: a psycopg connection with translated errors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv

from penstock.closing import Closing
from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    ServerUnsupported,
    ValueMalformed,
)
from penstock.model import Secret
from penstock.sinks.sink import extra_missing

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
except ImportError as problem:
    raise extra_missing("psycopg", "postgres") from problem

CONNECT_SECONDS_MAX = 10

_HINT_COLUMNS = "Compare the target's columns: penstock run --dry-run FILE prints what would be changed"
_HINT_GRANT = "Grant the sink's account CREATE on the database, and all rights on the target's tables"
_HINT_VALUE = "The target's column takes other values than the source's: change it, or map it by a step"

# The SQLSTATE of an error for two rows with the same unique value, and the SQLSTATE of an error for COPY into
# a table with row-level security, where only INSERT is allowed.
DUPLICATE = "23505"
COPY_REFUSED = "0A000"
# SQLSTATE codes and classes (PostgreSQL's "Error Codes"). The longest match applies.
_CLASSES: dict[str, tuple[type[PenstockError], str | None]] = {
    "08": (ConnectionLost, None),
    "22": (ValueMalformed, _HINT_VALUE),
    "23": (ValueMalformed, "The target has a constraint that the source's rows break: drop it there"),
    "25006": (ServerBusy, "The server is read-only, as a standby is: point the sink's url at the primary"),
    "28": (AuthenticationFailed, "Check user and password of the sink in the pipeline's file"),
    "3D": (SchemaChanged, "The database in the sink's url is not there: create it"),
    "3F": (SchemaChanged, _HINT_COLUMNS),
    "40": (ServerBusy, None),
    "42": (SchemaChanged, _HINT_COLUMNS),
    "42501": (PrivilegeMissing, _HINT_GRANT),
    "53": (ServerBusy, None),
    "55": (ServerBusy, None),
    "57": (ConnectionLost, None),
    # There is no cast from a column's type to its new type.
    "42846": (ValueMalformed, _HINT_COLUMNS),
    "58": (ServerBusy, None),
    "P0001": (
        ValueMalformed,
        "A trigger of the target's table is in the way: drop it there, or filter such rows",
    ),
}


def verified_tls(url: str, ca: Path) -> dict[str, Any]:
    """Return the parameters with which a certificate is verified by authorities in a file. The URL may say
    that it need not name the host.
    """
    mode = conninfo_to_dict(url).get("sslmode")
    return {"sslrootcert": str(ca), "sslmode": "verify-ca" if mode == "verify-ca" else "verify-full"}


class Session(Closing):
    """A session with the server, used by one thread at a time. Its transaction begins with the first
    statement.
    """

    def __init__(self, url: str, user: str | None, password: Secret | None, ca: Path | None = None) -> None:
        """Open a session. With `ca`, the server's certificate is verified. Raises Penstock errors."""
        self.where = url
        options: dict[str, Any] = {
            "user": user,
            "password": password.reveal() if password is not None else None,
        }
        with self._translate_errors():
            self._connection = psycopg.connect(
                url,
                connect_timeout=CONNECT_SECONDS_MAX,
                application_name="penstock",
                # Prepare no statements, because prepared statements would refer to temporary tables that no
                # longer exist.
                prepare_threshold=None,
                options="-c timezone=UTC -c standard_conforming_strings=on -c intervalstyle=postgres"
                " -c search_path=pg_catalog",
                **{name: value for name, value in options.items() if value is not None},
                **({} if ca is None else verified_tls(url, ca)),
            )

    def close(self) -> None:
        """End the session. An open transaction is rolled back."""
        self._connection.close()

    def run(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows, [] if it has no result."""
        with self._translate_errors(), self._connection.cursor() as cursor:
            cursor.execute(sql.encode(), list(values) or None)
            return cursor.fetchall() if cursor.description is not None else []

    def copy_in(self, sql: str, pieces: Iterable[bytes]) -> None:
        """Send pieces of text to a COPY ... FROM STDIN."""
        with self._translate_errors(), self._connection.cursor() as cursor, cursor.copy(sql.encode()) as copy:
            for piece in pieces:
                copy.write(piece)

    def copy_out(self, sql: str, types: dict[str, pyarrow.DataType]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of a query, parsed from CSV as the given types."""
        statement = f"COPY ({sql}) TO STDOUT (FORMAT csv)".encode()
        with self._translate_errors(), self._connection.cursor() as cursor, cursor.copy(statement) as copy:
            yield from _csv(copy, types)

    def commit(self) -> None:
        """Commit the transaction."""
        with self._translate_errors():
            self._connection.commit()

    def rollback(self) -> None:
        """Roll back the transaction."""
        with self._translate_errors():
            self._connection.rollback()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as problem:
            raise translate_error(problem, self.where) from problem


# Bytes of CSV that are parsed at once, ending with a complete row.
_CSV_BYTES = 4 << 20


def _csv(copy: Any, types: dict[str, pyarrow.DataType]) -> Iterator[pyarrow.RecordBatch]:
    """Yield batches of complete rows. Each message of a COPY is one row."""
    buffered = bytearray()
    for row in copy:
        buffered += row
        if len(buffered) >= _CSV_BYTES:
            yield from _read_csv(bytes(buffered), types)
            buffered.clear()
    if buffered:
        yield from _read_csv(bytes(buffered), types)


def _read_csv(text: bytes, types: dict[str, pyarrow.DataType]) -> list[pyarrow.RecordBatch]:
    table = pyarrow.csv.read_csv(
        pyarrow.BufferReader(text),
        read_options=pyarrow.csv.ReadOptions(column_names=list(types), block_size=len(text) + 1),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
    batches: list[pyarrow.RecordBatch] = table.combine_chunks().to_batches()
    return batches


def translate_error(problem: "psycopg.Error", where: str) -> PenstockError:
    """Return the Penstock error for a psycopg error. `where` is the server's address without a password."""
    code = problem.sqlstate or ""
    text = str(problem.diag.message_primary or problem).splitlines()[0]
    if not code:
        wants_password = getattr(problem.pgconn, "used_password", False) or getattr(
            problem.pgconn, "needs_password", False
        )
        if wants_password:
            return AuthenticationFailed(f"{where}: {text}", hint=_CLASSES["28"][1])
        return ConnectionLost(f"{where}: {text}")
    for length in (5, 2):
        if code[:length] in _CLASSES:
            kind, hint = _CLASSES[code[:length]]
            return kind(f"{where}: {text} (SQLSTATE {code})", hint=hint)
    return ServerUnsupported(f"{where}: {text} (SQLSTATE {code})")


def sqlstate_of(error: PenstockError) -> str:
    """Return the server's SQLSTATE for an error of a session, empty if there is none."""
    problem = error.__cause__
    return (problem.sqlstate or "") if isinstance(problem, psycopg.Error) else ""
