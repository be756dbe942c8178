# SPDX-License-Identifier: Apache-2.0
"""Types shared by every layer: positions, tables, columns, sources and table selections.

This module depends only on `errors`, `limits` and `commit_versions`. Everything is immutable and can be
pickled, so executors can use it.
"""

import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import total_ordering
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.commit_versions import commit_version, epoch_base, file_number_of, shifted_epoch
from penstock.errors import OptionInvalid, PositionInvalid, SchemaInvalid

PASSWORD_VARIABLE = "PENSTOCK_PASSWORD"
PORT_DEFAULT = 3306
SSL_MODES = ("disabled", "preferred", "required", "verify_ca", "verify_identity")


@total_ordering
@dataclass(frozen=True)
class Position:
    """A position in one instance's binlog: a byte offset in a file, in an epoch.

    Positions are ordered by (base of the epoch, file number, offset). File names are compared by their
    numbers, so renaming the log does not change the order. Text form: `mysql-bin.000003:1542`, with the
    prefix `2/` in epoch 2.
    """

    epoch: int
    file: str
    offset: int

    @property
    def file_number(self) -> int:
        """Return the number at the end of the file name. Raises PositionInvalid for a name without one."""
        return file_number_of(self.file)

    @property
    def commit_version(self) -> int:
        """Return the commit version of a transaction that starts here."""
        return commit_version(self.epoch, self.file_number, self.offset)

    def shifted(self, shift: int) -> Self:
        """Return the same position in a log whose epoch bases are higher by `shift`."""
        return replace(self, epoch=shifted_epoch(self.epoch, shift)) if shift else self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `[epoch/]file:offset`. Raises PositionInvalid."""
        match = re.fullmatch(r"(?:(\d{1,20})/)?([^/:]+\.\d{1,20}):(\d{1,20})", text.strip())
        if match is None:
            raise PositionInvalid(
                f"{text[:200]!r} is not a position", hint="Write it as file:offset, mysql-bin.000003:1542"
            )
        return cls(int(match.group(1) or 0), match.group(2), int(match.group(3)))

    def __str__(self) -> str:
        epoch = f"{self.epoch}/" if self.epoch else ""
        return f"{epoch}{self.file}:{self.offset}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Position):
            return NotImplemented
        if self.file == other.file and self.epoch == other.epoch:
            return self.offset < other.offset
        first = epoch_base(self.epoch), file_number_of(self.file), self.offset
        return first < (epoch_base(other.epoch), file_number_of(other.file), other.offset)


# --- Tables ---------------------------------------------------------------------------------


_PLAIN_NAME = re.compile(r"[0-9A-Za-z_$\u0080-\U0010ffff]+")
# Strip only these characters, because a name may begin or end with another script's space.
_BLANKS = " \t\r\n"
_NAME_PART = re.compile(r"`((?:[^`]|``)+)`|([^.`]+)")


def quote_name(name: str) -> str:
    """Return the name as an SQL identifier in backticks."""
    return "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True, order=True)
class TableName:
    """A database and a table. Text form `shop.orders`; unusual names are quoted with backticks."""

    database: str
    table: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `database.table`, each optionally in backticks. Raises OptionInvalid."""
        parts, end = [], 0
        text = text.strip(_BLANKS)
        while match := _NAME_PART.match(text, end):
            parts.append(match.group(1).replace("``", "`") if match.group(1) is not None else match.group(2))
            end = match.end()
            if end == len(text):
                if len(parts) == 2:
                    return cls(*parts)
                break
            if text[end] != ".":
                break
            end += 1
        raise OptionInvalid(
            f"{text!r} is not a table name", hint="Write database.table, odd names in backticks"
        )

    @property
    def sql(self) -> str:
        """The name as SQL, always quoted."""
        return f"{quote_name(self.database)}.{quote_name(self.table)}"

    def __str__(self) -> str:
        return ".".join(
            part if _PLAIN_NAME.fullmatch(part) else quote_name(part) for part in (self.database, self.table)
        )


@dataclass(frozen=True)
class Column:
    """A column as the server declares it.

    `type_text` is COLUMN_TYPE from information_schema.COLUMNS, verbatim. `charset` is CHARACTER_SET_NAME,
    None for a type without a charset. `visible` is whether SELECT * shows the column, None if unknown.
    Comparisons of columns ignore `visible`.
    """

    name: str
    type_text: str
    charset: str | None = None
    nullable: bool = True
    visible: bool | None = field(default=None, compare=False)

    def to_json(self) -> list[Any]:
        """Return [name, type text, charset, nullable], and, if it is known, whether the column is visible."""
        known = [] if self.visible is None else [self.visible]
        return [self.name, self.type_text, self.charset, self.nullable, *known]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the result of `to_json`. Raises SchemaInvalid."""
        match value:
            case [str(name), str(type_text), str() | None as charset, bool(nullable)]:
                return cls(name, type_text, charset, nullable)
            case [str(name), str(type_text), str() | None as charset, bool(nullable), bool(visible)]:
                return cls(name, type_text, charset, nullable, visible)
        raise SchemaInvalid(
            f"{value!r} is not a column", hint="A column is [name, type, charset or null, nullable]"
        )


@dataclass(frozen=True)
class StatementSession:
    """The session of a logged statement, as recorded in the statement's event.

    `databases` are the databases that the statement changes, None if the event does not list them (MariaDB,
    or more than 16). `charset` is the default charset of a created database, None if unknown. `sql_mode`
    contains the SQL modes that change how the statement's text is parsed.
    """

    databases: frozenset[str] | None = None
    charset: str | None = None
    sql_mode: frozenset[str] = frozenset()

    @classmethod
    def of_event(
        cls, databases: Iterable[str] | None, charset: str | None, sql_mode: Iterable[str] = ()
    ) -> Self:
        """Convert the kernel's values. If no database is named, the databases are unknown."""
        named = frozenset(name for name in databases or () if name)
        return cls(named or None, charset, frozenset(sql_mode))

    def may_change(self, database: str) -> bool:
        """Return whether the statement may change anything in a database."""
        return self.databases is None or database in self.databases

    def to_json(self) -> dict[str, Any]:
        """Return the known values as plain JSON values."""
        known: dict[str, Any] = {} if self.databases is None else {"databases": sorted(self.databases)}
        known |= {} if self.charset is None else {"charset": self.charset}
        return known | ({"sql_mode": sorted(self.sql_mode)} if self.sql_mode else {})

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse the result of `to_json`, ignoring other keys."""
        return cls.of_event(value.get("databases"), value.get("charset"), value.get("sql_mode", ()))


@dataclass(frozen=True)
class TableSchema:
    """The columns of a table in the order of its row images, and its primary key.

    `version` counts the definitions of this table name, starting from 1. It is unrelated to the server's own
    counters.
    """

    database: str
    table: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    version: int = 1

    @property
    def name(self) -> TableName:
        """The table's name."""
        return TableName(self.database, self.table)

    def same_definition(self, other: "TableSchema") -> bool:
        """Return whether columns, visibility and key are equal, regardless of the version."""
        visible, other_visible = ([column.visible for column in schema.columns] for schema in (self, other))
        same_rows = self.columns == other.columns and self.primary_key == other.primary_key
        return same_rows and visible == other_visible

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "database": self.database,
            "table": self.table,
            "columns": [column.to_json() for column in self.columns],
            "primary_key": list(self.primary_key),
            "version": self.version,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the result of `to_json`. Raises SchemaInvalid."""
        match value:
            case {"database": str(database), "table": str(table), "columns": list(columns), **rest}:
                key, version = rest.pop("primary_key", []), rest.pop("version", 1)
                if not rest and isinstance(version, int) and isinstance(key, list) and columns:
                    names = tuple(str(name) for name in key)
                    return cls(
                        database, table, tuple(Column.from_json(column) for column in columns), names, version
                    )
        raise SchemaInvalid(
            "a table schema has database, table, columns, and may have primary_key and version, nothing else",
            hint="A file of CREATE TABLE statements, named .sql, serves as well",
        )


# --- Selecting tables -----------------------------------------------------------------------


@dataclass(frozen=True)
class _TablePattern:
    """One `database.table` pattern, compiled."""

    text: str
    database: re.Pattern[str] | None
    whole: re.Pattern[str]

    def matches(self, database: str, table: str) -> bool:
        if self.database is None:
            return self.whole.fullmatch(f"{database}.{table}") is not None
        return self.database.fullmatch(database) is not None and self.whole.fullmatch(table) is not None


def _split_patterns(text: str) -> list[str]:
    """Split a comma-separated list, except at commas inside backticks and slashes."""
    parts, current, fence = [], "", ""
    for character in text:
        if fence:
            fence = "" if character == fence and not current.endswith("\\") else fence
        elif character == "`" or (character == "/" and not current.strip(_BLANKS)):
            fence = character
        elif character == ",":
            parts.append(current)
            current = ""
            continue
        current += character
    return [part.strip(_BLANKS) for part in [*parts, current] if part.strip(_BLANKS)]


def _compile_pattern(text: str) -> _TablePattern:
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        try:
            return _TablePattern(text, None, re.compile(text[1:-1]))
        except (re.error, RecursionError, OverflowError) as problem:
            raise OptionInvalid(f"table pattern {text} is not a regular expression: {problem}") from problem
    parts, end = [], 0
    while match := _NAME_PART.match(text, end):
        if match.group(1) is not None:
            parts.append(re.escape(match.group(1).replace("``", "`")))
        else:
            parts.append(".*".join(re.escape(piece) for piece in match.group(2).split("*")))
        end = match.end()
        if end == len(text) or text[end] != ".":
            break
        end += 1
    if end != len(text) or len(parts) != 2:
        raise OptionInvalid(
            f"{text!r} is not a table pattern",
            hint="Write database.table with * as wildcard, `odd.names`, or /regex/",
        )
    return _TablePattern(text, re.compile(parts[0], re.DOTALL), re.compile(parts[1], re.DOTALL))


class TablePatterns:
    """Selects the tables that match an include pattern and no exclude pattern.

    A pattern is `database.table` with `*` for any run of characters, backticks around literal names, or
    `/regex/` over the whole `database.table`. Without include patterns every table matches. Patterns are a
    list, or text separated by commas. Can be pickled. Raises OptionInvalid.
    """

    def __init__(
        self, include: str | list[str] | None = None, exclude: str | list[str] | None = None
    ) -> None:
        self.include = tuple(self._texts(include))
        self.exclude = tuple(self._texts(exclude))
        self._included = [_compile_pattern(text) for text in self.include]
        self._excluded = [_compile_pattern(text) for text in self.exclude]

    @staticmethod
    def _texts(patterns: str | list[str] | None) -> list[str]:
        if patterns is None:
            return []
        return (
            _split_patterns(patterns)
            if isinstance(patterns, str)
            else [text.strip(_BLANKS) for text in patterns]
        )

    def matches(self, database: str, table: str) -> bool:
        """Return whether the table is selected."""
        if self._included and not any(pattern.matches(database, table) for pattern in self._included):
            return False
        return not any(pattern.matches(database, table) for pattern in self._excluded)

    @property
    def selects_all(self) -> bool:
        """Whether every table is selected, and with them the events that name no table."""
        return not (self.include or self.exclude)

    def may_match_in(self, database: str) -> bool:
        """Return whether any table of that database can be selected."""
        return not self._included or any(
            pattern.database is None or pattern.database.fullmatch(database) is not None
            for pattern in self._included
        )

    def single(self) -> TableName | None:
        """Return the only table that these patterns name without a wildcard, or None."""
        if len(self.include) != 1 or self.exclude or self.include[0].startswith("/"):
            return None
        text = self.include[0]
        return None if "*" in re.sub(r"`(?:[^`]|``)+`", "", text) else TableName.parse(text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TablePatterns):
            return NotImplemented
        return (self.include, self.exclude) == (other.include, other.exclude)

    def __hash__(self) -> int:
        return hash((self.include, self.exclude))

    def __repr__(self) -> str:
        return f"TablePatterns(include={list(self.include)}, exclude={list(self.exclude)})"


# --- Sources --------------------------------------------------------------------------------


class Secret:
    """A value that is never printed. `reveal()` returns it; str, repr and format show asterisks."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the value. Never put it in a message."""
        return self._value

    def __repr__(self) -> str:
        return "Secret('********')"

    def __str__(self) -> str:
        return "********"

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> tuple[type["Secret"], tuple[str]]:
        return Secret, (self._value,)


def is_loopback(host: str) -> bool:
    """Return whether a bind address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A host name may resolve to any address, so it does not count as this machine's.
        return False


@dataclass(frozen=True)
class Tls:
    """The TLS options of a connection; the modes are those of the server's own clients (--ssl-mode).

    `preferred` encrypts the connection if the server supports it, without verifying the server's identity.
    `verify_ca` and `verify_identity` need a certificate authority: the configured or the system's.
    """

    mode: str = "preferred"
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in SSL_MODES:
            raise OptionInvalid(
                f"ssl mode {self.mode!r} is unknown", hint=f"Use one of {', '.join(SSL_MODES)}"
            )
        if self.key is not None and self.cert is None:
            raise OptionInvalid("an ssl key is given without its certificate", hint="Set ssl_cert as well")

    def session_arguments(self, *, local: bool) -> dict[str, Any]:
        """Return PyMySQL's arguments for TLS. Raises OptionInvalid for an unusable file.

        With `preferred`, a unix socket stays unencrypted because it is local.
        """
        if self.mode == "disabled" or (self.mode == "preferred" and local):
            return {"ssl_disabled": True}
        if self.mode == "preferred" and self.cert is None:
            return {}
        context = self.context()
        # Do not verify strictly: certificates that a server generates at its first start would be refused.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return {"ssl": context}

    def context(self) -> ssl.SSLContext:
        """Return a context that verifies as `mode` says. Raises OptionInvalid for an unusable file."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as problem:
            raise OptionInvalid(
                f"a TLS file cannot be used: {problem}", hint="Check ssl_ca, ssl_cert and ssl_key: PEM files"
            ) from problem
        context.check_hostname = self.mode == "verify_identity"
        context.verify_mode = ssl.CERT_REQUIRED if self.mode.startswith("verify") else ssl.CERT_NONE
        return context


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, and Penstock's account on it.

    `scheme` is the scheme in the URL that the user wrote (mysql or mariadb). It does not decide the server's
    flavor, which the server itself reports. With `unix_socket`, host and port are ignored. `server_id` is
    Penstock's replica id, None for a random id.
    """

    host: str = "127.0.0.1"
    port: int = PORT_DEFAULT
    user: str = "root"
    password: Secret = field(default_factory=lambda: Secret(""))
    scheme: str = "mysql"
    unix_socket: str | None = None
    tls: Tls = field(default_factory=Tls)
    server_id: int | None = None

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        user: str | None = None,
        password: str | Secret | None = None,
        password_file: str | None = None,
        server_id: int | None = None,
        tls: Tls | None = None,
    ) -> Self:
        """Parse `mysql://user[:password]@host[:port]` or `mariadb://...`.

        The password comes from the first of: the argument, the URL, the file, the environment variable
        PENSTOCK_PASSWORD. The URL's query may contain ssl_mode, ssl_ca, ssl_cert, ssl_key, unix_socket,
        server_id and password_file; arguments take precedence. Raises OptionInvalid; its message never
        contains the password.
        """
        parts = urlsplit(url.strip())
        if parts.scheme not in ("mysql", "mariadb"):
            raise OptionInvalid(
                f"source {_without_password(url)!r} is not a server", hint="Write mysql://user@host:3306"
            )
        try:
            port = parts.port or PORT_DEFAULT
        except ValueError as problem:
            raise OptionInvalid(
                f"the port in {_without_password(url)!r} is not a number below 65536"
            ) from problem
        if parts.path.strip("/") or parts.fragment:
            raise OptionInvalid(
                f"source {_without_password(url)!r} names a database",
                hint="A source is a whole server; choose tables with the tables option",
            )
        options = url_options(parts.query, _URL_OPTIONS)
        query_server_id = options.get("server_id")
        if query_server_id is not None and not query_server_id.isdecimal():
            raise OptionInvalid(f"server_id {query_server_id!r} is not a number")
        return cls(
            host=parts.hostname or "127.0.0.1",
            port=port,
            user=user or unquote(parts.username or "") or "root",
            password=_find_password(password, parts.password, password_file or options.get("password_file")),
            scheme=parts.scheme,
            unix_socket=options.get("unix_socket"),
            tls=tls
            or Tls(
                options.get("ssl_mode", "preferred"),
                options.get("ssl_ca"),
                options.get("ssl_cert"),
                options.get("ssl_key"),
            ),
            server_id=_checked_server_id(server_id if server_id is not None else query_server_id),
        )

    @property
    def name(self) -> str:
        """The server's name as an instance: `host:port`, or its socket."""
        return self.unix_socket or f"{self.host}:{self.port}"

    def __str__(self) -> str:
        if self.unix_socket:
            return f"{self.scheme}://{self.user}@localhost?unix_socket={self.unix_socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{self.user}@{host}:{self.port}"


def is_server_url(text: str) -> bool:
    """Return whether a source is a live server rather than files."""
    return text.strip().startswith(("mysql://", "mariadb://"))


def _checked_server_id(value: int | str | None) -> int | None:
    if value is None:
        return None
    number = int(value)
    if not 1 <= number < 1 << 32:
        raise OptionInvalid(
            f"server_id {number} is out of range", hint="Use 1 to 4294967295, unique among replicas"
        )
    return number


_URL_OPTIONS = ("ssl_mode", "ssl_ca", "ssl_cert", "ssl_key", "unix_socket", "server_id", "password_file")


def url_options(query: str, known: Sequence[str]) -> dict[str, str]:
    """Return the options in a source's URL. Raises OptionInvalid for options that are not `known`."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in known:
            raise OptionInvalid(f"source option {name!r} is unknown", hint=f"Known: {', '.join(known)}")
    return options


def _find_password(argument: str | Secret | None, in_url: str | None, file: str | None) -> Secret:
    if argument is not None:
        return argument if isinstance(argument, Secret) else Secret(argument)
    if in_url is not None:
        return Secret(unquote(in_url))
    if file is not None:
        try:
            return Secret(Path(file).read_text(encoding="utf-8").rstrip("\r\n"))
        except OSError as problem:
            raise OptionInvalid(f"password file {file} cannot be read: {problem.strerror}") from problem
    return Secret(os.environ.get(PASSWORD_VARIABLE, ""))


def _without_password(url: str) -> str:
    # A password may contain an @, so the last @ ends it.
    return re.sub(r"(//[^:/@]*):.*@", r"\1:********@", url, flags=re.DOTALL)
