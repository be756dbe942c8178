# SPDX-License-Identifier: Apache-2.0
"""Tables of a MySQL or MariaDB target, and the statements that create and alter them.

Tables that this sink creates compare text columns of keys byte by byte, so that two keys that differ in the
source, under whatever collation, also differ in the target. Tables that someone else created keep their
types, collations and additional columns; only missing columns are added.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.changes import Target
from penstock.errors import SchemaChanged
from penstock.model import Column, TableName, quote_name
from penstock.sinks.mysql.connection import Dialect, Session
from penstock.sinks.sink import Evolution
from penstock.sinks.sql.rows import refuse_other_key
from penstock.sinks.sql.table_owner import comment_of, owner_of

# InnoDB's limit on the bytes of an index, and the bytes per character.
_INDEX_BYTES_MAX = 3072
_CHARACTER_BYTES = {"utf8mb4": 4, "utf16": 4, "utf32": 4, "gb18030": 4, "utf8mb3": 3, "utf8": 3, "ucs2": 2}

_INTEGER_WIDTH = re.compile(r"\b((?:tiny|small|medium|big)?int|year)\(\d+\)")
_COMMENT = re.compile(r"\s*/\*.*?\*/\s*$", re.DOTALL)
_LENGTH = re.compile(r"\((\d+)\)")
# For each type, the first version of MySQL and of MariaDB that supports it, None if no version does. Other
# versions get a substitute.
_SINCE: dict[bool, dict[str, tuple[int, ...] | None]] = {
    False: {"uuid": None, "inet4": None, "inet6": None, "vector": (9,), "json": (5, 7, 8)},
    True: {"uuid": (10, 7), "inet4": (10, 10), "inet6": (10, 5), "vector": (11, 7)},
}
_UNPADDED_SINCE = (8, 0, 17)
_INSTEAD = {"uuid": "char(36)", "inet4": "varchar(15)", "inet6": "varchar(39)", "json": "longtext"}
_GENERATED = ("GENERATED", "VIRTUAL", "STORED", "PERSISTENT")


@dataclass(frozen=True)
class Layout:
    """An existing table: its columns, with their types, by name.

    `generated` columns cannot be written. `unique_keys` contains the columns of each unique index, with the
    primary key first if there is one. `owner` is the pipeline that created the table, see `owner_of`.
    """

    columns: dict[str, Column]
    generated: frozenset[str]
    primary_key: tuple[str, ...]
    unique_keys: tuple[tuple[str, ...], ...]
    indexes: dict[str, tuple[str, ...]]
    owner: str | None

    @property
    def created_by_pipeline(self) -> bool:
        """Whether a pipeline created it."""
        return self.owner is not None


def layout_of(session: Session, table: TableName) -> Layout | None:
    """Return the layout of a target table, None if the table does not exist."""
    name = (table.database, table.table)
    comments = session.run(
        "SELECT TABLE_COMMENT FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        name,
    )
    if not comments:
        return None
    columns = session.run(
        "SELECT COLUMN_NAME, COLUMN_TYPE, CHARACTER_SET_NAME, IS_NULLABLE, EXTRA"
        " FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
        " ORDER BY ORDINAL_POSITION",
        name,
    )
    parts = session.run(
        "SELECT INDEX_NAME, COLUMN_NAME FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = %s AND"
        " TABLE_NAME = %s AND NON_UNIQUE = 0 ORDER BY INDEX_NAME = 'PRIMARY' DESC, INDEX_NAME, SEQ_IN_INDEX",
        name,
    )
    indexes: dict[str, tuple[str, ...]] = {}
    for index, column in parts:
        indexes[index] = (*indexes.get(index, ()), column or "")
    return Layout(
        {row[0]: Column(row[0], text_of(row[1]), row[2], row[3] == "YES") for row in columns},
        frozenset(row[0] for row in columns if str(row[4]).upper().startswith(_GENERATED)),
        indexes.get("PRIMARY", ()),
        tuple(indexes.values()),
        indexes,
        owner_of(text_of(comments[0][0])),
    )


def column_names(session: Session, table: TableName) -> set[str]:
    """Return the columns of a target table, empty if the table does not exist."""
    rows = session.run(
        "SELECT COLUMN_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        (table.database, table.table),
    )
    return {name for (name,) in rows}


def text_of(value: str | bytes) -> str:
    """Return a name or type as text. Some server versions send bytes."""
    return value.decode() if isinstance(value, bytes) else value


def create_database(session: Session, name: str) -> list[str]:
    """Return the statement that creates a database, [] if it exists.

    An account may lack the privilege to create databases.
    """
    existing = session.run("SELECT 1 FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = %s", (name,))
    return [] if existing else [f"CREATE DATABASE IF NOT EXISTS {quote_name(name)}"]


def statements(
    target: Target, layout: Layout | None, evolution: Evolution, dialect: Dialect, pipeline: str = ""
) -> list[str]:
    """Return the statements that make the target's table fit, [] if it already fits. Raises SchemaChanged."""
    if layout is None:
        return [create(target, dialect, pipeline)]
    if evolution in (Evolution.ADD_ONLY, Evolution.IGNORE):
        clauses = _clauses_to_accept_rows(target, layout, dialect) if layout.created_by_pipeline else []
        if evolution is Evolution.ADD_ONLY:
            clauses += _clauses_to_add(target, layout, dialect)
    else:
        clauses = _clauses(target, layout, dialect)
    if clauses and evolution is Evolution.STOP:
        raise SchemaChanged(
            f"the target's table {target.name} does not have the columns of its source: {'; '.join(clauses)}",
            hint="Change it by hand, or set schema_changes: evolve",
        )
    return [f"ALTER TABLE {target.name.sql} {', '.join(clauses)}"] if clauses else []


def comment_sql(pipeline: str) -> str:
    """Return the comment of a table that a pipeline creates, as SQL."""
    text = comment_of(pipeline).replace("\\", "\\\\").replace("'", "''")
    return f"COMMENT='{text}'"


def create(target: Target, dialect: Dialect, pipeline: str = "") -> str:
    """Return the statement that creates a table for a target."""
    keyed = {name for key in (target.primary_key, *target.unique_keys) for name in key}
    lines = [definition(column, target.mariadb, dialect, column.name in keyed) for column in target.columns]
    if target.primary_key:
        lines.append(_primary_key(target))
    lines += [f"UNIQUE KEY ({_names(key)})" for key in indexable(target)]
    return f"CREATE TABLE IF NOT EXISTS {target.name.sql} ({', '.join(lines)}) {comment_sql(pipeline)}"


def definition(column: Column, from_mariadb: bool, dialect: Dialect, keyed: bool) -> str:
    """Return a column definition for CREATE TABLE."""
    text = type_text(column.type_text, from_mariadb, dialect)
    words = [quote_name(column.name), text]
    if column.charset is not None and takes_charset(text):
        charset = charset_of(column.charset, dialect)
        words.append(f"CHARACTER SET {charset}")
        if keyed:
            words.append(f"COLLATE {binary_collation(charset, dialect)}")
    words.append("NULL" if column.nullable else "NOT NULL")
    if text.startswith("timestamp") and not column.nullable:
        # Without a default, older servers set the first TIMESTAMP column to the current time.
        words.append("DEFAULT '1970-01-01 00:00:01'")
    return " ".join(words)


def type_text(text: str, from_mariadb: bool, dialect: Dialect) -> str:
    """Return a source's type in the syntax of the target's family."""
    plain = text if from_mariadb == dialect.mariadb else _COMMENT.sub("", text)
    word = plain.split("(")[0]
    since = _SINCE[dialect.mariadb].get(word, ())
    if since is None or dialect.version < since:
        return _INSTEAD.get(word) or _vector_substitute(plain)
    return "geometrycollection" if dialect.mariadb and plain == "geomcollection" else plain


def _vector_substitute(text: str) -> str:
    length = _LENGTH.search(text)
    return f"varbinary({4 * int(length[1])})" if length else "longblob"


def takes_charset(text: str) -> bool:
    """Return whether a type is a text type."""
    return text.startswith(("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set"))


def charset_of(charset: str, dialect: Dialect) -> str:
    """Return the character set, or, if the target does not have it, another character set that contains all
    of its characters.
    """
    return "utf8mb4" if dialect.mariadb and charset == "gb18030" else charset


def binary_collation(charset: str, dialect: Dialect) -> str:
    """Return the collation that compares texts by their bytes, including trailing spaces."""
    if dialect.mariadb:
        return f"{charset}_nopad_bin"
    # MySQL's other collations ignore trailing spaces, which is correct if the source's collation does too.
    # TiDB and old versions have only such collations.
    padded = charset != "utf8mb4" or dialect.version < _UNPADDED_SINCE
    return f"{charset}_bin" if padded else "utf8mb4_0900_bin"


def indexable(target: Target) -> list[tuple[str, ...]]:
    """Return the unique keys that can be created over whole columns."""
    return [key for key in target.unique_keys if sum(map(_bytes, _columns(target, key))) <= _INDEX_BYTES_MAX]


def same_type(first: str, second: str) -> bool:
    """Return whether two texts denote the same type. The display width of integers is ignored."""
    return _plain(first) == _plain(second)


def _plain(text: str) -> str:
    head, mark, members = text.partition("('")
    return _INTEGER_WIDTH.sub(r"\1", _COMMENT.sub("", head).lower()).replace(" zerofill", "") + mark + members


def _clauses(target: Target, layout: Layout, dialect: Dialect) -> list[str]:
    """Return the clauses that ALTER TABLE needs to make the table fit."""
    keyed = {name for key in (target.primary_key, *target.unique_keys) for name in key}
    clauses, before = [], "FIRST"
    for column in target.columns:
        wanted = definition(column, target.mariadb, dialect, column.name in keyed)
        existing = layout.columns.get(column.name)
        if existing is None:
            clauses.append(f"ADD COLUMN {wanted} {before}")
        elif layout.created_by_pipeline and not _fits(column, existing, target.mariadb, dialect):
            clauses.append(f"MODIFY COLUMN {wanted}")
        before = f"AFTER {quote_name(column.name)}"
    if layout.created_by_pipeline:
        obsolete = [name for name in layout.columns if name not in target.column_names]
        clauses = _key_clauses(target, layout) + clauses
        clauses += [f"DROP COLUMN {quote_name(name)}" for name in obsolete]
    return clauses


def _clauses_to_add(target: Target, layout: Layout, dialect: Dialect) -> list[str]:
    """Return the clauses that add columns. Raises SchemaChanged if other columns would have to change."""
    changed = [
        f"{column.name} {column.type_text}"
        for column in target.columns
        if layout.created_by_pipeline
        and (existing := layout.columns.get(column.name)) is not None
        and not _fits(replace(column, nullable=existing.nullable), existing, target.mariadb, dialect)
    ]
    if changed:
        raise SchemaChanged(
            f"columns of {target.name} have other types now: {', '.join(changed)}",
            hint="Change them by hand, or set schema_changes: evolve",
        )
    return [clause for clause in _clauses(target, layout, dialect) if clause.startswith("ADD COLUMN")]


def _clauses_to_accept_rows(target: Target, layout: Layout, dialect: Dialect) -> list[str]:
    """Return the clauses that a table with retained columns needs to accept all rows.

    The table must not have a key that the source does not have, and must allow null wherever rows have null.
    Raises SchemaChanged.
    """
    refuse_other_key(target, layout.primary_key)
    clauses = [clause for clause in _key_clauses(target, layout) if clause.startswith("DROP INDEX")]
    keyed = {name for key in layout.indexes.values() for name in key}
    for name, existing in layout.columns.items():
        is_null = name not in target.column_names or target.column(name).nullable
        if is_null and not existing.nullable and name not in (*layout.primary_key, *layout.generated):
            wanted = definition(replace(existing, nullable=True), dialect.mariadb, dialect, name in keyed)
            clauses.append(f"MODIFY COLUMN {wanted}")
    return clauses


def _key_clauses(target: Target, layout: Layout) -> list[str]:
    """Return the clauses that give the table exactly its source's keys. An additional key would lose rows."""
    clauses = []
    wanted = [set(key) for key in indexable(target)]
    for name, key in layout.indexes.items():
        if name != "PRIMARY" and set(key) not in wanted:
            clauses.append(f"DROP INDEX {quote_name(name)}")
    if layout.primary_key != target.primary_key:
        clauses += ["DROP PRIMARY KEY"] if layout.primary_key else []
        if target.primary_key and _primary_key(target).startswith("PRIMARY"):
            clauses.append(f"ADD {_primary_key(target)}")
    existing_keys = [set(key) for name, key in layout.indexes.items() if name != "PRIMARY"]
    clauses += [
        f"ADD UNIQUE KEY ({_names(key)})" for key in indexable(target) if set(key) not in existing_keys
    ]
    return clauses


def _fits(column: Column, existing: Column, from_mariadb: bool, dialect: Dialect) -> bool:
    text = type_text(column.type_text, from_mariadb, dialect)
    if dialect.mariadb and text == "json":
        text = "longtext"
    charset = charset_of(column.charset, dialect) if column.charset and takes_charset(text) else None
    same_charset = charset is None or existing.charset is None or _full(charset) == _full(existing.charset)
    return same_type(text, existing.type_text) and same_charset and column.nullable == existing.nullable


def _full(charset: str) -> str:
    return "utf8mb3" if charset == "utf8" else charset


def _primary_key(target: Target) -> str:
    columns = _columns(target, target.primary_key)
    if sum(map(_bytes, columns)) <= _INDEX_BYTES_MAX:
        return f"PRIMARY KEY ({_names(target.primary_key)})"
    if len(columns) == 1:
        # The source's key covers a prefix of the column that is no longer than this prefix.
        characters = _INDEX_BYTES_MAX // _character_bytes(columns[0])
        return f"PRIMARY KEY ({quote_name(columns[0].name)}({characters}))"
    share = _INDEX_BYTES_MAX // len(columns)
    parts = [
        quote_name(column.name)
        + (
            ""
            if _bytes(column) <= share or not _takes_prefix(column)
            else f"({share // _character_bytes(column)})"
        )
        for column in columns
    ]
    return f"KEY ({', '.join(parts)})"


def _columns(target: Target, key: Sequence[str]) -> list[Column]:
    return [target.column(name) for name in key]


def _takes_prefix(column: Column) -> bool:
    return takes_charset(column.type_text) or "blob" in column.type_text or "binary" in column.type_text


def _character_bytes(column: Column) -> int:
    return _CHARACTER_BYTES.get(column.charset or "", 2 if column.charset else 1)


def _bytes(column: Column) -> int:
    """Return the approximate number of index bytes of a column."""
    text = column.type_text.lower()
    if text.startswith(("tinytext", "text", "mediumtext", "longtext", "json")) or "blob" in text:
        return _INDEX_BYTES_MAX + 1
    if text.startswith(("char", "varchar", "binary", "varbinary")):
        length = _LENGTH.search(text)
        return int(length[1]) * _character_bytes(column) if length else 4
    return 32


def _names(key: Sequence[str]) -> str:
    return ", ".join(quote_name(name) for name in key)
