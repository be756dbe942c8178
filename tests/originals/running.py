# SPDX-License-Identifier: Apache-2.0
"""Run the statements on one server while Debezium, Canal and a daemon of Penstock follow it."""

import base64
import hashlib
import http.client
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock.changes import SYSTEM_COLUMNS, Changes
from penstock.model import Position
from penstock.sinks.messages import Format, key_of, messages_of
from tests.support.canal.client import CanalClient
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.pipeline.logged_changes import targets_in
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.maven import cached, copy_dependencies, program, run
from tools.servers import Server

HERE = Path(__file__).parent
# The databases that each system follows. Statements that would stop a system are in databases that this
# system does not follow.
OF_DEBEZIUM = ("shop", "vectors")
OF_CANAL = ("shop", "beyond")
# A table in a separate database shows how far the other systems have read.
MARKS = "marks"
# These statements change or drop tables that a system may still have to read.
_DEFINES = ("alter", "drop", "rename", "truncate")
_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Duser.timezone=UTC")


@dataclass(frozen=True)
class Written:
    """The output of each system for the statements, in order.

    `debezium` contains the key and value of each event. `entries` are Canal's, as bytes. Fields that begin
    with `our_` contain Penstock's output. `our_keyed` contains the messages that a sink writes (table, key
    and value), for tables that have the same columns at the end.
    """

    debezium: list[tuple[Any, Any]]
    our_debezium: list[Any]
    our_keyed: list[tuple[str, Any, Any]]
    entries: list[bytes]
    our_entries: list[bytes]
    flat: list[Any]
    our_flat: list[Any]


def statements(file: str) -> list[str]:
    """Return the statements of a file in the form in which they are sent."""
    complete: list[str] = []
    lines: list[str] = []
    for line in (HERE / file).read_text().splitlines():
        if not lines and (not line.strip() or line.startswith("--")):
            continue
        lines.append(line)
        if line.endswith(";"):
            complete.append("\n".join(lines).removesuffix(";"))
            lines = []
    assert not lines, f"a statement without an end: {lines[0]}"
    return complete


class Original:
    """A Java program that runs an original system and writes each event to a file of `folder`."""

    def __init__(self, name: str, main: str, folder: Path, file: str, *words: str) -> None:
        self.name, self.folder, self._file = name, folder, file
        built = _built(name, main)
        folder.mkdir()
        self._said = (folder / "said").open("wb")
        self._process = subprocess.Popen(
            [program("java"), *_OPTIONS, "-cp", f"{built}/*{os.pathsep}{built}", main, *words],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._said.close()

    def wait_for(self, text: str) -> None:
        """Wait until the events contain a text. Fails if the program has ended or stopped."""
        wait_until(lambda: self._has(text.encode()))

    def _has(self, text: bytes) -> bool:
        said = (self.folder / "said").read_text()
        assert self._process.poll() is None, f"{self.name} has ended:\n{said[-4000:]}"
        # Canal retries forever.
        assert "an error, retrying" not in said, f"{self.name} has stopped:\n{said[-4000:]}"
        path = self.folder / self._file
        if not path.exists():
            return False
        with path.open("rb") as content:
            # Search only the most recent events, which contain the mark.
            content.seek(max(0, path.stat().st_size - (1 << 17)))
            return text in content.read()

    def lines(self, file: str) -> list[str]:
        """Return the lines of a file that the program wrote."""
        return (self.folder / file).read_text().split("\n")[:-1]


def _built(name: str, main: str) -> Path:
    """Return the folder of a program, which is built if it is missing. Raises PartMissing."""
    project = HERE / name
    content = b"\0".join(path.read_bytes() for path in sorted(project.iterdir()))

    def build(folder: Path) -> None:
        shutil.copytree(project, folder / name)
        copy_dependencies(folder / name, folder / "built")
        compiler = program("javac")
        words = [compiler, "-cp", f"{folder / 'built'}/*", "-d", str(folder / "built"), f"{main}.java"]
        run(words, folder / name)
        for path in (folder / name).glob("*.xml"):
            shutil.copy(path, folder / "built")

    return cached(f"original-{name}-{hashlib.sha256(content).hexdigest()[:12]}", build)


def write_all(server: Server, folder: Path) -> Written:
    """Run the statements, and return the output of each system. Raises PartMissing."""
    server.sql("CREATE USER original@'%' IDENTIFIED BY 'original'; GRANT ALL ON *.* TO original@'%'")
    start = _new_file(server)
    server.sql(f"CREATE DATABASE {MARKS}; CREATE TABLE {MARKS}.marks (mark varchar(40) PRIMARY KEY)")
    pattern = ",".join(rf"{name}\..*" for name in (*OF_CANAL, MARKS))
    with ExitStack() as stack:

        def original(name: str, main: str, file: str, tables: str, begin: Position) -> Original:
            words = (str(server.port), begin.file, ".", tables)
            started = Original(name, main, folder / f"{name}-{begin.file}", file, *words)
            stack.callback(started.close)
            return started

        def canal_from(begin: Position) -> Original:
            return original("canal", "CanalEvents", "flat", pattern, begin)

        databases = ",".join((*OF_DEBEZIUM, MARKS))
        debezium = original("debezium", "DebeziumEvents", "events", databases, start)
        canals = [canal_from(start)]
        daemon = stack.enter_context(_daemon(server, folder, str(start)))
        _run_statements(server, "statements.sql", debezium, canals[0])
        canals[0].close()
        _run_statements(server, "without_canal.sql", debezium)
        debezium.close()
        canals.append(canal_from(_new_file(server)))
        _run_statements(server, "without_debezium.sql", canals[1])
        head = head_of(server)
        daemon.wait_for_head(head.file, head.offset)
        lines = debezium.lines("events")
        return Written(
            debezium=[
                (json.loads(key), json.loads(value))
                for key, value in zip(lines[1::3], lines[2::3], strict=True)
            ],
            our_keyed=list(_keyed(server, start)),
            our_debezium=_changes(daemon, "debezium_schema", OF_DEBEZIUM),
            entries=[base64.b64decode(line) for canal in canals for line in canal.lines("entries")],
            our_entries=_entries(daemon, pattern),
            flat=[json.loads(line) for canal in canals for line in canal.lines("flat")],
            our_flat=_changes(daemon, "canal_flat", OF_CANAL),
        )


def _new_file(server: Server) -> Position:
    server.sql("FLUSH BINARY LOGS")
    return head_of(server)


@contextmanager
def _daemon(server: Server, folder: Path, start: str) -> Iterator[DaemonProcess]:
    settings = {
        "listen": {"canal": "127.0.0.1:0", "canal_accept_plain": True},
        "instances": {"shop": {"source": server.url(), "start": start}},
    }
    (folder / "penstock").mkdir()
    with DaemonProcess(folder / "penstock", settings) as daemon:
        yield daemon


def _run_statements(server: Server, file: str, *originals: Original) -> None:
    """Run each statement. The original systems query the server for definitions. So a statement that changes
    a definition runs only after they have read everything before it.
    """
    marks = 0

    def wait_for_originals() -> None:
        nonlocal marks
        marks += 1
        server.sql(f"INSERT INTO {MARKS}.marks VALUES ('{file} {marks}.')")
        for original in originals:
            original.wait_for(f"{file} {marks}.")

    wait_for_originals()
    with server.connect() as connection, connection.cursor() as cursor:
        for statement in statements(file):
            if any(word in statement.lower().split()[:4] for word in _DEFINES):
                wait_for_originals()
            cursor.execute(statement)
    wait_for_originals()


def _changes(daemon: DaemonProcess, form: str, databases: Sequence[str]) -> list[Any]:
    """Return the response of a daemon's HTTP API for some databases in a dialect."""
    tables = [f"{database}.*" for database in databases]
    asked = {
        "start": "earliest",
        "tables": tables,
        "wait_seconds": 0,
        "format": form,
        "credit_bytes": 1 << 30,
    }
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=WAIT_SECONDS_MAX)
    connection.request("POST", "/v1/instances/shop/changes", json.dumps(asked), {})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    lines = b""
    while length := answer.read(4):
        head = json.loads(answer.read(struct.unpack(">I", length)[0]))
        content = answer.read(head["bytes"])
        assert head["kind"] != "problem", content
        lines += content if head["kind"] == "batch" else b""
    connection.close()
    return [json.loads(line) for line in lines.splitlines()]


def _keyed(server: Server, start: Position) -> Iterator[tuple[str, Any, Any]]:
    targets = targets_in(server, "shop")
    for batch in penstock.read_binlog(server.url(), tables="shop.*", start=str(start), instance="shop"):
        target, rows = targets.get(batch.table.replace("`", "")), batch.to_arrow()
        columns = [name for name in rows.schema.names if name not in SYSTEM_COLUMNS]
        if target is None or columns != list(target.column_names):
            continue
        form: Format = "debezium_schema"
        messages = messages_of(Changes(target, rows, target.name), form, key_of(target, form))
        for key, value in zip(messages.key.to_pylist(), messages.value.to_pylist(), strict=True):
            yield str(target.name), json.loads(key or "null"), json.loads(value)


def _entries(daemon: DaemonProcess, pattern: str) -> list[bytes]:
    """Return the entries that a daemon sends on its Canal port."""
    received: list[bytes] = []
    with CanalClient(daemon.ports["canal"]) as client:
        client.log_in().subscribe(pattern)
        while True:
            batch, entries = client.get()
            if batch == -1:
                return received
            received += entries
            client.ack(batch)
