# SPDX-License-Identifier: Apache-2.0
"""A table definition in doubt is determined once: from the server that logged the statement, and for the
statement's position.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socketpair
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.capture import settling
from penstock.capture.kept_schemas import settled_schemas
from penstock.capture.settling import DefinitionSettler, Question
from penstock.errors import ConnectionLost, LogFull, PositionInvalid
from penstock.logstore import schemas
from penstock.logstore.disk import LocalDisk
from penstock.logstore.schemas import SchemaLog, definition_line
from penstock.model import Column, Position, ServerAddress, TableName, TableSchema
from penstock.mysql.connection import Connection, LogHead, ServerIdentity
from penstock.schema import rewind
from penstock.schema.history import SchemaHistory
from penstock.schema.rewind import LoggedStatement
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.statement import effects_of
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition
from tests.support.suite.patience import wait_until

ORDERS = TableName("shop", "orders")
DOUBTED = "ALTER TABLE orders FROBNICATE"
SECONDS = 10.0
DEFAULTS = ServerDefaults(ServerSpelling(), "utf8mb4", {"shop": "utf8mb4"}, False)
IDENTITY = ServerIdentity("mysql", (9, 7, 0), "9.7.0", 1, "uuid", None, "ON")


def at(offset: int, epoch: int = 0) -> Position:
    return Position(epoch, "mysql-bin.000001", offset)


def orders(*columns: str, key: tuple[str, ...] = ()) -> TableDefinition:
    return TableDefinition(
        TableSchema(
            "shop", "orders", tuple(Column(name, "int", None, name not in key) for name in columns), key
        ),
        "utf8mb4",
    )


class ToldServer:
    """A simulated server that reports one table and the end of its log, and counts how often the table is
    read.
    """

    def __init__(self) -> None:
        self.now = orders("id", "a")
        self.head_offset = 900
        self.readings = 0
        self.address = ServerAddress("localhost")
        # This function is called with each table name that is read, and at each query for prepared commits.
        self.on_read: Callable[[TableName], object] = lambda name: None
        self.owned: Callable[[], str] = lambda: ""

    def __enter__(self) -> "ToldServer":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the block; there is no connection to close."""

    def identity(self) -> ServerIdentity:
        return IDENTITY

    def head(self) -> LogHead:
        return LogHead("mysql-bin.000001", self.head_offset)

    def query(self, sql: str) -> list[dict[str, Any]]:
        assert "gtid_owned" in sql
        return [{"owned": self.owned()}]

    def interrupt(self) -> None:
        """Interrupt the session; no query is waiting."""

    def read_table(self, name: TableName) -> TableDefinition:
        self.readings += 1
        self.on_read(name)
        return self.now


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ToldServer:
    server = ToldServer()
    monkeypatch.setattr(settling, "connect", lambda address, seconds: server)
    monkeypatch.setattr(settling, "read_table", lambda connection, name: server.read_table(name))
    monkeypatch.setattr(settling, "read_tables", lambda connection: [server.read_table(ORDERS)])
    return server


def kept_from(folder: Path, position: Position, *definitions: TableDefinition) -> SchemaLog[SchemaHistory]:
    kept = SchemaLog(folder, SchemaHistory.from_json)
    seed_at(kept, position, *definitions)
    return kept


def seed_at(kept: SchemaLog[SchemaHistory], position: Position, *definitions: TableDefinition) -> None:
    history = SchemaHistory(DEFAULTS)
    history.seed(definitions, position)
    kept.seed(history, position)


@pytest.fixture
def settler_of(server: ToldServer) -> Iterator[Callable[..., DefinitionSettler]]:
    """Return a factory of settlers for a log received up to 950, and close them at the end."""
    settlers = []

    def make(kept: SchemaLog[SchemaHistory], epoch: int = 0) -> DefinitionSettler:
        settlers.append(
            DefinitionSettler(kept, server.address, IDENTITY.key, ServerSpelling(), at(950, epoch))
        )
        return settlers[-1]

    yield make
    for settler in settlers:
        settler.close()


def columns_at(kept: SchemaLog[SchemaHistory], position: Position | None) -> list[str]:
    schema = kept.at(position).schema("shop", "orders")
    return [] if schema is None else [column.name for column in schema.columns]


def asked(settler: DefinitionSettler, *questions: Question) -> None:
    """Ask a settler a question, start it, and wait for all answers."""
    for question in questions:
        settler._add(question)
    settler.start()
    for question in questions:
        assert question.name is not None
        settler.wait(question.name, question.since, SECONDS)


# --- Epochs -----------------------------------------------------------------------------------


@pytest.fixture
def failed_over(tmp_path: Path, server: ToldServer) -> SchemaLog[SchemaHistory]:
    """A table in doubt at a failover, whose columns changed on the next server."""
    kept = kept_from(tmp_path, at(4), orders("id", "a"))
    kept.apply(DOUBTED, "shop", at(100))
    seed_at(kept, at(200, epoch=1), orders("id", "a"))
    kept.apply(DOUBTED, "shop", at(300, epoch=1))
    kept.apply("ALTER TABLE orders RENAME COLUMN a TO x", "shop", at(400, epoch=1))
    server.now = orders("id", "x")
    return kept


def test_doubt_of_an_earlier_server_is_refused_and_never_settled_by_the_next(
    failed_over: SchemaLog[SchemaHistory], settler_of: Callable[..., DefinitionSettler]
) -> None:
    asked(settler_of(failed_over, epoch=1), Question(ORDERS, at(100)), Question(ORDERS, at(300, epoch=1)))
    doubt = failed_over.at(at(150)).doubt(ORDERS)
    assert doubt is not None
    assert doubt.refusal is not None
    assert columns_at(failed_over, at(150)) == ["id", "a"]
    assert columns_at(failed_over, at(350, epoch=1)) == ["id", "a"]
    assert columns_at(failed_over, at(400, epoch=1)) == ["id", "x"]
    assert not failed_over.at().doubts()


def test_question_for_a_future_epoch_blocks_no_other(
    failed_over: SchemaLog[SchemaHistory], settler_of: Callable[..., DefinitionSettler]
) -> None:
    settler = settler_of(failed_over, epoch=1)
    asked(settler, Question(ORDERS, at(100, epoch=5)), Question(ORDERS, at(300, epoch=1)))
    assert not failed_over.at().doubts()


# --- Questions of readers ---------------------------------------------------------------------


class ReceivedLog:
    """A received log with a fixed end. It also replaces the settler, and collects the positions that the
    settler is asked about.
    """

    def __init__(self, visible: Position) -> None:
        self.visible = visible
        self.settler = self
        self.asked: list[Position] = []

    def wait(self, name: TableName, since: Position, seconds: float, *, again: bool = False) -> None:
        self.asked.append(since)


@pytest.mark.parametrize(
    "position", [at(951, epoch=1), Position(1, "mysql-bin.999999", 4), at(4, epoch=5), at(100)], ids=str
)
def test_definition_is_read_again_only_if_the_log_belongs_to_the_server(
    tmp_path: Path, position: Position
) -> None:
    kept, log = kept_from(tmp_path, at(4), orders("id")), ReceivedLog(at(950, epoch=1))
    received: Any = log
    settled_schemas(received, kept, position, ORDERS, again=True)
    assert log.asked == []
    settled_schemas(received, kept, at(950, epoch=1), ORDERS, again=True)
    assert log.asked == [at(950, epoch=1)]


def test_definition_is_never_kept_past_the_received_position(tmp_path: Path) -> None:
    kept = kept_from(tmp_path, at(4), orders("id"))
    with pytest.raises(PositionInvalid, match="received up to"):
        kept.settle(at(600), [definition_line(orders("id", "z").to_json())], received=at(599))
    assert kept.apply("ALTER TABLE orders ADD a INT", "shop", at(500)) == {ORDERS}
    assert columns_at(kept, None) == ["id", "a"]


def test_definition_that_decodes_alike_is_kept_unchanged(
    tmp_path: Path, server: ToldServer, settler_of: Callable[..., DefinitionSettler]
) -> None:
    kept = kept_from(tmp_path, at(4), orders("id", "a", key=("id",)))
    kept.apply("ALTER TABLE orders DROP PRIMARY KEY, ADD PRIMARY KEY (id, a)", "shop", at(300))
    server.now = orders("id", "a", key=("id", "a"))
    settler = settler_of(kept)
    settler.start()
    for offset in (100, 400, 401):
        settler.wait(ORDERS, at(offset), SECONDS, again=True)
    schema = kept.at(at(200)).schema("shop", "orders")
    assert schema is not None
    assert schema.primary_key == ("id",)
    assert sum(file.read_bytes().count(b'{"definition"') for file in kept.folder.iterdir()) == 0


def test_definition_that_decodes_differently_is_replaced(
    tmp_path: Path, server: ToldServer, settler_of: Callable[..., DefinitionSettler]
) -> None:
    kept = kept_from(tmp_path, at(4), orders("id", "a"))
    server.now = orders("a", "id")
    settler = settler_of(kept)
    settler.start()
    settler.wait(ORDERS, at(300), SECONDS, again=True)
    assert (columns_at(kept, at(299)), columns_at(kept, at(300))) == (["id", "a"], ["a", "id"])


def test_cached_answers_are_bounded(
    tmp_path: Path, settler_of: Callable[..., DefinitionSettler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_QUESTIONS_MAX", 3)
    settler = settler_of(kept_from(tmp_path, at(4), orders("id", "a")))
    settler.start()
    for offset in range(10, 20):
        settler.wait(ORDERS, at(offset), SECONDS, again=True)
    assert list(settler._answered) == [Question(ORDERS, at(offset)) for offset in (17, 18, 19)]


# --- The time at which the server is read ------------------------------------------------------------------


def test_table_is_read_once_its_statement_is_committed(
    tmp_path: Path, server: ToldServer, settler_of: Callable[..., DefinitionSettler]
) -> None:
    kept = kept_from(tmp_path, at(4), orders("id", "a"))
    kept.apply(DOUBTED, "shop", at(500))
    answers = ["3E11FA47-71CA-11E1-9E33-C80AA9429562:5#7"] * 3

    def commit_after_the_last() -> str:
        if answers:
            return answers.pop()
        server.now = orders("a", "id")
        return ""

    server.owned = commit_after_the_last
    asked(settler_of(kept), Question(ORDERS, at(500)))
    assert columns_at(kept, at(500)) == ["a", "id"]
    assert not kept.at().doubts()


def test_table_is_read_once_the_log_has_its_statement(
    tmp_path: Path, server: ToldServer, settler_of: Callable[..., DefinitionSettler]
) -> None:
    kept = kept_from(tmp_path, at(4), orders("id", "a"))
    kept.apply(DOUBTED, "shop", at(960))
    server.head_offset = 960
    names: list[TableName] = []
    server.on_read = names.append
    settler, other = settler_of(kept), TableName("shop", "other")
    settler.start()
    settler.wait(other, at(900), 0.0, again=True)
    wait_until(lambda: other in names)
    assert names == [other]
    settler.received(at(960))
    settler.wait(ORDERS, at(960), SECONDS)
    assert names == [other, ORDERS]
    assert not kept.at().doubts()


class CountedCondition(threading.Condition):
    """Counts the calls that wake the waiting threads."""

    wakes = 0

    def notify_all(self) -> None:
        self.wakes += 1
        super().notify_all()


def test_received_transactions_wake_no_thread_that_has_no_question(
    tmp_path: Path, settler_of: Callable[..., DefinitionSettler]
) -> None:
    settler = settler_of(kept_from(tmp_path, at(100), orders("id")))
    settler.start()
    changed = settler._changed = CountedCondition()
    for offset in range(1000, 1100):
        settler.received(at(offset))
    idle_wakes = changed.wakes
    settler._add(Question(ORDERS, at(2000)))
    settler.received(at(2001))
    assert (idle_wakes, changed.wakes) == (0, 1)


def test_definition_given_while_its_question_is_answered_does_not_block_the_next(
    tmp_path: Path, server: ToldServer, settler_of: Callable[..., DefinitionSettler]
) -> None:
    settler = settler_of(kept_from(tmp_path, at(100), orders("id")))
    # The server is ahead of the log, so the thread waits for the log. An operator answers in the meantime.
    server.head_offset = 5000
    asked_once = Event()
    server.on_read = lambda name: asked_once.set()
    settler._add(Question(ORDERS, at(500)))
    settler.start()
    assert asked_once.wait(SECONDS)
    wait_until(lambda: settler._awaits_position)
    settler.give(ORDERS, at(500), orders("id", "a").to_json())
    settler.received(at(6000))
    wait_until(lambda: not settler._awaits_position)


def test_defect_while_definitions_are_read_is_reported_and_retried(
    tmp_path: Path, server: ToldServer, settler_of: Callable[..., DefinitionSettler]
) -> None:
    kept = kept_from(tmp_path, at(4), orders("id", "a"))
    kept.apply(DOUBTED, "shop", at(500))

    def fail(name: TableName) -> None:
        raise UnicodeDecodeError("utf8", b"secret", 0, 1, "no text")

    server.on_read = fail
    settler = settler_of(kept)
    settler.start()
    wait_until(lambda: "UnicodeDecodeError" in str(settler.listed()[0]["why"]))
    assert "secret" not in str(settler.listed())
    server.on_read = lambda name: None
    settler.wait(ORDERS, at(500), SECONDS)
    assert not kept.at().doubts()


def test_closed_settler_ends_its_session_and_the_next_waits_for_it(
    tmp_path: Path, server: ToldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_from(tmp_path, at(4), orders("id", "a"))
    kept.apply(DOUBTED, "shop", at(500))
    asked_server, ended, hangs = Event(), Event(), Event()

    def hang(name: TableName) -> None:
        asked_server.set()
        assert ended.wait(SECONDS)
        assert hangs.wait(SECONDS)
        raise ConnectionLost("the session was ended")

    server.on_read = hang
    monkeypatch.setattr(server, "interrupt", ended.set)
    first = DefinitionSettler(kept, server.address, IDENTITY.key, ServerSpelling(), at(950))
    first.start()
    assert asked_server.wait(SECONDS)
    first.close()
    assert ended.is_set()
    second = DefinitionSettler(
        kept, server.address, IDENTITY.key, ServerSpelling(), at(950), before=first.retire()
    )
    second.start()
    server.on_read = lambda name: None
    assert server.readings == 1
    hangs.set()
    second.wait(ORDERS, at(500), SECONDS)
    second.close()
    assert not kept.at().doubts()
    assert not first.retire().is_alive()


# --- Reports -----------------------------------------------------------------------------


def test_status_shows_only_the_first_words_of_a_statement(
    tmp_path: Path, server: ToldServer, settler_of: Callable[..., DefinitionSettler]
) -> None:
    kept = kept_from(tmp_path, at(4), orders("id", "a"))
    kept.apply(f"{DOUBTED} CONNECTION='mysql://u:secret@host/d'", "shop", at(100))
    kept.apply("ALTER TABLE orders COMMENT 'secret', DROP COLUMN a", "shop", at(200))
    settler = settler_of(kept)
    settler.note_doubts()
    assert settler.listed()[0]["reason"] == "ALTER TABLE orders"
    asked(settler, Question(ORDERS, at(100)))
    wait_until(lambda: settler.listed()[0]["state"] == "stopped")
    assert str(at(200)) in settler.listed()[0]["why"]
    assert "ALTER TABLE" in settler.listed()[0]["why"]
    assert "secret" not in str(settler.listed())


def test_statements_are_read_once_for_any_number_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def counted(text: str, *rest: Any) -> list[Any]:
        texts.append(text)
        return effects_of(text, *rest)

    monkeypatch.setattr(rewind, "effects_of", counted)
    statements = [LoggedStatement(at(100), "shop", "ALTER TABLE orders RENAME TO older")]
    for number in range(10):
        name = TableName("shop", f"t{number}")
        assert rewind.names_after(name, statements, ServerSpelling()) == {name}
        assert not rewind.touches(statements[0], {name}, ServerSpelling())
    assert len(texts) == 1


# --- Crashes, gaps and full disks ---------------------------------------------------------------


def two_generations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SchemaLog[SchemaHistory]:
    """Keep a table in doubt from 100 on, also in the snapshot of 200."""
    kept = kept_from(folder, at(4), orders("id", "a"))
    with monkeypatch.context() as shorter:
        kept.apply(DOUBTED, "shop", at(100))
        shorter.setattr(schemas, "LINES_BYTES_MAX", 1)
        kept.apply(f"CREATE TABLE other (b INT COMMENT '{'y' * 2000}')", "shop", at(200))
    assert len(list(kept.folder.iterdir())) == 2
    return kept


class FullDisk(LocalDisk):
    """A disk on which some atomic file replacements fail for lack of space. `full` contains the numbers of
    these replacements.
    """

    def __init__(self, *full: int) -> None:
        super().__init__()
        self.full = full
        self.written = 0

    def write_atomic(self, path: Path, content: bytes) -> None:
        self.written += 1
        if self.written in self.full:
            raise LogFull("no room")
        super().write_atomic(path, content)


@pytest.mark.parametrize("full", [1, 2])
def test_definition_that_cannot_be_written_is_not_in_memory_either(
    full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_generations(tmp_path, monkeypatch).close()
    kept = SchemaLog(tmp_path, SchemaHistory.from_json, FullDisk(full))
    with pytest.raises(LogFull):
        kept.settle(at(100), [definition_line(orders("id", "z").to_json())])
    reader = SchemaLog(tmp_path, SchemaHistory.from_json)
    for position in (None, at(200), at(100)):
        assert kept.in_force(position) == reader.in_force(position)
    assert kept.at().needs_reread(ORDERS)


def test_definition_half_written_at_a_crash_is_rewritten_whole(
    tmp_path: Path, settler_of: Callable[..., DefinitionSettler], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_generations(tmp_path, monkeypatch).close()
    with pytest.raises(LogFull):
        SchemaLog(tmp_path, SchemaHistory.from_json, FullDisk(2)).settle(
            at(100), [definition_line(orders("id", "z").to_json())]
        )
    kept = SchemaLog(tmp_path, SchemaHistory.from_json)
    assert [kept.at(position).needs_reread(ORDERS) for position in (at(100), None)] == [False, True]
    asked(settler_of(kept), Question(ORDERS, at(100)))
    assert columns_at(SchemaLog(tmp_path, SchemaHistory.from_json), None) == ["id", "z"]
    assert not kept.at().doubts()


def test_doubt_before_an_overlong_statement_is_settled_after_it(
    tmp_path: Path,
    server: ToldServer,
    settler_of: Callable[..., DefinitionSettler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = kept_from(tmp_path, at(4), orders("id", "a"))
    kept.apply(DOUBTED, "shop", at(100))
    settler = settler_of(kept)
    settler.note_doubts()
    monkeypatch.setattr(schemas, "STATEMENT_BYTES_MAX", 10)
    kept.apply("CREATE TABLE other (b INT)", "shop", at(200))
    asked(settler, Question(ORDERS, at(100)), Question(ORDERS, at(200)))
    before = kept.at(at(150)).doubt(ORDERS)
    assert before is not None
    assert before.refusal is not None
    assert not kept.at().doubts()
    assert server.readings == 1


def test_survey_with_unknown_statements_settles_nothing_before_them(
    tmp_path: Path,
    server: ToldServer,
    settler_of: Callable[..., DefinitionSettler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = SchemaLog(tmp_path, SchemaHistory.from_json)
    kept.seed(SchemaHistory.awaiting_survey(DEFAULTS, at(4)), at(4))
    settler = settler_of(kept)
    settler.note_doubts()
    kept.apply("ALTER TABLE orders RENAME COLUMN a TO x", "shop", at(100))
    monkeypatch.setattr(schemas, "STATEMENT_BYTES_MAX", 10)
    kept.apply("CREATE TABLE other (b INT)", "shop", at(200))
    server.now = orders("id", "x")
    asked(settler, Question(ORDERS, at(4)))
    assert columns_at(kept, at(50)) == []
    doubt = kept.at(at(50)).doubt(ORDERS)
    assert doubt is not None
    assert doubt.refusal is not None
    wait_until(lambda: kept.at().unsurveyed is None)
    assert columns_at(kept, at(200)) == ["id", "x"]
    assert server.readings == 1


def test_doubt_older_than_the_kept_log_applies_from_its_start(
    tmp_path: Path, settler_of: Callable[..., DefinitionSettler], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = two_generations(tmp_path, monkeypatch)
    kept.trim(at(300))
    settler, since = settler_of(kept), since_of_doubt(kept)
    settler.start()
    settler.wait(ORDERS, since, SECONDS)
    assert columns_at(kept, at(200)) == ["id", "a"]
    assert not kept.at().doubts()


def test_doubt_stored_without_a_position_by_an_earlier_version_is_settled(
    tmp_path: Path, settler_of: Callable[..., DefinitionSettler]
) -> None:
    value = SchemaHistory(DEFAULTS).to_json()
    value["tables"] = [{"name": str(ORDERS), "in_doubt": True, "definitions": []}]
    kept = SchemaLog(tmp_path, SchemaHistory.from_json)
    kept.seed(SchemaHistory.from_json(value), at(200))
    settler, since = settler_of(kept), since_of_doubt(kept)
    settler.start()
    settler.wait(ORDERS, since, SECONDS)
    assert columns_at(kept, at(200)) == ["id", "a"]
    assert not kept.at().doubts()


def since_of_doubt(kept: SchemaLog[SchemaHistory]) -> Position:
    doubt = kept.at().doubt(ORDERS)
    assert doubt is not None
    assert doubt.since is not None
    return doubt.since


def test_interrupted_session_ends_on_the_server() -> None:
    own, far = socketpair()
    session: Any = SimpleNamespace(_sock=own)
    with own, far:
        Connection(ServerAddress(), session).interrupt()
        far.settimeout(SECONDS)
        assert far.recv(1) == b""
