# SPDX-License-Identifier: Apache-2.0
"""Random statements from the grammars of MySQL and MariaDB.

Most are valid for the existing tables. A server does not log a statement that it refuses. Source: the
manuals' "Data Definition Statements".
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.ddl_machine import vocabulary


@dataclass(frozen=True)
class ColumnFacts:
    """A column according to information_schema."""

    name: str
    type_text: str
    charset: str | None
    is_writable: bool
    is_comparable: bool = True


@dataclass(frozen=True)
class TableFacts:
    """A table of the server: its database and name, its columns in order, and whether it is
    system-versioned.
    """

    database: str
    name: str
    columns: tuple[ColumnFacts, ...]
    is_versioned: bool = False


class Grammar:
    """Writes statements for one server. The caller keeps `tables`, the existing tables, up to date."""

    def __init__(self, chance: random.Random, mariadb: bool, databases: Sequence[str]) -> None:
        self.chance = chance
        self.mariadb = mariadb
        self.databases = databases
        self.tables: list[TableFacts] = []
        self.ansi_quotes = False
        self.escapes = True

    def statement(self) -> str:
        """Return a random statement."""
        few = len(self.tables) < 3
        writers = (
            (self._create_table, 30 if few else 7),
            (self._alter_table, 60 if self.tables else 0),
            (self._rename_tables, 5 if self.tables else 0),
            (self._drop_tables, 1 if few else 4),
            (self._index, 5 if self.tables else 0),
            (self._other, 9),
        )
        [writer] = self.chance.choices(
            [method for method, _ in writers], weights=[weight for _, weight in writers]
        )
        return self._decorated(writer())

    # --- Names and noise ---------------------------------------------------------------------------

    def _maybe(self, part: float, text: str) -> str:
        return text if self.chance.random() < part else ""

    def _quoted(self, name: str) -> str:
        if self.ansi_quotes and self.chance.random() < 0.5:
            return '"' + name.replace('"', '""') + '"'
        return "`" + name.replace("`", "``") + "`"

    def _name(self, name: str) -> str:
        is_bare = name in vocabulary.KEYWORD_NAMES or name in vocabulary.PLAIN_NAMES
        if is_bare and self.chance.random() < 0.6:
            return self.chance.choice((name, name, name.upper())) if name.isascii() else name
        return self._quoted(name)

    def _new_name(self) -> str:
        names = self.chance.choices(
            (vocabulary.PLAIN_NAMES, vocabulary.KEYWORD_NAMES, vocabulary.RESERVED_NAMES), weights=(4, 4, 2)
        )[0]
        return self._name(self.chance.choice(names))

    def _table(self, facts: TableFacts) -> str:
        name = self._quoted(facts.name) if facts.name != "t" else "t"
        if facts.database != self.databases[0] or self.chance.random() < 0.2:
            blank = self._maybe(0.1, " ")
            return f"{self._quoted(facts.database)}{blank}.{blank}{name}"
        return name

    def _new_table(self) -> str:
        database = self.chance.choice((self.databases[0], *self.databases))
        return self._table(TableFacts(database, self.chance.choice(vocabulary.TABLE_NAMES), ()))

    def _some_table(self) -> TableFacts:
        return self.chance.choice(self.tables)

    def _comment(self) -> str:
        inside = self.chance.choice(("x", "ALTER TABLE t DROP a", "'", "`", "(", "! ", "*", "/", ";", "--"))
        return self.chance.choice(
            (f"/*{inside}*/", f"/* {inside} */", f"-- {inside}\n", f"# {inside}\n", "\n\t")
        )

    def _versioned_comment(self, text: str) -> str:
        """Return text in a version comment that this server executes and others may not."""
        own = ("/*M!", "/*M!100100 ") if self.mariadb else ("/*!80000 ",)
        return f"{self.chance.choice(('/*!', '/*!40101', '/*!50100 ', *own))} {text} */"

    def _decorated(self, text: str) -> str:
        if self.mariadb and self.chance.random() < 0.06:
            settings = ("lock_wait_timeout=50", "sort_buffer_size=2048, lock_wait_timeout=9", "sql_mode=''")
            text = f"SET STATEMENT {self.chance.choice(settings)} FOR {text}"
        if self.chance.random() < 0.05:
            text = self._versioned_comment(text)
        if self.chance.random() < 0.15:
            at = self.chance.choice([0, *(at for at, character in enumerate(text) if character == " ")])
            # Leave spaces inside quotes alone, because a comment there would be part of a name.
            if all(text[:at].count(quote) % 2 == 0 for quote in "'`\"") and "/*" not in text[:at]:
                text = f"{text[:at]} {self._comment()} {text[at:]}"
        return text + self._maybe(0.05, " ;")

    # --- Columns and keys --------------------------------------------------------------------------

    def _column(self, columns: Sequence[str] = (), name: str | None = None, is_new: bool = True) -> str:
        name = self._new_name() if name is None else name
        if columns and self.chance.random() < 0.08:
            return f"{name} {self._generated(columns)}"
        kind = vocabulary.column_type(self.chance, self.mariadb)
        return f"{name} {kind}{self._attributes(kind, is_new)}"

    def _generated(self, columns: Sequence[str]) -> str:
        expression = self.chance.choice(
            (f"({columns[0]} IS NOT NULL) + 1", f"3 + ({columns[-1]} IN (1, 2))", "(1 + 2)")
        )
        kind = self.chance.choice(("INT", "BIGINT UNSIGNED", "DECIMAL(9,2)"))
        how = self.chance.choice(("VIRTUAL", "STORED", "", "PERSISTENT" if self.mariadb else "STORED"))
        return f"{kind} {self._maybe(0.5, 'GENERATED ALWAYS ')}AS ({expression}) {how}"

    def _attributes(self, kind: str, is_new: bool) -> str:
        parts = []
        if self.chance.random() < 0.3 and "NULL" not in kind:
            parts.append(self.chance.choice(("NOT NULL", "NULL")))
        if self.chance.random() < 0.2 and "DEFAULT" not in kind:
            defaults = [
                "NULL",
                "(1 IS NOT NULL)",
                "(length('FIRST, after (x'))",
                "'1'",
                "1",
                "(lower('NOT NULL'))",
            ]
            parts.append(f"DEFAULT {self.chance.choice(defaults)}")
        if self.chance.random() < 0.15:
            comments = (
                "first",
                "x, ADD y INT",
                "after (",
                "it''s",
                "NOT NULL UNIQUE",
                "\u4e2d",
                "/* */ -- #",
                "\\', ADD z INT COMMENT \\'" if self.escapes else "c:\\",
            )
            parts.append(f"COMMENT '{self.chance.choice(comments)}'")
        if self.chance.random() < 0.05:
            parts.append(self.chance.choice(("UNIQUE", "UNIQUE KEY", "PRIMARY KEY", "KEY")))
        if self.chance.random() < 0.06:
            parts.append("INVISIBLE DEFAULT 3" if "DEFAULT" not in " ".join((kind, *parts)) else "INVISIBLE")
        if self.chance.random() < 0.05:
            parts.append("CHECK (1 > 0 OR 'a' = 'NOT NULL')")
        if self.chance.random() < 0.03:
            mysql = ("COLUMN_FORMAT FIXED", "STORAGE DISK", "VISIBLE", "/*!80023 VISIBLE */")
            mariadb = ("WITHOUT SYSTEM VERSIONING", "REF_SYSTEM_ID=0", "/*M!100303 INVISIBLE */ DEFAULT 1")
            parts.append(self.chance.choice(mariadb if self.mariadb else mysql))
        self.chance.shuffle(parts)
        return "".join(f" {part}" for part in parts)

    def _key(self, columns: Sequence[str]) -> str:
        chosen = self.chance.sample(list(columns), min(len(columns), self.chance.choice((1, 1, 2))))
        listed = ", ".join(column + self.chance.choice(("", "", "(3)", " DESC", " ASC")) for column in chosen)
        name = self._maybe(0.4, self._name(self.chance.choice(vocabulary.KEYWORD_NAMES)) + " ")
        kinds = (
            f"PRIMARY KEY {self._maybe(0.3, 'USING BTREE ')}({listed})",
            f"CONSTRAINT {name}PRIMARY KEY ({listed})",
            f"KEY {name}({listed})",
            f"INDEX {name}{self._maybe(0.3, 'USING BTREE ')}({listed}) COMMENT 'x, y'",
            f"UNIQUE {self._maybe(0.5, 'KEY ')}{name}({listed})",
            f"CONSTRAINT UNIQUE INDEX {name}({listed})",
            f"FULLTEXT KEY {name}({chosen[0]})",
            f"CHECK ({chosen[0]} IS NULL OR 1 IN (1, 2))",
            f"CONSTRAINT {name}CHECK ({chosen[0]} IS NOT NULL OR TRUE)",
        )
        return self.chance.choices(kinds, weights=(8, 2, 6, 4, 2, 1, 2, 2, 2))[0]

    def _table_options(self, equals_charset: bool = True) -> list[str]:
        options = []
        if equals_charset and self.chance.random() < 0.4:
            default = self._maybe(0.4, "DEFAULT ")
            options.append(default + vocabulary.charset_clause(self.chance, self.chance.choice(("", "="))))
        if self.chance.random() < 0.3:
            plain_options = (
                "ENGINE=InnoDB",
                "ENGINE = MyISAM",
                "COMMENT='charset=latin1, x'",
                "ROW_FORMAT=DYNAMIC",
                "AUTO_INCREMENT=5",
                "STATS_PERSISTENT=0",
                "COMMENT 'a''b'",
                "MAX_ROWS 100",
            )
            options.append(self.chance.choice(plain_options))
        self.chance.shuffle(options)
        return options

    # --- Tables ------------------------------------------------------------------------------------

    def _create_table(self) -> str:
        head = "CREATE "
        if self.mariadb and self.chance.random() < 0.15:
            head += "OR REPLACE "
        # A temporary table would hide a table of the same name from later statements, so it gets a unique
        # name.
        is_temporary = self.chance.random() < 0.04
        head += "TEMPORARY TABLE " if is_temporary else "TABLE "
        if "OR" not in head:
            head += self._maybe(0.15, "IF NOT EXISTS ")
        head += "hidden" if is_temporary else self._new_table()
        if self.tables and self.chance.random() < 0.12:
            like = self._table(self._some_table())
            return self.chance.choice((f"{head} LIKE {like}", f"{head} (LIKE {like})"))
        if self.tables and self.chance.random() < 0.08:
            head += self._maybe(0.3, " (zz INT UNSIGNED)")
            return f"{head} AS SELECT * FROM {self._table(self._some_table())}"
        names = [self._new_name() for _ in range(self.chance.randint(1, 6))]
        parts = [self._column(names[:at], name) for at, name in enumerate(names)]
        parts += [self._key(names) for _ in range(self.chance.choice((0, 1, 1, 2)))]
        versioned = self.mariadb and self.chance.random() < 0.06
        if versioned and self.chance.random() < 0.5:
            start, end = self._quoted("vs"), self._quoted("ve")
            parts += [
                f"{start} TIMESTAMP(6) GENERATED ALWAYS AS ROW START{self._maybe(0.4, ' INVISIBLE')}",
                f"{end} TIMESTAMP(6) GENERATED ALWAYS AS ROW END",
                f"PERIOD FOR SYSTEM_TIME ({start}, {end})",
            ]
        text = f"{head}{self._maybe(0.5, ' ')}({', '.join(parts)}) {' '.join(self._table_options())}"
        if versioned:
            text += " WITH SYSTEM VERSIONING"
        return text + self._maybe(0.06, self._partitions(names[0]))

    def _partitions(self, column: str) -> str:
        return " " + self.chance.choice(
            (
                f"PARTITION BY KEY ({column}) PARTITIONS 2",
                f"PARTITION BY HASH ({column}) PARTITIONS 3",
                f"PARTITION BY RANGE COLUMNS ({column}) (PARTITION p0 VALUES LESS THAN (MAXVALUE))",
                f"/*!50100 PARTITION BY LIST ({column}) (PARTITION `charset` VALUES IN (1, 2, 3)) */",
            )
        )

    def _rename_tables(self) -> str:
        pairs = []
        for facts in self.chance.sample(self.tables, min(len(self.tables), self.chance.choice((1, 1, 2)))):
            wait = self._maybe(0.2, self.chance.choice((" NOWAIT", " WAIT 5"))) if self.mariadb else ""
            pairs.append(f"{self._table(facts)}{wait} TO {self._new_table()}")
        exists = self._maybe(0.1, "IF EXISTS ") if self.mariadb else ""
        return f"RENAME {self.chance.choice(('TABLE', 'TABLES'))} {exists}{', '.join(pairs)}"

    def _drop_tables(self) -> str:
        names = [self._new_table()] if self.chance.random() < 0.3 or not self.tables else []
        names += [self._table(table) for table in self.chance.sample(self.tables, min(len(self.tables), 1))]
        wait = self._maybe(0.2, self.chance.choice((" NOWAIT", " WAIT 5"))) if self.mariadb else ""
        kind = self.chance.choice(("TABLE", "TABLES", "/* app */ TABLE", "TEMPORARY TABLE"))
        return f"DROP {kind} IF EXISTS {', '.join(names)}{wait}{self._maybe(0.2, ' CASCADE')}"

    def _alter_table(self) -> str:
        facts = self._some_table()
        head = "ALTER "
        if self.mariadb:
            head += self._maybe(0.1, "ONLINE ") + self._maybe(0.05, "IGNORE ")
        head += "TABLE " + (self._maybe(0.1, "IF EXISTS ") if self.mariadb else "") + self._table(facts)
        if self.mariadb:
            head += self._maybe(0.1, self.chance.choice((" NOWAIT", " WAIT 3")))
        if self.chance.random() < 0.07:
            return f"{head} {self._whole_table_action()}"
        clauses = [self._clause(facts) for _ in range(self.chance.choice((1, 1, 1, 2, 2, 3, 4)))]
        if self.chance.random() < 0.1:
            clauses.append(
                self.chance.choice(("ALGORITHM=COPY", "LOCK=DEFAULT", "FORCE", "ALGORITHM = DEFAULT"))
            )
        if self.chance.random() < 0.06:
            clauses.append(
                self.chance.choice((f"RENAME TO {self._new_table()}", f"RENAME {self._new_table()}"))
            )
        text = f"{head} {', '.join(clauses)}"
        if self.chance.random() < 0.02:
            text += ", ORDER BY " + ", ".join(self._name(column.name) for column in facts.columns[:2])
        elif self.chance.random() < 0.05:
            # These clauses follow the last action without a comma.
            partitions = self._partitions(self._name(self.chance.choice(facts.columns).name))
            text += self.chance.choice((partitions, " REMOVE PARTITIONING"))
        return text

    def _whole_table_action(self) -> str:
        return self.chance.choice(
            (
                "ENGINE=InnoDB",
                "REMOVE PARTITIONING",
                "ADD PARTITION PARTITIONS 2",
                "COALESCE PARTITION 1",
                "PARTITION BY KEY () PARTITIONS 2",
                "DISABLE KEYS",
                "DROP PARTITION p0",
                "TRUNCATE PARTITION ALL",
                "FORCE",
                "DROP CHECK x" if not self.mariadb else "DROP CONSTRAINT IF EXISTS x",
                "ADD SYSTEM VERSIONING" if self.mariadb else "SECONDARY_ENGINE=NULL",
                "DROP SYSTEM VERSIONING" if self.mariadb else "ALTER INDEX x INVISIBLE",
                "DISCARD TABLESPACE" if self.chance.random() < 0.1 else "REBUILD PARTITION ALL",
            )
        )

    def _clause(self, facts: TableFacts) -> str:
        name = self.chance.choice(facts.columns).name
        column = self._name(name)
        word = self.chance.choice(("", "COLUMN "))
        not_exists = self._maybe(0.08, "IF NOT EXISTS ") if self.mariadb else ""
        exists = self._maybe(0.08, "IF EXISTS ") if self.mariadb else ""
        names = [self._quoted(column.name) for column in facts.columns]
        clauses = (
            (lambda: f"ADD {word}{not_exists}{self._column(names)}{self._place(facts)}", 22),
            (lambda: f"ADD {word}({self._column(names)}, {self._column()})", 3),
            (lambda: f"DROP {word}{exists}{column}{self._maybe(0.1, ' RESTRICT')}", 10),
            (lambda: f"MODIFY {word}{exists}{self._column((), column)}{self._place(facts)}", 14),
            (lambda: f"CHANGE {word}{exists}{column} {self._column()}{self._place(facts)}", 10),
            (lambda: f"RENAME COLUMN {exists}{column} TO {self._new_name()}", 9),
            (lambda: f"ADD {self._key(names)}", 6),
            (lambda: "DROP PRIMARY KEY", 2),
            (lambda: f"DROP {self.chance.choice(('INDEX', 'KEY'))} {exists}{column}", 2),
            (lambda: f"CONVERT TO {self._conversion()}", 2),
            (lambda: " ".join(self._table_options()) or "COMMENT 'x'", 5),
            (lambda: f"ALTER {word}{column} SET DEFAULT 5", 1),
            (lambda: f"ALTER {word}{column} DROP DEFAULT", 1),
            (lambda: f"RENAME INDEX {column} TO {self._new_name()}", 1),
            (lambda: f"ALTER COLUMN {column} SET INVISIBLE", 0 if self.mariadb else 1),
        )
        [clause] = self.chance.choices(
            [method for method, _ in clauses], weights=[weight for _, weight in clauses]
        )
        return clause()

    def _conversion(self) -> str:
        charset = self.chance.choice([charset for charset in vocabulary.CHARSETS if charset != "binary"])
        return self.chance.choice(
            (
                f"CHARACTER SET {charset}",
                f"CHARACTER SET {charset} COLLATE {charset}_bin",
                f"CHARSET '{charset}'",
                "CHARACTER SET DEFAULT" if self.chance.random() < 0.2 else "CHARACTER SET latin1",
                "CHARACTER SET binary" if self.chance.random() < 0.1 else "CHARACTER SET utf8mb4",
            )
        )

    def _place(self, facts: TableFacts) -> str:
        if self.chance.random() < 0.6:
            return ""
        after = self._name(self.chance.choice(facts.columns).name)
        return self.chance.choice((" FIRST", f" AFTER {after}"))

    def _index(self) -> str:
        facts = self._some_table()
        column = self._quoted(self.chance.choice(facts.columns).name)
        name = self._name(self.chance.choice(vocabulary.KEYWORD_NAMES))
        return self.chance.choice(
            (
                f"CREATE INDEX {name} ON {self._table(facts)} ({column})",
                f"CREATE UNIQUE INDEX {name} USING BTREE ON {self._table(facts)} ({column}(3)) COMMENT 'x'",
                f"CREATE FULLTEXT INDEX {name} ON {self._table(facts)} ({column})",
                f"DROP INDEX {name} ON {self._table(facts)}",
                f"DROP INDEX `PRIMARY` ON {self._table(facts)}",
            )
        )

    # --- Statements that define no table -----------------------------------------------------------

    def _other(self) -> str:
        table = self._table(self._some_table()) if self.tables else "t"
        database = self.chance.choice(self.databases)
        own = (
            "CREATE OR REPLACE SEQUENCE `sequence s`", "ALTER SEQUENCE IF EXISTS `sequence s` INCREMENT BY 2",
            "CREATE OR REPLACE PROCEDURE pr() BEGIN DROP TABLE t; END",
            "DROP SEQUENCE IF EXISTS `sequence s`",
            f"CREATE OR REPLACE TRIGGER tr BEFORE INSERT ON {table} FOR EACH ROW SET @x = 1",
            "CREATE OR REPLACE FUNCTION fu() RETURNS INT RETURN 1",
            "CREATE OR REPLACE ROLE ddl_machine_role",
        ) if self.mariadb else (
            "CREATE FUNCTION IF NOT EXISTS fu() RETURNS INT DETERMINISTIC RETURN 1",
            "CREATE ROLE IF NOT EXISTS ddl_machine_role",
            "CREATE PROCEDURE IF NOT EXISTS pr() BEGIN ALTER TABLE t DROP a; END",
            "DROP FUNCTION IF EXISTS fu",
            f"CREATE TRIGGER IF NOT EXISTS tr BEFORE INSERT ON {table} FOR EACH ROW SET @x = 1",
            "CREATE SPATIAL REFERENCE SYSTEM IF NOT EXISTS 900001 NAME 'x' DEFINITION 'GEOGCS[\"x\"]'",
        )  # fmt: skip
        shared = (
            f"CREATE OR REPLACE VIEW vi AS SELECT * FROM {table}", "DROP VIEW IF EXISTS vi",
            "CREATE OR REPLACE ALGORITHM=MERGE SQL SECURITY INVOKER VIEW `vi` AS SELECT 1 AS `create table`",
            "DROP PROCEDURE IF EXISTS pr", "DROP TRIGGER IF EXISTS tr", f"TRUNCATE TABLE {table}",
            f"TRUNCATE {table}", f"ANALYZE TABLE {table}", f"OPTIMIZE TABLE {table}",
            f"REPAIR TABLE {table}", "FLUSH TABLES",
            f"ALTER DATABASE {self._quoted(database)} {vocabulary.charset_clause(self.chance)}",
            f"ALTER SCHEMA {self._quoted(database)} DEFAULT COLLATE = latin1_bin",
            "CREATE EVENT IF NOT EXISTS ev ON SCHEDULE AT '2037-01-01' DO DELETE FROM t",
            "DROP EVENT IF EXISTS ev",
            f"CREATE DATABASE IF NOT EXISTS {self._quoted(database)} CHARACTER SET latin1",
            "CREATE USER IF NOT EXISTS ddl_machine_user", "GRANT SELECT ON *.* TO ddl_machine_user",
            "REVOKE SELECT ON *.* FROM ddl_machine_user", "DROP ROLE IF EXISTS ddl_machine_role",
        )  # fmt: skip
        return self.chance.choice((*own, *shared, *shared))
