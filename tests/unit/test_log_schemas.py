# SPDX-License-Identifier: Apache-2.0
"""Table definitions stored with a log can be looked up at any position, survive every crash, and stay bounded
in size.
"""

import itertools
from pathlib import Path

import pytest

from penstock.errors import SchemaInvalid, SchemaUnknown
from penstock.logstore import schemas
from penstock.logstore.schemas import SURVEYED, SchemaLog, definition_line, refusal_line
from penstock.model import Column, Position, StatementSession, TableName, TableSchema
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition
from tests.support.logstore.disk import Loss, PowerLost, SimulatedDisk
from tests.support.suite.nonempty import each

FOLDER = Path("/log")
ORDERS = TableName("shop", "orders")
CREATE = "CREATE TABLE orders (id INT PRIMARY KEY, note VARCHAR(20))"


def at(offset: int, file: int = 1, epoch: int = 0) -> Position:
    return Position(epoch, f"mysql-bin.{file:06d}", offset)


def empty() -> SchemaHistory:
    return SchemaHistory(ServerDefaults(ServerSpelling(), "utf8mb4", {"shop": "utf8mb4"}, False))


def opened(folder: Path) -> SchemaLog[SchemaHistory]:
    return SchemaLog(folder, SchemaHistory.from_json)


def columns(log: SchemaLog[SchemaHistory], position: Position | None, table: str = "orders") -> list[str]:
    schema = log.at(position).schema("shop", table)
    return [] if schema is None else [column.name for column in schema.columns]


@pytest.fixture
def moved(tmp_path: Path) -> SchemaLog[SchemaHistory]:
    """A log whose table was created at 100, widened at 200 and 300, and dropped at 400."""
    log = opened(tmp_path)
    log.seed(empty(), at(4))
    log.apply(CREATE, "shop", at(100))
    log.apply("ALTER TABLE orders ADD total DECIMAL(10,2)", "shop", at(200))
    log.apply("ALTER TABLE shop.orders RENAME COLUMN note TO remark", "", at(300))
    log.apply("DROP TABLE orders", "shop", at(400))
    return log


PLACES = {
    4: [],
    99: [],
    100: ["id", "note"],
    199: ["id", "note"],
    200: ["id", "note", "total"],
    300: ["id", "remark", "total"],
    399: ["id", "remark", "total"],
    400: [],
}


@pytest.mark.parametrize("again", [False, True], ids=["same object", "opened anew"])
def test_each_position_has_the_definition_in_force_there(
    moved: SchemaLog[SchemaHistory], tmp_path: Path, again: bool
) -> None:
    log = opened(tmp_path) if again else moved
    assert {offset: columns(log, at(offset)) for offset in PLACES} == PLACES
    assert columns(log, None) == []
    assert log.position == at(400)


def test_repeated_statement_changes_nothing(moved: SchemaLog[SchemaHistory], tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (tmp_path / "schemas").iterdir()}
    log = opened(tmp_path)
    assert log.apply("ALTER TABLE orders ADD total DECIMAL(10,2)", "shop", at(200)) == set()
    assert log.apply("DROP TABLE orders", "shop", at(400)) == set()
    assert {path: path.read_bytes() for path in (tmp_path / "schemas").iterdir()} == before


def test_statement_without_definitions_is_not_kept(moved: SchemaLog[SchemaHistory], tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in (tmp_path / "schemas").iterdir())
    moved.apply("INSERT INTO orders VALUES (1)", "shop", at(500))
    moved.apply("ANALYZE TABLE orders", "shop", at(510))
    assert sum(path.stat().st_size for path in (tmp_path / "schemas").iterdir()) == size


def test_file_torn_anywhere_keeps_all_earlier_lines_and_continues(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.seed(empty(), at(4))
    log.apply(CREATE, "shop", at(100))
    (path,) = (tmp_path / "schemas").iterdir()
    whole = path.stat().st_size
    log.apply("ALTER TABLE orders ADD total INT", "shop", at(200))
    log.close()
    content = path.read_bytes()
    for size in each(range(whole, len(content))):
        path.write_bytes(content[:size])
        torn = opened(tmp_path)
        assert columns(torn, None) == ["id", "note"]
        assert torn.position == at(100)
        torn.apply("ALTER TABLE orders ADD total INT", "shop", at(200))
        torn.close()
        assert path.read_bytes() == content


def test_damaged_line_and_all_later_lines_are_ignored(
    moved: SchemaLog[SchemaHistory], tmp_path: Path
) -> None:
    (path,) = (tmp_path / "schemas").iterdir()
    path.write_bytes(path.read_bytes().replace(b"remark", b"remork"))
    log = opened(tmp_path)
    assert columns(log, None) == ["id", "note", "total"]
    assert log.position == at(200)


def test_damaged_snapshot_is_refused_by_name(moved: SchemaLog[SchemaHistory], tmp_path: Path) -> None:
    (path,) = (tmp_path / "schemas").iterdir()
    path.write_bytes(b"0" + path.read_bytes())
    with pytest.raises(SchemaInvalid, match=r"\.schemas is damaged"):
        opened(tmp_path).at(at(100))


def test_empty_log_has_no_definitions(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert not log
    assert log.position is None
    with pytest.raises(SchemaUnknown):
        log.at(at(4))
    with pytest.raises(SchemaUnknown):
        log.apply(CREATE, "shop", at(100))


def test_lines_that_outgrow_their_snapshot_start_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "LINES_BYTES_MAX", 2000)
    log = opened(tmp_path)
    log.seed(empty(), at(4))
    log.apply(CREATE, "shop", at(100))
    for number in range(1, 101):
        log.apply(
            f"ALTER TABLE orders ADD c{number} INT", "shop", at(100 + 100 * number, file=1 + number // 30)
        )
    files = sorted((tmp_path / "schemas").iterdir())
    assert len(files) > 3
    # The size of a generation is limited by the size of its snapshot, so reading the definitions at a
    # position costs at most twice the size of the snapshot.
    assert max(path.stat().st_size for path in files) < 2 * (2000 + 100 * 60)
    for number in (1, 29, 30, 31, 77, 100):
        position = at(100 + 100 * number, file=1 + number // 30)
        assert columns(opened(tmp_path), position)[-1] == f"c{number}"
        assert len(columns(log, position)) == 2 + number


def test_generations_are_removed_with_the_part_of_the_log_that_needed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "LINES_BYTES_MAX", 500)
    log = opened(tmp_path)
    log.seed(empty(), at(4))
    log.apply(CREATE, "shop", at(100))
    for number in range(1, 41):
        log.apply(f"ALTER TABLE orders ADD c{number} INT", "shop", at(100 + 100 * number))
    before = len(list((tmp_path / "schemas").iterdir()))
    log.trim(at(2150))
    after = len(list((tmp_path / "schemas").iterdir()))
    assert 1 <= after < before
    assert len(columns(log, at(2150))) == 2 + 20
    assert len(columns(log, at(4100))) == 2 + 40
    log.trim(at(10_000))
    assert len(list((tmp_path / "schemas").iterdir())) == 1
    assert len(columns(log, None)) == 2 + 40


def test_overlong_statement_is_kept_as_its_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "STATEMENT_BYTES_MAX", 300)
    log = opened(tmp_path)
    log.seed(empty(), at(4))
    log.apply(f"CREATE TABLE orders (id INT COMMENT '{'x' * 1000}')", "shop", at(100))
    assert columns(log, at(99)) == []
    assert columns(opened(tmp_path), at(100)) == ["id"]
    assert not any(b"xxxx" in path.read_bytes() for path in (tmp_path / "schemas").iterdir())


def test_epoch_starts_with_the_definitions_of_its_server(moved: SchemaLog[SchemaHistory]) -> None:
    other = empty()
    other.seed([TableDefinition(TableSchema("shop", "orders", (Column("id", "bigint"),)), "utf8mb4")], None)
    moved.seed(other, at(50, epoch=1))
    moved.apply("ALTER TABLE orders ADD extra INT", "shop", at(70, epoch=1))
    assert columns(moved, at(300)) == ["id", "remark", "total"]
    assert columns(moved, at(60, epoch=1)) == ["id"]
    assert columns(moved, at(70, epoch=1)) == ["id", "extra"]


def test_seed_in_the_middle_replaces_later_definitions(
    moved: SchemaLog[SchemaHistory], tmp_path: Path
) -> None:
    other = empty()
    other.seed([TableDefinition(TableSchema("shop", "orders", (Column("id", "bigint"),)), "utf8mb4")], None)
    moved.seed(other, at(250))
    assert columns(moved, at(220)) == ["id", "note", "total"]
    assert columns(opened(tmp_path), at(400)) == ["id"]
    assert moved.position == at(250)


DOUBTED = "ALTER TABLE orders DROP COLUMN unheard_of"
TOLD = TableDefinition(TableSchema("shop", "orders", (Column("id", "int"), Column("x", "json"))), "utf8mb4")


def doubted(folder: Path) -> SchemaLog[SchemaHistory]:
    """A log whose table is in doubt from 200 on and altered at 300 and 400."""
    log = opened(folder)
    log.seed(empty(), at(4))
    log.apply(CREATE, "shop", at(100))
    log.apply(DOUBTED, "shop", at(200))
    log.apply("ALTER TABLE orders ADD y INT", "shop", at(300))
    log.apply("ALTER TABLE orders ADD z INT", "shop", at(400))
    return log


@pytest.mark.parametrize("lines_bytes_max", [schemas.LINES_BYTES_MAX, 1])
def test_definition_read_later_applies_from_its_position(
    tmp_path: Path, lines_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "LINES_BYTES_MAX", lines_bytes_max)
    log = doubted(tmp_path)
    for offset in (200, 300, 400):
        assert opened(tmp_path).at(at(offset)).needs_reread(ORDERS)
    log.settle(at(200), [definition_line(TOLD.to_json())])
    log.apply("ALTER TABLE orders ADD last INT", "shop", at(500))
    for reader in (log, opened(tmp_path)):
        assert columns(reader, at(199)) == ["id", "note"]
        assert columns(reader, at(200)) == ["id", "x"]
        assert columns(reader, at(300)) == ["id", "x", "y"]
        assert columns(reader, at(450)) == ["id", "x", "y", "z"]
        assert columns(reader, None) == ["id", "x", "y", "z", "last"]
        assert not reader.at(None).doubts()


def test_definition_read_later_does_not_apply_across_a_gap(tmp_path: Path) -> None:
    log = doubted(tmp_path)
    log.seed(log.at(None), at(1000, file=2))
    log.settle(at(200), [definition_line(TOLD.to_json())])
    assert columns(log, at(400)) == ["id", "x", "y", "z"]
    assert opened(tmp_path).at(at(1000, file=2)).needs_reread(ORDERS)


def test_refusal_is_kept_until_a_statement_recreates_the_table(tmp_path: Path) -> None:
    log = doubted(tmp_path)
    log.settle(at(400), [refusal_line(ORDERS, "nobody knows")])
    history = opened(tmp_path).at(at(400))
    doubt = history.doubt(ORDERS)
    assert doubt is not None
    assert (doubt.refusal, doubt.reason) == ("nobody knows", "ALTER TABLE orders")
    assert SchemaHistory.from_json(history.in_force()).doubt(ORDERS) == doubt
    log.apply("DROP TABLE orders", "shop", at(500))
    log.apply(CREATE, "shop", at(600))
    assert columns(opened(tmp_path), None) == ["id", "note"]
    assert not opened(tmp_path).at(None).doubts()


def test_statements_are_reported_where_all_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "LINES_BYTES_MAX", 1)
    log = doubted(tmp_path)

    def places(since: int, until: int) -> list[int] | None:
        statements = log.statements(at(since), at(until))
        return None if statements is None else [position.offset for position, _ in statements]

    assert places(100, 400) == [200, 300, 400]
    assert places(250, 399) == [300]
    assert places(400, 9999) == []
    monkeypatch.setattr(schemas, "STATEMENT_BYTES_MAX", 10)
    log.apply("ALTER TABLE orders ADD too_long INT", "shop", at(500))
    assert places(100, 499) == [200, 300, 400]
    assert places(100, 500) is None
    assert places(0, 400) is None


def test_tables_of_a_new_log_are_in_doubt_until_they_are_read(tmp_path: Path) -> None:
    log = opened(tmp_path)
    defaults = ServerDefaults(ServerSpelling(), "utf8mb4", {"shop": "utf8mb4"}, False)
    log.seed(SchemaHistory.awaiting_survey(defaults, at(4)), at(4))
    log.apply("CREATE TABLE young (a INT)", "shop", at(100))
    log.apply("ALTER TABLE orders ADD y INT", "shop", at(200))
    history = opened(tmp_path).at(at(150))
    assert history.needs_reread(ORDERS)
    assert SchemaHistory.from_json(history.in_force(name=ORDERS)).needs_reread(ORDERS)
    assert not history.needs_reread(TableName("shop", "young"))
    log.settle(at(4), [definition_line(TOLD.to_json()), SURVEYED])
    assert columns(opened(tmp_path), at(150)) == ["id", "x"]
    assert columns(opened(tmp_path), at(200)) == ["id", "x", "y"]
    assert not opened(tmp_path).at(at(150)).needs_reread(TableName("shop", "unheard_of"))


def test_definition_before_the_first_position_is_refused(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.seed(empty(), at(100))
    with pytest.raises(SchemaUnknown, match="as early as that"):
        log.settle(at(99), [definition_line(TOLD.to_json())])


@pytest.mark.parametrize("loss", list(Loss))
def test_power_failure_while_definitions_are_settled_leaves_doubt_or_truth(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "LINES_BYTES_MAX", 1)
    truth = {199: ["id", "note"], 200: ["id", "x"], 300: ["id", "x", "y"], 400: ["id", "x", "y", "z"]}
    stopped = 0
    for steps in itertools.count():
        disk = SimulatedDisk(stop_at=steps)
        try:
            disk.make_folder(FOLDER)
            log = SchemaLog(FOLDER, SchemaHistory.from_json, disk)
            log.seed(empty(), at(4))
            for offset, text in [(100, CREATE), (200, DOUBTED), (300, "ALTER TABLE orders ADD y INT")]:
                log.apply(text, "shop", at(offset))
            log.apply("ALTER TABLE orders ADD z INT", "shop", at(400))
            log.settle(at(200), [definition_line(TOLD.to_json())])
            break
        except PowerLost:
            stopped += 1
            kept = SchemaLog(FOLDER, SchemaHistory.from_json, disk.after_power_failure(loss, seed=steps))
        newest = kept.position
        for offset, expected in truth.items():
            if newest is not None and newest >= at(offset) and not kept.at(at(offset)).needs_reread(ORDERS):
                assert columns(kept, at(offset)) == expected, f"stopped at step {steps}"
    assert stopped > 10


def test_session_of_a_statement_is_kept_with_it(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.seed(empty(), at(4))
    log.apply(CREATE, "shop", at(100))
    log.apply("CREATE TABLE other.t (a INT)", "shop", at(150))
    log.apply("FROBNICATE x", "shop", at(200), StatementSession.of_event(["other"], "latin1"))
    assert list(map(str, opened(tmp_path).at(at(200)).doubts())) == ["other.t"]
    plain = StatementSession(sql_mode=frozenset({"NO_BACKSLASH_ESCAPES"}))
    log.apply("ALTER TABLE orders COMMENT 'c:\\', ADD plain INT -- '", "shop", at(300), plain)
    for kept in (log, opened(tmp_path)):
        schema = kept.at(at(300)).schema("shop", "orders")
        assert schema is not None
        assert schema.columns[-1].name == "plain"


# --- The power fails ------------------------------------------------------------------------

STATEMENTS = [
    (100, CREATE),
    (200, "ALTER TABLE orders ADD a INT"),
    (300, "ALTER TABLE orders ADD b INT"),
    (400, "ALTER TABLE orders DROP COLUMN a"),
    (500, "RENAME TABLE orders TO moved, moved TO orders"),
    (600, "ALTER TABLE orders ADD c INT"),
    (700, "DROP TABLE orders"),
    (800, CREATE),
]


def followed(disk: SimulatedDisk, done: list[int] | None = None) -> SchemaLog[SchemaHistory]:
    """Seed an empty log, then apply every statement; `done` collects the offsets of the applied
    statements.
    """
    log = SchemaLog(FOLDER, SchemaHistory.from_json, disk, earliest=lambda: at(4))
    if log.position is None:
        log.seed(empty(), at(4))
    for offset, text in STATEMENTS:
        log.apply(text, "shop", at(offset))
        if done is not None:
            done.append(offset)
    log.close()
    return log


@pytest.mark.parametrize("loss", list(Loss))
def test_power_failure_at_any_step_keeps_the_definitions(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit is small, so that generations start during the test.
    monkeypatch.setattr(schemas, "LINES_BYTES_MAX", 250)
    whole = SimulatedDisk()
    whole.make_folder(FOLDER)
    log = followed(whole)
    truth = {offset: columns(log, at(offset)) for offset in (4, *(position for position, _ in STATEMENTS))}
    assert truth[400] == ["id", "note", "b"]
    assert len(whole.list(FOLDER / "schemas")) > 1
    steps = 0
    while True:
        disk, done = SimulatedDisk(stop_at=steps), list[int]()
        try:
            disk.make_folder(FOLDER)
            followed(disk, done)
            break
        except PowerLost:
            recovered = disk.after_power_failure(loss, seed=steps)
        kept = SchemaLog(FOLDER, SchemaHistory.from_json, recovered)
        assert {offset: columns(kept, at(offset)) for offset in done} == {
            offset: truth[offset] for offset in done
        }
        recovered.make_folder(FOLDER)
        again = followed(recovered)
        assert {offset: columns(again, at(offset)) for offset in truth} == truth, f"stopped at step {steps}"
        steps += 1
    assert steps > 20
