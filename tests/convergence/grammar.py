# SPDX-License-Identifier: Apache-2.0
"""Random transactions and DDL for the convergence machine, similar to the statements of applications and
DBAs.

An action is a list of statements about one table. The next action depends on the seed and on the content of
the source, so a seed always gives the same actions. A statement that the server refuses has no effect.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.convergence.columns import KEYS, TYPES, WIDENINGS, SourceColumn, columns_of, literal

# The names of changes that not every target can follow: values that no log contains, converted types, changed
# primary keys, emptied and recreated tables, tables without a key, and additional unique keys.
ABILITIES = frozenset({"unlogged", "convert", "other key", "empty", "keyless", "unique"})
NAMES = ("t0", "t1", "t2", "t3", "t4")


@dataclass(frozen=True)
class Action:
    """Statements about one table, for one session to execute."""

    name: str
    table: str
    statements: tuple[str, ...]


class Grammar:
    """Generates actions for the tables of a session's database, limited to the target's `abilities`."""

    def __init__(self, chance: random.Random, cursor: Any, mariadb: bool, abilities: frozenset[str]) -> None:
        self._chance = chance
        self._cursor = cursor
        self._mariadb = mariadb
        self._abilities = abilities
        self._numbers = 0
        self._table = ""
        self._columns: list[SourceColumn] = []
        self._rows_actions = self._changes_of_rows()
        self._definition_actions = self._changes_of_definitions()

    def first(self) -> list[Action]:
        """Return the action that creates the tables and their first rows."""
        return [Action("create", table, (self._create(table),)) for table in NAMES]

    def next(self) -> Action:
        """Return the next action."""
        chance = self._chance
        self._table = chance.choice(NAMES)
        self._columns = columns_of(self._cursor, self._table)
        if not self._columns:
            return Action("create", self._table, (self._create(self._table),))
        actions = self._rows_actions if chance.random() < 0.8 else self._definition_actions
        name = chance.choices(list(actions), [weight for _, weight in actions.values()])[0]
        return Action(name, self._table, tuple(actions[name][0]()))

    # --- What is drawn --------------------------------------------------------------------------

    def _new_name(self) -> str:
        self._numbers += 1
        return f"c{self._numbers}"

    def _others(self) -> list[SourceColumn]:
        return [column for column in self._columns if not column.in_primary_key]

    def _key(self) -> list[SourceColumn]:
        return [column for column in self._columns if column.in_primary_key]

    def _column(self) -> SourceColumn:
        return self._chance.choice(self._others() or self._columns)

    def _type(self) -> str:
        kind = self._chance.choice(TYPES)
        return "LONGTEXT" if kind == "JSON" and self._mariadb else kind

    def _type_in_place_of(self, column: SourceColumn) -> str:
        """Return a type for a new column with a former column's name: the same type if types cannot be
        converted.
        """
        kind = self._type()
        return kind if "convert" in self._abilities else column.kind

    def _literal_of(self, kind: str) -> str:
        """Return a literal for a declared type. It is a number if it may be used as a default."""
        charset = "latin1" if "latin1" in kind else "utf8mb4"
        text = kind.split(" CHARACTER")[0].replace(" NULL", "").lower()
        return literal(self._chance, SourceColumn("", text, False, charset, False, False))

    def _create(self, table: str) -> str:
        chance = self._chance
        columns, key = chance.choice(KEYS)
        keys = f", PRIMARY KEY ({key})"
        if "keyless" in self._abilities and chance.random() < 0.15:
            keys = ""
        names = [self._new_name() for _ in range(chance.randint(1, 4))]
        others = "".join(f", {name} {self._type()}" for name in names)
        if "unique" in self._abilities and chance.random() < 0.4:
            others += ", seat INT, label VARCHAR(10)"
            keys += ", UNIQUE KEY seat (seat), UNIQUE KEY label (label)"
        return f"CREATE TABLE {table} ({columns}{others}{keys}) CHARACTER SET utf8mb4"

    def _values(self) -> tuple[str, str]:
        given = [column for column in self._columns if not column.is_generated]
        names = ", ".join(f"`{column.name}`" for column in given)
        return names, ", ".join(literal(self._chance, column) for column in given)

    def _insert(self, verb: str = "INSERT IGNORE", rows: int | None = None, tail: str = "") -> str:
        drawn = [self._values() for _ in range(rows or self._chance.randint(1, 6))]
        rows_drawn = ", ".join(f"({row})" for _, row in drawn)
        return f"{verb} INTO {self._table} ({drawn[0][0]}) VALUES {rows_drawn}{tail}"

    def _update(self) -> str:
        column = self._column()
        if column.is_generated:
            return self._insert()
        value = literal(self._chance, column)
        return f"UPDATE IGNORE {self._table} SET `{column.name}` = {value}{self._some()}"

    def _some(self) -> str:
        """Return a condition that selects some rows, the same rows on every server."""
        column = self._chance.choice(self._columns)
        operator = self._chance.choice(("=", "<", ">", "<=>"))
        order = ", ".join(f"`{one.name}`" for one in (self._key() or self._columns))
        return f" WHERE `{column.name}` {operator} {literal(self._chance, column)} ORDER BY {order} LIMIT 4"

    # --- Rows -----------------------------------------------------------------------------------

    def _changes_of_rows(self) -> dict[str, tuple[Callable[[], list[str]], float]]:
        return {
            "insert": (lambda: [self._insert()], 16),
            "update": (lambda: [self._update()], 14),
            "update all": (self._update_all, 3),
            "delete": (lambda: [f"DELETE FROM {self._table}{self._some()}"], 8),
            "replace": (lambda: [self._insert("REPLACE")], 8),
            "upsert": (self._upsert, 5),
            "transaction": (lambda: ["BEGIN", *self._several(), self._end()], 10),
            "savepoint": (self._savepoint, 5),
            "prepared": (self._prepared, 4),
            "move a key": (self._move_key, 7),
            "swap keys": (self._swap_keys, 5),
            "swap unique": (self._swap_unique, 5),
            "insert again": (self._insert_again, 5),
        }

    def _end(self) -> str:
        return "COMMIT" if self._chance.random() < 0.85 else "ROLLBACK"

    def _several(self) -> list[str]:
        makers = (
            self._insert,
            self._update,
            lambda: self._insert("REPLACE"),
            lambda: f"DELETE FROM {self._table}{self._some()}",
            *([lambda: self._move_key()[0]] if self._key() else []),
        )
        return [self._chance.choice(makers)() for _ in range(self._chance.randint(1, 5))]

    def _update_all(self) -> list[str]:
        column = self._column()
        return [f"UPDATE IGNORE {self._table} SET `{column.name}` = {literal(self._chance, column)}"]

    def _upsert(self) -> list[str]:
        column = self._column()
        return [
            self._insert("INSERT", 3, f" ON DUPLICATE KEY UPDATE `{column.name}` = VALUES(`{column.name}`)")
        ]

    def _savepoint(self) -> list[str]:
        middle = ["SAVEPOINT here", *self._several(), "ROLLBACK TO SAVEPOINT here"]
        return ["BEGIN", *self._several(), *middle, *self._several(), self._end()]

    def _prepared(self) -> list[str]:
        self._numbers += 1
        name = f"'x{self._numbers}'"
        end = "COMMIT" if self._chance.random() < 0.7 else "ROLLBACK"
        return [
            f"XA START {name}",
            *self._several(),
            f"XA END {name}",
            f"XA PREPARE {name}",
            f"XA {end} {name}",
        ]

    def _move_key(self) -> list[str]:
        column = self._chance.choice(self._key() or self._columns)
        value = literal(self._chance, column)
        if self._chance.random() < 0.3 and "int" in column.kind:
            name = f"`{column.name}`"
            return [f"UPDATE {self._table} SET {name} = {name} + 1 ORDER BY {name} DESC"]
        if self._chance.random() < 0.3 and "varchar" in column.kind:
            value = f"{self._chance.choice(('UPPER', 'LOWER'))}(`{column.name}`)"
        return [f"UPDATE IGNORE {self._table} SET `{column.name}` = {value}{self._some()}"]

    def _swap_keys(self) -> list[str]:
        key = self._key()
        if len(key) != 1 or "int" not in key[0].kind:
            return self._move_key()
        name = f"`{key[0].name}`"
        one, other = self._chance.sample(range(15), 2)
        steps = ((100, one), (one, other), (other, 100))
        return [
            "BEGIN",
            *(f"UPDATE {self._table} SET {name} = {new} WHERE {name} = {old}" for new, old in steps),
            "COMMIT",
        ]

    def _swap_unique(self) -> list[str]:
        names = {column.name for column in self._columns}
        if "seat" not in names or "label" not in names:
            return [self._update()]
        one, other = self._chance.sample(range(15), 2)
        steps = ((100, one), (one, other), (other, 100))
        order = ", ".join(f"`{column.name}`" for column in self._key() or self._columns[:1])
        return [
            "BEGIN",
            *(f"UPDATE {self._table} SET seat = {new} WHERE seat = {old}" for new, old in steps),
            f"UPDATE {self._table} SET seat = NULL ORDER BY {order} LIMIT 1",
            f"UPDATE IGNORE {self._table} SET seat = {one} ORDER BY {order} DESC LIMIT 1",
            "COMMIT",
        ]

    def _insert_again(self) -> list[str]:
        return ["BEGIN", f"DELETE FROM {self._table}{self._some()}", self._insert(rows=5), self._end()]

    # --- Definitions ----------------------------------------------------------------------------

    def _changes_of_definitions(self) -> dict[str, tuple[Callable[[], list[str]], float]]:
        actions: dict[str, tuple[Callable[[], list[str]], float, str]] = {
            "add": (
                lambda: [self._alter(f"ADD COLUMN {self._new_name()} {self._type()}{self._place()}")],
                10,
                "",
            ),
            "drop": (self._drop, 6, ""),
            "widen": (self._widen, 5, ""),
            "add index": (lambda: [self._alter(f"ADD INDEX ({self._column().name})")], 1, ""),
            "add with a value": (self._add_value, 8, "unlogged"),
            "add generated": (self._add_generated, 4, "unlogged"),
            "rename": (self._rename, 6, "unlogged"),
            "drop and add": (self._drop_and_add, 5, "unlogged"),
            "ghost": (self._ghost, 5, "unlogged"),
            "rename over": (self._rename_over, 4, "unlogged"),
            "partitions": (self._partitions, 4, "unlogged"),
            "add unique": (self._add_unique, 4, "unique"),
            "drop unique": (
                lambda: [self._alter(f"DROP INDEX {self._chance.choice(('seat', 'label'))}")],
                2,
                "unique",
            ),
            "modify": (self._modify, 10, "convert"),
            "several": (self._several_steps, 6, "convert"),
            "charset": (self._charset, 2, "convert"),
            "primary key": (self._primary_key, 4, "other key"),
            "truncate": (lambda: [f"TRUNCATE TABLE {self._table}"], 4, "empty"),
            "drop table": (lambda: [f"DROP TABLE {self._table}"], 3, "empty"),
            "make anew": (self._make_anew, 5, "convert"),
            "make of a query": (self._make_of_query, 4, "convert"),
            "foreign key": (self._foreign_key, 40, "cascade"),
        }
        return {
            name: (make, weight)
            for name, (make, weight, needs) in actions.items()
            if not needs or needs in self._abilities
        }

    def _alter(self, *steps: str) -> str:
        ignore = (
            "IGNORE "
            if self._mariadb and "unlogged" in self._abilities and self._chance.random() < 0.1
            else ""
        )
        return f"ALTER {ignore}TABLE {self._table} {', '.join(steps)}"

    def _place(self) -> str:
        if self._chance.random() < 0.6:
            return ""
        return self._chance.choice((" FIRST", f" AFTER `{self._chance.choice(self._columns).name}`"))

    def _drop(self) -> list[str]:
        return [self._alter(f"DROP COLUMN `{self._column().name}`")] if self._others() else [self._insert()]

    def _widen(self) -> list[str]:
        for column in self._others():
            if column.kind in WIDENINGS and not column.is_generated:
                null = "" if column.nullable else " NOT NULL"
                return [self._alter(f"MODIFY `{column.name}` {WIDENINGS[column.kind]}{null}"), self._insert()]
        return [self._alter(f"ADD COLUMN {self._new_name()} SMALLINT")]

    def _add_value(self) -> list[str]:
        kind, name = self._type(), self._new_name()
        if self._chance.random() < 0.2:
            return [self._alter(f"ADD COLUMN {name} INT NOT NULL AUTO_INCREMENT UNIQUE")]
        if self._chance.random() < 0.3:
            return [self._alter(f"ADD COLUMN {name} {kind.replace(' NULL', '')} NOT NULL{self._place()}")]
        return [self._alter(f"ADD COLUMN {name} {kind} DEFAULT {self._literal_of(kind)}{self._place()}")]

    def _expression(self) -> str:
        column = self._chance.choice([one for one in self._columns if not one.is_generated])
        return self._chance.choice((f"`{column.name}` IS NULL", f"LENGTH(`{column.name}`)"))

    def _add_generated(self) -> list[str]:
        how = self._chance.choice(("STORED", "VIRTUAL"))
        generated = [column for column in self._columns if column.is_generated]
        if generated and self._chance.random() < 0.6:
            return [
                self._alter(f"MODIFY `{generated[0].name}` INT AS ({self._expression()} + 5) {how}"),
                self._insert(),
            ]
        return [self._alter(f"ADD COLUMN {self._new_name()} INT AS ({self._expression()}) {how}")]

    def _rename(self) -> list[str]:
        column, name = self._chance.choice(self._columns), self._new_name()
        others = self._others()
        if len(others) > 1 and self._chance.random() < 0.3:
            one, other = (picked.name for picked in self._chance.sample(others, 2))
            return [self._alter(f"RENAME COLUMN `{one}` TO `{other}`", f"RENAME COLUMN `{other}` TO `{one}`")]
        steps = [f"RENAME COLUMN `{column.name}` TO `{name}`"]
        if self._chance.random() < 0.3:
            steps.append(f"ADD COLUMN `{column.name}` {self._type_in_place_of(column)}")
        return [self._alter(*steps)]

    def _drop_and_add(self) -> list[str]:
        if len(self._others()) < 2:
            return self._add_value()
        dropped = self._column()
        name, kind = dropped.name, self._chance.choice((self._type_in_place_of(dropped), dropped.kind))
        if self._chance.random() < 0.5:
            return [self._alter(f"DROP COLUMN `{name}`", f"ADD COLUMN `{name}` {kind}")]
        return [
            self._alter(f"DROP COLUMN `{name}`"),
            self._alter(f"ADD COLUMN `{name}` {kind}{self._place()}"),
        ]

    def _modify(self) -> list[str]:
        column = self._column()
        kind = self._chance.choice((self._type(), column.kind))
        null = self._chance.choice((" NULL", " NOT NULL", ""))
        kind = kind.replace(" NULL", "")
        return [self._alter(f"MODIFY `{column.name}` {kind}{null}{self._place()}"), self._insert()]

    def _several_steps(self) -> list[str]:
        column, other = self._column(), self._chance.choice(self._columns)
        steps = [
            f"ADD COLUMN {self._new_name()} {self._type()}{self._place()}",
            f"MODIFY `{column.name}` {column.kind}{self._place()}",
            f"CHANGE `{other.name}` `{self._new_name()}` {other.kind}{'' if other.nullable else ' NOT NULL'}",
        ]
        return [self._alter(*self._chance.sample(steps, 2)), self._insert()]

    def _charset(self) -> list[str]:
        return [
            self._alter(f"CONVERT TO CHARACTER SET {self._chance.choice(('latin1', 'utf8mb4', 'ascii'))}")
        ]

    def _primary_key(self) -> list[str]:
        others = [column for column in self._others() if "int" in column.kind and not column.is_generated]
        if not others or not self._key():
            return self._add_value()
        name = self._chance.choice(others).name
        kept = [f"`{column.name}`" for column in self._key()]
        chosen = self._chance.choice(([*kept, f"`{name}`"], [f"`{name}`"]))
        return [
            f"UPDATE {self._table} SET `{name}` = {self._chance.randint(0, 9)} WHERE `{name}` IS NULL",
            self._alter("DROP PRIMARY KEY", f"ADD PRIMARY KEY ({', '.join(chosen)})"),
        ]

    def _add_unique(self) -> list[str]:
        column = self._chance.choice(
            [one for one in self._columns if "text" not in one.kind and "blob" not in one.kind]
        )
        unique = self._alter(f"ADD UNIQUE ({column.name})")
        ignore = self._mariadb and "unlogged" in self._abilities and self._chance.random() < 0.6
        return [unique.replace("ALTER TABLE", "ALTER IGNORE TABLE") if ignore else unique]

    def _ghost(self) -> list[str]:
        """Alter a copy, which then takes the table's name, as gh-ost and pt-online-schema-change do."""
        table = self._table
        if not self._key():
            # gh-ost and pt-online-schema-change refuse a table without a key.
            return self._add_value()
        ghost, old = self._chance.choice(
            ((f"_{table}_gho", f"_{table}_del"), (f"_{table}_new", f"_{table}_old"))
        )
        changes = [f"ADD COLUMN {self._new_name()} {self._type()}", "ENGINE=InnoDB"]
        if "convert" in self._abilities:
            column = self._column()
            changes += [
                f"MODIFY `{column.name}` {self._type()}",
                f"MODIFY `{column.name}` {column.kind} FIRST",
            ]
            changes.append(f"ADD UNIQUE (`{column.name}`)")
        names = ", ".join(f"`{column.name}`" for column in self._columns if not column.is_generated)
        copied = f"INSERT IGNORE INTO {ghost} ({names}) SELECT {names} FROM {table}"
        return [
            f"DROP TABLE IF EXISTS {ghost}, {old}",
            f"CREATE TABLE {ghost} LIKE {table}",
            f"ALTER TABLE {ghost} {self._chance.choice(changes)}",
            copied,
            self._update(),
            copied.replace("INSERT IGNORE", "REPLACE"),
            f"RENAME TABLE {table} TO {old}, {ghost} TO {table}",
            *([f"DROP TABLE {old}"] if self._chance.random() < 0.5 else []),
        ]

    def _rename_over(self) -> list[str]:
        table = self._table
        return [
            f"DROP TABLE IF EXISTS other_{table}, former_{table}",
            f"CREATE TABLE other_{table} LIKE {table}",
            self._insert().replace(f"INTO {table} ", f"INTO other_{table} "),
            f"RENAME TABLE {table} TO former_{table}, other_{table} TO {table}",
            self._insert(),
        ]

    def _partitions(self) -> list[str]:
        key, table = self._key(), self._table
        if not key or "int" not in key[0].kind:
            return self._add_value()
        ranges = "PARTITION a VALUES LESS THAN (3), PARTITION b VALUES LESS THAN MAXVALUE"
        ends = [
            self._alter("DROP PARTITION a"),
            self._alter("TRUNCATE PARTITION b"),
            self._alter("REMOVE PARTITIONING"),
        ]
        return [
            f"ALTER TABLE {table} PARTITION BY RANGE (`{key[0].name}`) ({ranges})",
            self._insert(),
            *self._chance.sample(ends, 2),
        ]

    def _make_anew(self) -> list[str]:
        made = self._create(self._table)
        if self._mariadb and self._chance.random() < 0.5:
            return [made.replace("CREATE TABLE", "CREATE OR REPLACE TABLE", 1)]
        return [f"DROP TABLE {self._table}", made]

    def _make_of_query(self) -> list[str]:
        names = ", ".join(f"`{column.name}`" for column in self._key())
        if not names:
            return [f"TRUNCATE TABLE {self._table}"]
        table = self._table
        return [
            f"DROP TABLE IF EXISTS origin_{table}",
            f"RENAME TABLE {table} TO origin_{table}",
            f"CREATE TABLE {table} (PRIMARY KEY ({names})) AS SELECT * FROM origin_{table}",
            self._insert("REPLACE"),
        ]

    def _foreign_key(self) -> list[str]:
        parent = self._chance.choice(NAMES)
        key = [column for column in columns_of(self._cursor, parent) if column.in_primary_key]
        if len(key) != 1:
            return [self._insert()]
        name = self._new_name()
        charset = f" CHARACTER SET {key[0].charset}" if key[0].charset else ""
        does = ("CASCADE", "SET NULL")
        actions = f"ON DELETE {self._chance.choice(does)} ON UPDATE {self._chance.choice(does)}"
        chosen = f"(SELECT `{key[0].name}` FROM {parent} ORDER BY 1 LIMIT 1)"
        return [
            self._alter(
                f"ADD COLUMN {name} {key[0].kind}{charset}",
                f"ADD FOREIGN KEY ({name}) REFERENCES {parent} (`{key[0].name}`) {actions}",
            ),
            f"UPDATE IGNORE {self._table} SET {name} = {chosen} ORDER BY 1 LIMIT 3",
        ]
