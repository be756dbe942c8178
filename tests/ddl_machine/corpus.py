# SPDX-License-Identifier: Apache-2.0
"""Record how servers log a given list of statements: `python -m tests.ddl_machine.corpus`, for a new server.

The logged text differs from the text that the client sent: views and routines include their definer, DROP has
a comment, and CREATE TABLE ... SELECT is logged as a table definition.
"""

import json
from pathlib import Path

import pymysql

from penstock._native import Decoder
from penstock.schema.statements.effects import Effect, RenameTable, SetDatabaseCharset, Unread
from penstock.schema.statements.statement import effects_of
from penstock.schema.statements.tokens import ServerSpelling
from tests.support.binlog.events import MAGIC
from tools.servers import FLAVORS, Server

FILE = Path(__file__).with_name("logged_statements.json")
_STATEMENTS = Path(__file__).parent.parent / "integration" / "ddl_statements.sql"
OTHERS = """
CREATE TABLE s (id INT PRIMARY KEY, a INT)
CREATE VIEW v AS SELECT * FROM s
CREATE OR REPLACE SQL SECURITY INVOKER VIEW v AS SELECT id FROM s
ALTER ALGORITHM=MERGE VIEW v AS SELECT a FROM s
CREATE PROCEDURE p() BEGIN DROP TABLE s; ALTER TABLE s ADD b INT; END
ALTER PROCEDURE p COMMENT 'x'
CREATE FUNCTION f() RETURNS INT DETERMINISTIC RETURN 1
CREATE TRIGGER r BEFORE INSERT ON s FOR EACH ROW SET @x = 1
CREATE EVENT e ON SCHEDULE AT '2037-01-01' DO DELETE FROM s
CREATE TABLE c AS SELECT * FROM s
CREATE TABLE `d e` LIKE s
CREATE TEMPORARY TABLE h (a INT)
DROP TABLE h
SET STATEMENT lock_wait_timeout=5 FOR ALTER TABLE s ADD b INT
/*!50100 ALTER TABLE s ADD k INT */
/*M!100100 ALTER TABLE s ADD l INT */
ALTER TABLE s /* inside */ ADD m INT -- behind
ALTER TABLE s PARTITION BY KEY (id) PARTITIONS 2
ALTER TABLE s TRUNCATE PARTITION ALL
ALTER TABLE s REMOVE PARTITIONING
TRUNCATE s
ANALYZE TABLE s
OPTIMIZE TABLE s
CREATE SEQUENCE q
ALTER SEQUENCE q INCREMENT BY 2
CREATE USER corpus_user IDENTIFIED BY 'x'
GRANT SELECT ON *.* TO corpus_user
ALTER USER corpus_user ACCOUNT LOCK
DROP USER corpus_user
CREATE ROLE corpus_role
DROP ROLE corpus_role
DROP EVENT e
DROP TRIGGER r
DROP FUNCTION f
DROP PROCEDURE p
DROP VIEW IF EXISTS v, w
DROP TABLE IF EXISTS c, `d e`, missing
DROP SEQUENCE q
DROP DATABASE OTHER
"""


def logged_statements(server: Server) -> list[tuple[str, str]]:
    """Run the list on a server and return each logged statement with its session's database."""
    server.sql("CREATE DATABASE corpus; CREATE DATABASE corpus_other; FLUSH BINARY LOGS")
    sent = _STATEMENTS.read_text().split(";\n") + OTHERS.strip().split("\n")
    with server.connect(database="corpus") as session, session.cursor() as cursor:
        for statement in sent:
            try:
                cursor.execute(statement.strip().replace("OTHER", "corpus_other"))
            except pymysql.err.MySQLError:
                # MySQL and MariaDB accept different statements; a refused statement is not logged.
                continue
    path = server.binlog_files()[-1]
    server.sql("FLUSH BINARY LOGS; DROP DATABASE corpus")
    data = path.read_bytes()
    decoder = Decoder(instance="corpus", file=path.name)
    statements, start = [], 0
    while start < len(data):
        start += decoder.feed(memoryview(data)[start:])
        if decoder.state == "statement":
            statement = decoder.take_statement()
            statements.append((statement.database, statement.text))
        elif decoder.state == "table":
            decoder.answer_table(None)
        elif decoder.state == "input":
            break
    assert start > len(MAGIC)
    return statements


def spelling_of(server: str) -> ServerSpelling:
    """Return the `ServerSpelling` of a server by its name in the corpus, such as `mysql 9.7.4-2`."""
    version = server.split()[1].split("-")[0]
    return ServerSpelling(server.startswith("mariadb"), tuple(map(int, version.split("."))))


def summary(effect: Effect) -> str:
    """Return an effect's type and the names that it touches."""
    match effect:
        case Unread(tables=tables):
            names = sorted(map(str, tables)) if tables is not None else ["*"]
        case RenameTable(name=name, to=to):
            names = [str(name), str(to)]
        case SetDatabaseCharset(database=database, charset=charset):
            names = [database, str(charset)]
        case _:
            names = [str(getattr(effect, "name", ""))]
    return " ".join((type(effect).__name__, *names))


def main() -> None:
    """Write the statements of every flavor with their effects, and the server's version. Review the
    output.
    """
    parts = []
    for flavor in FLAVORS:
        with Server(flavor) as server:
            name = f"{flavor} {server.version}"
            lines = []
            for database, text in logged_statements(server):
                effects = [summary(effect) for effect in effects_of(text, database, spelling_of(name))]
                lines.append(json.dumps([database, text, effects], ensure_ascii=False))
            parts.append(f"{json.dumps(name)}: [\n" + ",\n".join(lines) + "\n]")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
