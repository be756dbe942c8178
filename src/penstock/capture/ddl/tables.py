# SPDX-License-Identifier: Apache-2.0
"""CREATE TABLE and ALTER TABLE, read into steps.

Only what shapes rows is read strictly: names, types, charsets, places and the primary key. Other
attributes and options are passed over by their parentheses.
"""

from penstock.capture.ddl.column_types import TypeUnknown, take_type
from penstock.capture.ddl.effects import (
    AddColumn,
    AlterTable,
    ChangeColumn,
    ColumnSpelling,
    ConvertCharset,
    CreateLike,
    CreateTable,
    DropColumn,
    Effect,
    NotUnderstood,
    Place,
    RenameColumn,
    RenameTable,
    SetKey,
    SetTableCharset,
    Statement,
    Step,
    accept_charset,
)
from penstock.capture.ddl.tokens import Kind, TokenCursor, words_of
from penstock.model import TableName

_INDEX_WORDS = ("INDEX", "KEY")
_KEY_KINDS = ("FULLTEXT", "SPATIAL", "FOREIGN", "CHECK", "INDEX", "KEY")

# Actions on a table that leave the columns of its rows alone.
_SHAPELESS = words_of(
    """ALGORITHM ANALYZE COALESCE CHECK DISABLE DISCARD ENABLE EXCHANGE FORCE IMPORT LOCK NOWAIT OPTIMIZE
    ORDER PARTITION REBUILD REMOVE REORGANIZE REPAIR SECONDARY_LOAD SECONDARY_UNLOAD TRUNCATE
    UPGRADE WAIT WITHOUT"""
)
# Options of the table as a whole. One of a storage engine's own is a word with `=` behind it.
_OPTIONS = words_of(
    """AUTO_INCREMENT AUTOEXTEND_SIZE AVG_ROW_LENGTH CHAR CHARACTER CHARSET CHECKSUM COLLATE COMMENT
    COMPRESSION CONNECTION DATA DEFAULT DELAY_KEY_WRITE ENCRYPTION ENGINE ENGINE_ATTRIBUTE INDEX INSERT_METHOD
    KEY_BLOCK_SIZE MAX_ROWS MIN_ROWS PACK_KEYS PASSWORD ROW_FORMAT SECONDARY_ENGINE
    SECONDARY_ENGINE_ATTRIBUTE START STATS_AUTO_RECALC STATS_PERSISTENT STATS_SAMPLE_PAGES STORAGE
    TABLESPACE TABLE_CHECKSUM TYPE UNION"""
)
# A unique key over longer columns makes MariaDB add a hidden column: a key has at most 1000 bytes in
# every engine, 250 characters of utf8mb4.
_UNIQUE_CHARACTERS_MAX = 250
_WITHOUT_LENGTH = (
    *("tinytext", "text", "mediumtext", "longtext", "tinyblob", "blob", "mediumblob", "longblob", "json"),
    *("geometry", "point", "linestring", "polygon", "multi", "geomcollection"),
)


def create_table(statement: Statement, keep: bool) -> Effect:
    """Read from the table's name on. Raises NotUnderstood, TypeUnknown."""
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
    row_start = inside.has("ROW", "START")
    for part in inside.parts():
        definition = _key_definition(part, statement, columns)
        if definition is None:
            column = _column(part, statement)
            columns.append(column)
            key = (column.name,) if column.key else key
        elif definition:
            key = definition
    if (cursor.has("SYSTEM", "VERSIONING") and not row_start) or cursor.has("SELECT"):
        # Columns that stand nowhere in the text: row_start and row_end, or those of the query.
        raise NotUnderstood
    charset = None
    while not cursor.ended and not cursor.accept("PARTITION"):
        found = accept_charset(cursor)
        if found is None:
            cursor.take()
        elif found:
            charset = found
    if not columns:
        raise NotUnderstood
    return CreateTable(name, tuple(columns), key, charset, keep)


def alter_table(statement: Statement) -> list[Effect]:
    """Read from the table's name on. Raises NotUnderstood, TypeUnknown."""
    cursor = statement.cursor
    name = statement.take_table()
    steps: list[Step] = []
    renamed: list[Effect] = []
    if cursor.accept("WAIT"):
        cursor.take()
    cursor.accept("NOWAIT")
    for part in cursor.parts():
        if part.next.upper == "ORDER":
            # ORDER BY takes the commas after it, so no action can follow.
            break
        if _renames_table(part):
            inner = Statement(part, statement.database, statement.spelling, statement.named)
            renamed = [RenameTable(name, inner.take_table())]
        else:
            steps.extend(_action(part, statement, name))
    return [AlterTable(name, tuple(steps)), *renamed] if steps else renamed


def _renames_table(part: TokenCursor) -> bool:
    """Take RENAME [TO|AS|=] where a table's name follows."""
    if part.next.upper != "RENAME":
        return False
    following = part.ahead(1).upper
    if following in ("COLUMN", "INDEX", "KEY"):
        return False
    part.take()
    part.accept_any("TO", "AS", "=")
    return True


def _action(part: TokenCursor, statement: Statement, name: TableName) -> list[Step]:
    """Read one action of ALTER TABLE on the table of this name."""
    if part.accept("ADD"):
        return _add(part, statement)
    if part.accept("DROP"):
        return _drop(part, statement)
    if part.accept("MODIFY"):
        _accept_column(part)
        column = _column(part, statement)
        return _change(column.name, column, part, statement)
    if part.accept("CHANGE"):
        _accept_column(part)
        changed = _name(part)
        column = _column(part, statement)
        return _change(changed, column, part, statement)
    if part.accept("RENAME"):
        return _rename_part(part)
    if part.accept("ALTER"):
        # ALTER COLUMN sets defaults and visibility; ALTER INDEX and CHECK are no columns.
        return []
    if part.accept("CONVERT"):
        return _convert(part, database_is_current=name.database == statement.database)
    if part.accept("WITH"):
        if part.has("VERSIONING"):
            raise NotUnderstood
        return []
    if part.next.upper in _SHAPELESS:
        return []
    return _options(part)


def _change(name: str, column: ColumnSpelling, part: TokenCursor, statement: Statement) -> list[Step]:
    may_add_hash = statement.spelling.mariadb and may_need_hash(column.declared.text)
    return [ChangeColumn(name, column, _place(part), may_add_hash), *_key_of(column)]


def _accept_column(part: TokenCursor) -> None:
    """Take [COLUMN] [IF [NOT] EXISTS]."""
    part.accept("COLUMN")
    if not part.accept("IF", "EXISTS"):
        part.accept("IF", "NOT", "EXISTS")


def _add(part: TokenCursor, statement: Statement) -> list[Step]:
    if part.next.upper == "PARTITION" or _is_period(part):
        return []
    if part.accept("SYSTEM"):
        raise NotUnderstood
    if part.next.upper != "COLUMN":
        key = _key_definition(part, statement, [])
        if key is not None:
            return [SetKey(key)] if key else []
    if part.has("IF", "NOT", "EXISTS"):
        # Whether a column was added depends on what was there, so the server is asked.
        raise NotUnderstood
    part.accept("COLUMN")
    if part.next.upper == "(":
        inside = part.within_parentheses()
        if inside is None:
            raise NotUnderstood
        steps: list[Step] = []
        for one in inside.parts():
            key = _key_definition(one, statement, [])
            if key is None:
                column = _column(one, statement)
                steps += [AddColumn(column, Place()), *_key_of(column)]
            elif key:
                steps.append(SetKey(key))
        return steps
    column = _column(part, statement)
    return [AddColumn(column, _place(part) or Place()), *_key_of(column)]


def _is_period(part: TokenCursor) -> bool:
    """Tell whether PERIOD FOR comes next; PERIOD alone is a column's name."""
    return part.next.kind is Kind.WORD and part.next.upper == "PERIOD" and part.ahead(1).upper == "FOR"


def _drop(part: TokenCursor, statement: Statement) -> list[Step]:
    if part.accept("PRIMARY", "KEY"):
        return [SetKey(())]
    if part.next.upper in ("FOREIGN", "CHECK", "PARTITION") or _is_period(part):
        return []
    if part.next.upper in ("INDEX", "KEY", "CONSTRAINT"):
        if statement.spelling.mariadb:
            # The index may have brought a hidden column with it.
            raise NotUnderstood
        return []
    if part.next.upper == "SYSTEM" or part.has("IF", "EXISTS"):
        raise NotUnderstood
    part.accept("COLUMN")
    return [DropColumn(_name(part))]


def _rename_part(part: TokenCursor) -> list[Step]:
    if part.accept_any("INDEX", "KEY"):
        return []
    part.accept("COLUMN")
    if part.has("IF", "EXISTS"):
        raise NotUnderstood
    name = _name(part)
    if not part.accept("TO"):
        raise NotUnderstood
    return [RenameColumn(name, _name(part))]


def _convert(part: TokenCursor, *, database_is_current: bool) -> list[Step]:
    if not part.accept("TO"):
        # MariaDB's CONVERT PARTITION ... TO TABLE and CONVERT TABLE ... TO PARTITION move whole tables.
        raise NotUnderstood
    charset = accept_charset(part)
    # DEFAULT is the charset of the session's current database, wherever the table is.
    if charset is None or not (charset or database_is_current):
        raise NotUnderstood
    return [ConvertCharset(charset or None)]


def _options(part: TokenCursor) -> list[Step]:
    """Read table options, which may stand without commas. Each is a word with a value."""
    steps: list[Step] = []
    if part.next.upper not in _OPTIONS and part.ahead(1).upper != "=":
        raise NotUnderstood
    while not part.ended:
        charset = accept_charset(part)
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


def _key_of(column: ColumnSpelling) -> list[Step]:
    return [SetKey((column.name,))] if column.key else []


def _key_definition(
    part: TokenCursor, statement: Statement, columns: list[ColumnSpelling]
) -> tuple[str, ...] | None:
    """Read a key or constraint: the primary key's columns, () for another, None where a column comes."""
    if part.accept("CONSTRAINT") and part.next.upper not in ("PRIMARY", "UNIQUE", "FOREIGN", "CHECK"):
        part.take()
    if part.accept("PRIMARY", "KEY"):
        while not part.ended and part.next.upper != "(":
            part.take()
        return _key_columns(part)
    if part.accept("UNIQUE"):
        if statement.spelling.mariadb:
            _refuse_hidden_hash(part, columns)
        return ()
    if part.next.upper in _KEY_KINDS:
        return ()
    if part.next.upper == "PERIOD" and part.ahead(1).upper == "FOR":
        return ()
    if part.next.upper == "VECTOR" and part.ahead(1).upper in (*_INDEX_WORDS, "("):
        return ()
    return None


def _key_columns(part: TokenCursor) -> tuple[str, ...]:
    inside = part.within_parentheses()
    if inside is None:
        raise NotUnderstood
    names = []
    for one in inside.parts():
        if one.next.upper == "(":
            raise NotUnderstood
        name = _name(one)
        if not (one.accept("WITHOUT", "OVERLAPS")):
            names.append(name)
    return tuple(names)


def _refuse_hidden_hash(part: TokenCursor, columns: list[ColumnSpelling]) -> None:
    """MariaDB adds a hidden hash column to a unique key too long for an index; raises NotUnderstood there."""
    types = {column.name.lower(): column.declared.text for column in columns}
    while not part.ended and part.next.upper != "(":
        part.take()
    inside = part.within_parentheses()
    if inside is None:
        raise NotUnderstood
    characters = 0
    for one in inside.parts():
        text = types.get(_name(one).lower())
        if text is None or may_need_hash(text):
            raise NotUnderstood
        characters += _length(text)
    if characters > _UNIQUE_CHARACTERS_MAX:
        raise NotUnderstood


def may_need_hash(type_text: str) -> bool:
    """Tell whether MariaDB may back a unique key over a column of this type with a hidden hash."""
    return type_text.startswith(_WITHOUT_LENGTH) or _length(type_text) > _UNIQUE_CHARACTERS_MAX


def _length(type_text: str) -> int:
    """Return the declared length of a type of characters or bytes, 0 of others."""
    if not type_text.startswith(("varchar", "char", "varbinary", "binary")):
        return 0
    return int(type_text[type_text.find("(") + 1 : type_text.find(")")])


def _column(part: TokenCursor, statement: Statement) -> ColumnSpelling:
    """Read a column's name, type and attributes, up to FIRST or AFTER."""
    name = _name(part)
    serial = part.next.upper == "SERIAL"
    declared = take_type(part, statement.spelling)
    charset: str | None = None
    nullable, key = not serial, False
    while not part.ended and not _at_place(part):
        found = accept_charset(part)
        if found is not None:
            charset = charset or found or None
        elif part.accept("NOT", "NULL") or part.accept("ROW", "START") or part.accept("ROW", "END"):
            nullable = False
        elif part.accept("PRIMARY"):
            part.accept("KEY")
            nullable, key = False, True
        elif part.accept("UNIQUE"):
            part.accept("KEY")
            if statement.spelling.mariadb and may_need_hash(declared.text):
                raise NotUnderstood
        elif part.accept("KEY"):
            # KEY alone, in a column's attributes, is PRIMARY KEY.
            nullable, key = False, True
        elif part.accept("ASCII"):
            charset = "latin1"
        elif part.accept("UNICODE"):
            charset = "ucs2"
        elif part.accept("BYTE") or (part.next.upper == "COMPRESSED" and statement.spelling.mariadb):
            raise TypeUnknown(name)
        elif part.accept_any("DEFAULT", "COMMENT", "REFERENCES"):
            # The word after these is a value or a name, whatever keyword it looks like. So is an expression.
            if part.within_parentheses() is None:
                part.take()
        elif part.within_parentheses() is None:
            part.take()
    return ColumnSpelling(name, declared, charset, nullable, key)


def _at_place(part: TokenCursor) -> bool:
    return (part.next.upper == "FIRST" and part.ahead(1).text == "") or (
        part.next.upper == "AFTER" and part.ahead(2).text == ""
    )


def _place(part: TokenCursor) -> Place | None:
    if part.accept("FIRST"):
        return Place(first=True)
    if part.accept("AFTER"):
        return Place(after=_name(part))
    return None
