# SPDX-License-Identifier: Apache-2.0
"""Tables of a MySQL or MariaDB target: what they have, what they have to have, and the statements between.

Text columns of keys are compared byte by byte in tables made here: keys that differ in the source, whatever
its collation, then differ in the target. Tables that somebody else made keep their types, collations and
further columns; only missing columns are added to them.
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

# InnoDB's bound for the bytes of an index, and for those of a character.
_INDEX_BYTES_MAX = 3072
_CHARACTER_BYTES = {"utf8mb4": 4, "utf16": 4, "utf32": 4, "gb18030": 4, "utf8mb3": 3, "utf8": 3, "ucs2": 2}

_INTEGER_WIDTH = re.compile(r"\b((?:tiny|small|medium|big)?int|year)\(\d+\)")
_COMMENT = re.compile(r"\s*/\*.*?\*/\s*$", re.DOTALL)
_LENGTH = re.compile(r"\((\d+)\)")
# Since when MySQL, and MariaDB, have a type; None for never. What stands in for it: a vector is its bytes.
_SINCE: dict[bool, dict[str, tuple[int, ...] | None]] = {
    False: {"uuid": None, "inet4": None, "inet6": None, "vector": (9,), "json": (5, 7, 8)},
    True: {"uuid": (10, 7), "inet4": (10, 10), "inet6": (10, 5), "vector": (11, 7)},
}
_UNPADDED_SINCE = (8, 0, 17)
_INSTEAD = {"uuid": "char(36)", "inet4": "varchar(15)", "inet6": "varchar(39)", "json": "longtext"}
_GENERATED = ("GENERATED", "VIRTUAL", "STORED", "PERSISTENT")


@dataclass(frozen=True)
class Layout:
    """A table as the target has it. `columns` by name, each with its type's text; `generated` take no values.

    `unique_keys` are the columns of each unique index, the primary key first where there is one; `owner`
    is the pipeline that made it, as `owner_of` tells.
    """

    columns: dict[str, Column]
    generated: frozenset[str]
    primary_key: tuple[str, ...]
    unique_keys: tuple[tuple[str, ...], ...]
    indexes: dict[str, tuple[str, ...]]
    owner: str | None

    @property
    def made_here(self) -> bool:
        """Whether a pipeline made it."""
        return self.owner is not None


def layout_of(session: Session, table: TableName) -> Layout | None:
    """Return what the target has, None where it has no such table."""
    name = (table.database, table.table)
    found = session.run(
        "SELECT TABLE_COMMENT FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        name,
    )
    if not found:
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
        {one[0]: Column(one[0], text_of(one[1]), one[2], one[3] == "YES") for one in columns},
        frozenset(one[0] for one in columns if str(one[4]).upper().startswith(_GENERATED)),
        indexes.get("PRIMARY", ()),
        tuple(indexes.values()),
        indexes,
        owner_of(text_of(found[0][0])),
    )


def text_of(value: str | bytes) -> str:
    """Return a name or type, which some versions send as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def make_database(session: Session, name: str) -> list[str]:
    """Return the statement that makes a database, [] where it is there: not every account may make one."""
    found = session.run("SELECT 1 FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = %s", (name,))
    return [] if found else [f"CREATE DATABASE IF NOT EXISTS {quote_name(name)}"]


def statements(
    target: Target, found: Layout | None, evolution: Evolution, dialect: Dialect, pipeline: str = ""
) -> list[str]:
    """Return what makes the target's table fit, [] where it does. Raises SchemaChanged."""
    if found is None:
        return [create(target, dialect, pipeline)]
    if evolution in (Evolution.ADD_ONLY, Evolution.IGNORE):
        clauses = _clauses_that_keep(target, found, dialect) if found.made_here else []
        if evolution is Evolution.ADD_ONLY:
            clauses += _clauses_that_add(target, found, dialect)
    else:
        clauses = _clauses(target, found, dialect)
    if clauses and evolution is Evolution.STOP:
        raise SchemaChanged(
            f"the target's table {target.name} does not have the columns of its source: {'; '.join(clauses)}",
            hint="Change it by hand, or set schema_changes: evolve",
        )
    return [f"ALTER TABLE {target.name.sql} {', '.join(clauses)}"] if clauses else []


def comment_sql(pipeline: str) -> str:
    """Return the comment of a table that a pipeline makes, as SQL."""
    text = comment_of(pipeline).replace("\\", "\\\\").replace("'", "''")
    return f"COMMENT='{text}'"


def create(target: Target, dialect: Dialect, pipeline: str = "") -> str:
    """Return the statement that makes a table for a target."""
    keyed = {name for key in (target.primary_key, *target.unique_keys) for name in key}
    lines = [definition(column, target.mariadb, dialect, column.name in keyed) for column in target.columns]
    if target.primary_key:
        lines.append(_primary_key(target))
    lines += [f"UNIQUE KEY ({_names(key)})" for key in indexable(target)]
    return f"CREATE TABLE IF NOT EXISTS {target.name.sql} ({', '.join(lines)}) {comment_sql(pipeline)}"


def definition(column: Column, from_mariadb: bool, dialect: Dialect, keyed: bool) -> str:
    """Return a column as CREATE TABLE has it."""
    text = type_text(column.type_text, from_mariadb, dialect)
    words = [quote_name(column.name), text]
    if column.charset is not None and takes_charset(text):
        charset = charset_of(column.charset, dialect)
        words.append(f"CHARACTER SET {charset}")
        if keyed:
            words.append(f"COLLATE {binary_collation(charset, dialect)}")
    words.append("NULL" if column.nullable else "NOT NULL")
    if text.startswith("timestamp") and not column.nullable:
        # Else older servers let the first such column follow the clock.
        words.append("DEFAULT '1970-01-01 00:00:01'")
    return " ".join(words)


def type_text(text: str, from_mariadb: bool, dialect: Dialect) -> str:
    """Return a source's type as the target's family writes it."""
    plain = text if from_mariadb == dialect.mariadb else _COMMENT.sub("", text)
    word = plain.split("(")[0]
    since = _SINCE[dialect.mariadb].get(word, ())
    if since is None or dialect.version < since:
        return _INSTEAD.get(word) or _bytes_of_vector(plain)
    return "geometrycollection" if dialect.mariadb and plain == "geomcollection" else plain


def _bytes_of_vector(text: str) -> str:
    found = _LENGTH.search(text)
    return f"varbinary({4 * int(found[1])})" if found else "longblob"


def takes_charset(text: str) -> bool:
    """Tell whether a type is one of text."""
    return text.startswith(("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set"))


def charset_of(charset: str, dialect: Dialect) -> str:
    """Return the character set, or one that holds all of its characters where the target lacks it."""
    return "utf8mb4" if dialect.mariadb and charset == "gb18030" else charset


def binary_collation(charset: str, dialect: Dialect) -> str:
    """Return the collation by which texts are equal when their bytes are, trailing blanks among them."""
    if dialect.mariadb:
        return f"{charset}_nopad_bin"
    # All further ones of MySQL take trailing blanks for nothing, as those of the source then did; TiDB and
    # old versions have no other.
    padded = charset != "utf8mb4" or dialect.version < _UNPADDED_SINCE
    return f"{charset}_bin" if padded else "utf8mb4_0900_bin"


def indexable(target: Target) -> list[tuple[str, ...]]:
    """Return the further unique keys that can be had over the whole of their columns."""
    return [key for key in target.unique_keys if sum(map(_bytes, _columns(target, key))) <= _INDEX_BYTES_MAX]


def same_type(one: str, other: str) -> bool:
    """Tell whether two texts mean one type: the widths of integers are for display."""
    return _plain(one) == _plain(other)


def _plain(text: str) -> str:
    head, mark, members = text.partition("('")
    return _INTEGER_WIDTH.sub(r"\1", _COMMENT.sub("", head).lower()).replace(" zerofill", "") + mark + members


def _clauses(target: Target, found: Layout, dialect: Dialect) -> list[str]:
    """Return the clauses of ALTER TABLE that are missing."""
    keyed = {name for key in (target.primary_key, *target.unique_keys) for name in key}
    clauses, before = [], "FIRST"
    for column in target.columns:
        wanted = definition(column, target.mariadb, dialect, column.name in keyed)
        there = found.columns.get(column.name)
        if there is None:
            clauses.append(f"ADD COLUMN {wanted} {before}")
        elif found.made_here and not _fits(column, there, target.mariadb, dialect):
            clauses.append(f"MODIFY COLUMN {wanted}")
        before = f"AFTER {quote_name(column.name)}"
    if found.made_here:
        gone = [name for name in found.columns if name not in target.column_names]
        clauses = _key_clauses(target, found) + clauses
        clauses += [f"DROP COLUMN {quote_name(name)}" for name in gone]
    return clauses


def _clauses_that_add(target: Target, found: Layout, dialect: Dialect) -> list[str]:
    """Return the clauses that add columns. Raises SchemaChanged where others would have to change."""
    changed = [
        f"{column.name} {column.type_text}"
        for column in target.columns
        if found.made_here
        and (there := found.columns.get(column.name)) is not None
        and not _fits(replace(column, nullable=there.nullable), there, target.mariadb, dialect)
    ]
    if changed:
        raise SchemaChanged(
            f"columns of {target.name} have other types now: {', '.join(changed)}",
            hint="Change them by hand, or set schema_changes: evolve",
        )
    return [one for one in _clauses(target, found, dialect) if one.startswith("ADD COLUMN")]


def _clauses_that_keep(target: Target, found: Layout, dialect: Dialect) -> list[str]:
    """Return what a table needs whose columns stay, so that it loses and refuses no rows: it must not have a
    key that the source lacks, and has to take null where rows have it. Raises SchemaChanged."""
    refuse_other_key(target, found.primary_key)
    clauses = [one for one in _key_clauses(target, found) if one.startswith("DROP INDEX")]
    keyed = {name for key in found.indexes.values() for name in key}
    for name, there in found.columns.items():
        is_null = name not in target.column_names or target.column(name).nullable
        if is_null and not there.nullable and name not in (*found.primary_key, *found.generated):
            wanted = definition(replace(there, nullable=True), dialect.mariadb, dialect, name in keyed)
            clauses.append(f"MODIFY COLUMN {wanted}")
    return clauses


def _key_clauses(target: Target, found: Layout) -> list[str]:
    """Return what gives the table the keys of its source, and no other: one too many would cost rows."""
    clauses = []
    wanted = [set(key) for key in indexable(target)]
    for name, key in found.indexes.items():
        if name != "PRIMARY" and set(key) not in wanted:
            clauses.append(f"DROP INDEX {quote_name(name)}")
    if found.primary_key != target.primary_key:
        clauses += ["DROP PRIMARY KEY"] if found.primary_key else []
        if target.primary_key and _primary_key(target).startswith("PRIMARY"):
            clauses.append(f"ADD {_primary_key(target)}")
    there = [set(key) for name, key in found.indexes.items() if name != "PRIMARY"]
    clauses += [f"ADD UNIQUE KEY ({_names(key)})" for key in indexable(target) if set(key) not in there]
    return clauses


def _fits(column: Column, there: Column, from_mariadb: bool, dialect: Dialect) -> bool:
    text = type_text(column.type_text, from_mariadb, dialect)
    if dialect.mariadb and text == "json":
        text = "longtext"
    charset = charset_of(column.charset, dialect) if column.charset and takes_charset(text) else None
    same_charset = charset is None or there.charset is None or _full(charset) == _full(there.charset)
    return same_type(text, there.type_text) and same_charset and column.nullable == there.nullable


def _full(charset: str) -> str:
    return "utf8mb3" if charset == "utf8" else charset


def _primary_key(target: Target) -> str:
    columns = _columns(target, target.primary_key)
    if sum(map(_bytes, columns)) <= _INDEX_BYTES_MAX:
        return f"PRIMARY KEY ({_names(target.primary_key)})"
    if len(columns) == 1:
        # The source's key is over a part of the column, no longer than this.
        characters = _INDEX_BYTES_MAX // _character_bytes(columns[0])
        return f"PRIMARY KEY ({quote_name(columns[0].name)}({characters}))"
    share = _INDEX_BYTES_MAX // len(columns)
    parts = [
        quote_name(one.name)
        + ("" if _bytes(one) <= share or not _takes_prefix(one) else f"({share // _character_bytes(one)})")
        for one in columns
    ]
    return f"KEY ({', '.join(parts)})"


def _columns(target: Target, key: Sequence[str]) -> list[Column]:
    return [target.column(name) for name in key]


def _takes_prefix(column: Column) -> bool:
    return takes_charset(column.type_text) or "blob" in column.type_text or "binary" in column.type_text


def _character_bytes(column: Column) -> int:
    return _CHARACTER_BYTES.get(column.charset or "", 2 if column.charset else 1)


def _bytes(column: Column) -> int:
    """Return about how many bytes of an index a column takes."""
    text = column.type_text.lower()
    if text.startswith(("tinytext", "text", "mediumtext", "longtext", "json")) or "blob" in text:
        return _INDEX_BYTES_MAX + 1
    if text.startswith(("char", "varchar", "binary", "varbinary")):
        found = _LENGTH.search(text)
        return int(found[1]) * _character_bytes(column) if found else 4
    return 32


def _names(key: Sequence[str]) -> str:
    return ", ".join(quote_name(name) for name in key)
