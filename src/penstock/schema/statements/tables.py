# SPDX-License-Identifier: Apache-2.0
"""Parses CREATE TABLE and ALTER TABLE into steps.

Only the parts that affect how rows are stored are parsed strictly: names, types, charsets, the order of
columns and the primary key. Other attributes and options are skipped, including their parentheses.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.model import TableName
from penstock.schema.statements.column_types import TypeUnknown, take_type
from penstock.schema.statements.effects import (
    AddColumn,
    AddUnique,
    AlterTable,
    ChangeColumn,
    ColumnSpelling,
    ConvertCharset,
    CreateLike,
    CreateTable,
    DropColumn,
    DropUnique,
    Effect,
    NotUnderstood,
    Placement,
    RenameColumn,
    RenameTable,
    SetKey,
    SetTableCharset,
    SetVersioning,
    SetVisibility,
    Statement,
    Step,
    accept_charset,
)
from penstock.schema.statements.tokens import Kind, ServerSpelling, TokenCursor, words_of

_INDEX_WORDS = ("INDEX", "KEY")
_KEY_KINDS = ("FULLTEXT", "SPATIAL", "FOREIGN", "CHECK", "INDEX", "KEY")

# ALTER TABLE actions that leave the columns of the table's rows unchanged.
_SHAPELESS = words_of(
    """ALGORITHM ANALYZE COALESCE CHECK DISABLE DISCARD ENABLE EXCHANGE FORCE IMPORT LOCK NOWAIT OPTIMIZE
    ORDER REBUILD REORGANIZE REPAIR SECONDARY_LOAD SECONDARY_UNLOAD TRUNCATE
    UPGRADE WAIT WITHOUT"""
)
# Words that follow the last action of an ALTER TABLE without a comma. Nothing else follows them.
_PARTITIONING = (("PARTITION", "BY"), ("REMOVE", "PARTITIONING"))
_OF_PARTITIONS = words_of("ANALYZE CHECK DROP OPTIMIZE REBUILD REORGANIZE REPAIR TRUNCATE DISCARD IMPORT")
# Options of the whole table. An option of a storage engine is any word followed by `=`.
_OPTIONS = words_of(
    """AUTO_INCREMENT AUTOEXTEND_SIZE AVG_ROW_LENGTH CHAR CHARACTER CHARSET CHECKSUM COLLATE COMMENT
    COMPRESSION CONNECTION DATA DEFAULT DELAY_KEY_WRITE ENCRYPTION ENGINE ENGINE_ATTRIBUTE INDEX INSERT_METHOD
    KEY_BLOCK_SIZE MAX_ROWS MIN_ROWS PACK_KEYS PASSWORD ROW_FORMAT SECONDARY_ENGINE
    SECONDARY_ENGINE_ATTRIBUTE START STATS_AUTO_RECALC STATS_PERSISTENT STATS_SAMPLE_PAGES STORAGE
    TABLESPACE TABLE_CHECKSUM TYPE UNION"""
)
# Engines other than InnoDB have keys of at most 1000 bytes, 250 characters of utf8mb4.
_SHORT_UNIQUE_CHARACTERS_MAX = 250
# Attributes that make a column NOT NULL, unless NULL follows.
_NOT_NULL = (("NOT", "NULL"), ("ROW", "START"), ("AUTO_INCREMENT",), ("SERIAL", "DEFAULT", "VALUE"))
_WITHOUT_LENGTH = (
    *("tinytext", "text", "mediumtext", "longtext", "tinyblob", "blob", "mediumblob", "longblob", "json"),
    *("geometry", "point", "linestring", "polygon", "multi", "geomcollection"),
)


def create_table(statement: Statement, keep: bool) -> Effect:
    """Parse from the table's name on. Raises NotUnderstood, TypeUnknown."""
    cursor = statement.cursor
    name = statement.take_table()
    if cursor.accept("LIKE"):
        return CreateLike(name, statement.take_table(), keep)
    inside = cursor.within_parentheses()
    if inside is None:
        raise NotUnderstood
    if inside.accept("LIKE"):
        return CreateLike(name, Statement(inside, statement.database, statement.spelling).take_table(), keep)
    columns: list[ColumnSpelling] = []
    key: tuple[str, ...] = ()
    hiding_steps: list[AddUnique | SetVersioning] = []
    row_start = inside.has("ROW", "START")
    versions_column = inside.has("WITH", "SYSTEM", "VERSIONING")
    parts = inside.parts()
    period = next((period for part in parts if (period := _application_period(part)) is not None), None)
    for part in parts:
        steps = _key_definition(part, statement, period)
        if steps is None:
            column = _column(part, statement)
            if period is not None and column.name.lower() in period:
                column = replace(column, nullable=False)
            columns.append(column)
            steps = _keys_of(column)
        for step in steps:
            if isinstance(step, SetKey):
                key = step.columns
            elif isinstance(step, AddUnique):
                hiding_steps.append(step)
    if cursor.has("SELECT"):
        # The text does not contain the columns of the query.
        raise NotUnderstood
    if (versions_column or cursor.has("SYSTEM", "VERSIONING")) and not row_start:
        hiding_steps.append(SetVersioning(True))
    charset = None
    while not cursor.ended and not cursor.accept("PARTITION"):
        if cursor.accept("ENGINE"):
            cursor.accept("=")
            if cursor.next.upper != "INNODB":
                hiding_steps = [_with_short_keys(step) for step in hiding_steps]
            continue
        option_charset = accept_charset(cursor, statement.spelling)
        if option_charset is None:
            cursor.take()
        elif option_charset:
            charset = option_charset
    if not columns:
        raise NotUnderstood
    if key:
        # The server appends the end column of the period to the primary key.
        key += tuple(column.name for column in columns if column.ends_period)
    return CreateTable(name, tuple(columns), key, charset, keep, tuple(hiding_steps))


def _with_short_keys(step: AddUnique | SetVersioning) -> AddUnique | SetVersioning:
    if isinstance(step, AddUnique):
        return replace(step, characters_max=_SHORT_UNIQUE_CHARACTERS_MAX)
    return step


def alter_table(statement: Statement) -> list[Effect]:
    """Parse from the table's name on. Raises NotUnderstood, TypeUnknown."""
    cursor = statement.cursor
    name = statement.take_table()
    steps: list[Step] = []
    renames: list[Effect] = []
    if cursor.accept("WAIT"):
        cursor.take()
    cursor.accept("NOWAIT")
    for part in cursor.before(*_PARTITIONING).parts():
        if part.next.upper == "ORDER" or (
            part.next.upper in _OF_PARTITIONS and part.ahead(1).upper == "PARTITION"
        ):
            # These clauses consume all following commas, so no action can follow.
            break
        if _renames_table(part):
            inner = Statement(part, statement.database, statement.spelling, statement.named)
            renames = [RenameTable(name, inner.take_table())]
        else:
            steps.extend(_action(part, statement, name))
    return [AlterTable(name, tuple(steps)), *renames] if steps else renames


def _renames_table(part: TokenCursor) -> bool:
    """Skip RENAME [TO|AS|=] if a table's name follows."""
    if part.next.upper != "RENAME":
        return False
    following = part.ahead(1).upper
    if following in ("COLUMN", "INDEX", "KEY"):
        return False
    part.take()
    part.accept_any("TO", "AS", "=")
    return True


def _action(part: TokenCursor, statement: Statement, name: TableName) -> list[Step]:
    """Parse one action of an ALTER TABLE for this table."""
    if part.accept("ADD"):
        return _add(part, statement)
    if part.accept("DROP"):
        return _drop(part, statement)
    if part.next.upper in ("MODIFY", "CHANGE"):
        return _change(part, statement, renames=part.take().upper == "CHANGE")
    if part.accept("RENAME"):
        return _rename_part(part)
    if part.accept("ALTER"):
        return _alter_column(part)
    if part.accept("CONVERT"):
        return _convert(part, statement, database_is_current=name.database == statement.database)
    if part.accept("WITH"):
        return [SetVersioning(True)] if part.has("VERSIONING") else []
    if part.next.upper in _SHAPELESS:
        return []
    return _options(part, statement.spelling)


def _alter_column(part: TokenCursor) -> list[Step]:
    """Parse ALTER COLUMN, which sets a default or the visibility. ALTER INDEX changes no column."""
    visible = part.has("SET", "VISIBLE")
    if not visible and not part.has("SET", "INVISIBLE"):
        return []
    part.accept("COLUMN")
    return [SetVisibility(_name(part), visible)]


def _change(part: TokenCursor, statement: Statement, *, renames: bool) -> list[Step]:
    part.accept("COLUMN")
    if_exists = part.accept("IF", "EXISTS")
    name = _name(part) if renames else part.next.text
    column = _column(part, statement)
    keys = _keys_of(column, if_none=if_exists)
    may_add_hash = statement.spelling.mariadb and may_need_hash(column.declared.text)
    return [ChangeColumn(name, column, _placement(part), may_add_hash, if_exists), *keys]


def _add(part: TokenCursor, statement: Statement) -> list[Step]:
    if part.next.upper == "PARTITION" or _is_period(part):
        if _application_period(part) is not None:
            # Later keys may name the period, but a table definition does not include periods.
            raise NotUnderstood
        return []
    if part.next.upper == "SYSTEM" and part.ahead(1).upper == "VERSIONING":
        return [SetVersioning(True)]
    if part.next.upper != "COLUMN":
        key = _key_definition(part, statement)
        if key is not None:
            return key
    part.accept("COLUMN")
    keep = part.accept("IF", "NOT", "EXISTS")
    if part.next.upper == "(":
        inside = part.within_parentheses()
        if inside is None:
            raise NotUnderstood
        steps: list[Step] = []
        for definition in inside.parts():
            key = _key_definition(definition, statement)
            if key is None:
                steps += _added(definition, statement, keep)
            else:
                steps += key
        return steps
    return _added(part, statement, keep)


def _added(part: TokenCursor, statement: Statement, keep: bool) -> list[Step]:
    column = _column(part, statement)
    # With IF NOT EXISTS, an existing column stays as it is, but gets the key.
    return [AddColumn(column, _placement(part) or Placement(), keep), *_keys_of(column, if_none=keep)]


def _is_period(part: TokenCursor) -> bool:
    """Return whether PERIOD FOR comes next. PERIOD alone is a column's name."""
    return part.next.kind is Kind.WORD and part.next.upper == "PERIOD" and part.ahead(1).upper == "FOR"


def _application_period(part: TokenCursor) -> tuple[str, str] | None:
    """Return the names of the columns in a PERIOD FOR, in lower case. The server makes these columns NOT
    NULL.

    Returns None for any other part of the definition, and for SYSTEM_TIME, whose columns declare that they
    belong to it. Consumes no token.
    """
    if not _is_period(part) or part.ahead(2).upper == "SYSTEM_TIME":
        return None
    if [part.ahead(step).upper for step in (3, 5, 7)] != ["(", ",", ")"]:
        raise NotUnderstood
    return part.ahead(4).text.lower(), part.ahead(6).text.lower()


def _drop(part: TokenCursor, statement: Statement) -> list[Step]:
    if part.accept("PRIMARY", "KEY"):
        return [SetKey(())]
    if part.next.upper in ("FOREIGN", "CHECK", "PARTITION") or _is_period(part):
        return []
    if part.accept_any("INDEX", "KEY", "CONSTRAINT"):
        part.accept("IF", "EXISTS")
        # The primary key always has this name, in any case, even as a constraint.
        if part.next.text.upper() == "PRIMARY":
            return [SetKey(())]
        return [DropUnique()] if statement.spelling.mariadb else []
    if part.next.upper == "SYSTEM" and part.ahead(1).upper == "VERSIONING":
        return [SetVersioning(False)]
    part.accept("COLUMN")
    if_exists = part.accept("IF", "EXISTS")
    return [DropColumn(_name(part), if_exists)]


def _rename_part(part: TokenCursor) -> list[Step]:
    if part.accept_any("INDEX", "KEY"):
        return []
    part.accept("COLUMN")
    if_exists = part.accept("IF", "EXISTS")
    name = _name(part)
    if not part.accept("TO"):
        raise NotUnderstood
    return [RenameColumn(name, _name(part), if_exists)]


def _convert(part: TokenCursor, statement: Statement, *, database_is_current: bool) -> list[Step]:
    if not part.accept("TO"):
        # MariaDB's CONVERT PARTITION ... TO TABLE and CONVERT TABLE ... TO PARTITION move whole tables.
        raise NotUnderstood
    charset = accept_charset(part, statement.spelling)
    # DEFAULT is the charset of the session's current database, not of the table's database.
    if charset is None or not (charset or database_is_current):
        raise NotUnderstood
    return [ConvertCharset(charset or None)]


def _options(part: TokenCursor, spelling: ServerSpelling) -> list[Step]:
    """Parse table options, each a word with a value. Commas between them are optional."""
    steps: list[Step] = []
    if part.next.upper not in _OPTIONS and part.ahead(1).upper != "=":
        raise NotUnderstood
    while not part.ended:
        charset = accept_charset(part, spelling)
        if charset is None:
            part.take()
        elif charset:
            steps.append(SetTableCharset(charset))
    return steps


# --- Columns and keys --------------------------------------------------------------------------


def _name(cursor: TokenCursor) -> str:
    token = cursor.take()
    if token.kind in (Kind.MARK, Kind.STRING):
        raise NotUnderstood
    return token.text


def _keys_of(column: ColumnSpelling, *, if_none: bool = False) -> list[Step]:
    keys: list[Step] = [SetKey((column.name,), if_none)] if column.key else []
    if column.unique:
        keys.append(AddUnique(((column.name, None),)))
    return keys


def _key_definition(
    part: TokenCursor, statement: Statement, period: tuple[str, str] | None = None
) -> list[Step] | None:
    """Parse a key or constraint into steps. Return [] if it does not affect rows, and None if the text
    defines a column instead.

    `period` are the columns of the table's application-time period, if the statement has it.
    """
    if part.accept("CONSTRAINT"):
        part.accept("IF", "NOT", "EXISTS")
        if part.next.upper not in ("PRIMARY", "UNIQUE", "FOREIGN", "CHECK"):
            part.take()
    if part.accept("PRIMARY", "KEY"):
        if_none = False
        while not part.ended and part.next.upper != "(":
            if_none = part.accept("IF", "NOT", "EXISTS") or if_none
            if part.next.upper != "(":
                part.take()
        return [SetKey(_key_columns(part, period), if_none)]
    if part.accept("UNIQUE"):
        if_none = False
        while not part.ended and part.next.upper != "(":
            if_none = part.accept("IF", "NOT", "EXISTS") or if_none
            if part.next.upper != "(":
                part.take()
        return [unique_key(part, if_none=if_none)] if statement.spelling.mariadb else []
    if part.next.upper in _KEY_KINDS or _is_period(part):
        return []
    if part.next.upper == "VECTOR" and part.ahead(1).upper in (*_INDEX_WORDS, "("):
        return []
    return None


def _key_columns(part: TokenCursor, period: tuple[str, str] | None) -> tuple[str, ...]:
    """Parse the columns of a primary key. Raises NotUnderstood if the key has a period that is not known
    here.
    """
    parentheses = part.within_parentheses()
    if parentheses is None:
        raise NotUnderstood
    names = []
    for column in parentheses.parts():
        if column.next.upper == "(":
            raise NotUnderstood
        name = _name(column)
        if not column.accept("WITHOUT", "OVERLAPS"):
            names.append(name)
        elif period is None:
            raise NotUnderstood
        else:
            # The server replaces the period, which is the last part of a key, with its end and start columns.
            names += [period[1], period[0]]
    return tuple(names)


def unique_key(part: TokenCursor, *, if_none: bool = False) -> AddUnique:
    """Parse the columns of a unique key of MariaDB. Raises NotUnderstood."""
    parentheses = part.within_parentheses()
    if parentheses is None:
        raise NotUnderstood
    columns: list[tuple[str, int | None]] = []
    for column in parentheses.parts():
        name = _name(column)
        prefix = column.within_parentheses()
        text = prefix.take().text if prefix is not None else ""
        columns.append((name, int(text) if text.isdecimal() else None))
    return AddUnique(tuple(columns), if_none=if_none)


def adds_hash(types: Sequence[str], prefixes: Sequence[int | None], characters_max: int) -> bool | None:
    """Return whether MariaDB needs a hidden hash for a unique key, by types and prefix lengths.

    Return None if these are not enough to decide, because the answer also depends on the bytes per character
    and on the storage engine.
    """
    characters = 0
    for type_text, prefix in zip(types, prefixes, strict=True):
        if prefix is None and type_text.startswith(_WITHOUT_LENGTH):
            return True
        characters += prefix or _length(type_text)
    return None if characters > characters_max else False


def may_need_hash(type_text: str) -> bool:
    """Return whether MariaDB may need a hidden hash for a unique key over a column of this type."""
    return type_text.startswith(_WITHOUT_LENGTH) or is_long(type_text)


def is_long(type_text: str) -> bool:
    """Return whether the charset decides if a unique key over the column needs a hidden hash."""
    return _length(type_text) > _SHORT_UNIQUE_CHARACTERS_MAX


def _length(type_text: str) -> int:
    """Return the declared length of a character or binary type, 0 for other types."""
    if not type_text.startswith(("varchar", "char", "varbinary", "binary")):
        return 0
    return int(type_text[type_text.find("(") + 1 : type_text.find(")")])


def _column(part: TokenCursor, statement: Statement) -> ColumnSpelling:
    """Parse a column's name, type and attributes, up to FIRST or AFTER."""
    name = _name(part)
    serial = part.next.upper == "SERIAL"
    declared = take_type(part, statement.spelling)
    charset: str | None = None
    nullable, key, unique, ends_period, visible = not serial, False, False, False, True
    while not part.ended and not _at_placement(part):
        attribute_charset = accept_charset(part, statement.spelling)
        if attribute_charset is not None:
            charset = charset or attribute_charset or None
        elif any(part.accept(*words) for words in _NOT_NULL):
            nullable = False
        elif part.accept("NULL"):
            # If the column is also declared KEY, this NULL counts only if the key is not added.
            nullable = True
        elif part.accept("ROW", "END"):
            nullable, ends_period = False, True
        elif part.accept("PRIMARY"):
            part.accept("KEY")
            nullable, key = False, True
        elif part.accept("UNIQUE"):
            part.accept("KEY")
            unique = statement.spelling.mariadb
        elif part.accept("KEY"):
            # KEY alone means PRIMARY KEY in a column's attributes.
            nullable, key = False, True
        elif part.accept("INVISIBLE"):
            visible = False
        elif part.accept("VISIBLE"):
            # If a column has both INVISIBLE and VISIBLE, the server uses the last.
            visible = True
        elif part.accept("ASCII"):
            charset = "latin1"
        elif part.accept("UNICODE"):
            charset = "ucs2"
        elif part.accept("BYTE") or (part.next.upper == "COMPRESSED" and statement.spelling.mariadb):
            raise TypeUnknown(name)
        elif part.accept("REFERENCES"):
            _skip_reference(part)
        elif part.accept_any("DEFAULT", "COMMENT", "COLUMN_FORMAT", "STORAGE"):
            # These words are followed by a value or an expression, even if it looks like a keyword.
            if part.accept("CASE"):
                _skip_case(part)
            elif part.within_parentheses() is None:
                part.take()
        elif part.within_parentheses() is None:
            part.take()
    return ColumnSpelling(name, declared, charset, nullable, key, unique, ends_period, visible)


def _skip_case(part: TokenCursor) -> None:
    """Skip an expression of MariaDB after CASE, up to its END."""
    depth = 1
    while depth and not part.ended:
        depth += {"CASE": 1, "END": -1}.get(part.take().upper, 0)


def _skip_reference(part: TokenCursor) -> None:
    """Skip a column's foreign key after REFERENCES. The NULL of SET NULL does not belong to the column."""
    part.take()
    if part.accept("."):
        part.take()
    part.within_parentheses()
    while part.accept("ON") or part.accept("MATCH"):
        if part.accept_any("DELETE", "UPDATE"):
            part.accept_any("SET", "NO")
        part.take()


def _at_placement(part: TokenCursor) -> bool:
    return (part.next.upper == "FIRST" and part.ahead(1).text == "") or (
        part.next.upper == "AFTER" and part.ahead(2).text == ""
    )


def _placement(part: TokenCursor) -> Placement | None:
    if part.accept("FIRST"):
        return Placement(first=True)
    if part.accept("AFTER"):
        return Placement(after=_name(part))
    return None
