# SPDX-License-Identifier: Apache-2.0
"""The step `lookup` on a real server: the values that rows get, how fresh they are, and the conditions that
end the step.
"""

import pickle
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import AuthenticationFailed, OptionInvalid, StepFailed
from penstock.local.driver import LocalDriver
from penstock.pipeline.row_metadata import exact_texts
from penstock.pipeline.settings import pipeline_of_values
from penstock.pipeline.steps.lookup import LookupStep, Settings
from penstock.pipeline.verify.verify import verify
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.pipeline.running import run_to_end
from tests.support.pipeline.steps_run import rows, run
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

ORDERS = target_of({"id": "int", "customer": "int", "country": "varchar(8)"})
MakeStep = Callable[..., LookupStep]


@pytest.fixture
def database(mysql_server: Server, fresh_database: FreshDatabase) -> str:
    """A database with customers, whose names begin with capital letters."""
    database = fresh_database(mysql_server)
    mysql_server.sql(
        f"CREATE TABLE {database}.customers (id INT, country VARCHAR(8), name VARCHAR(20),"
        " credit DECIMAL(8,2), rate FLOAT, born DATE, PRIMARY KEY (id, country))"
    )
    mysql_server.sql(
        f"INSERT INTO {database}.customers VALUES (1, 'DE', 'Ada', 1.50, 0.1, '1815-12-10'),"
        " (2, 'DE', 'Bob', NULL, 2e-9, NULL), (2, 'FR', 'Cléo', 3, 0, '2000-01-01')"
    )
    return database


@pytest.fixture
def make_step(mysql_server: Server, database: str) -> MakeStep:
    def make(**settings: Any) -> LookupStep:
        values = {
            "server": {"url": f"mysql://root@127.0.0.1:{mysql_server.port}"},
            "table": f"{database}.customers",
            "on": {"customer": "id", "country": "country"},
            "add": {"name": {"column": "name", "type": "varchar(20)"}},
        }
        return LookupStep(Settings.model_validate(values | settings))

    return make


def test_both_images_of_changes_get_the_columns_of_the_row_they_refer_to(make_step: MakeStep) -> None:
    add = {
        "name": {"column": "name", "type": "varchar(20)"},
        "credit": {"column": "credit", "type": "decimal(8,2)"},
        "rate": {"column": "rate", "type": "float"},
        "born": {"column": "born", "type": "date"},
    }
    changes = changes_of(
        ORDERS,
        insert(1, id=1, customer=1, country="DE"),
        update(2, {"id": 1, "customer": 1, "country": "DE"}, {"id": 1, "customer": 2, "country": "FR"}),
        delete(3, id=5, customer=2, country="DE"),
        insert(4, id=6, customer=None, country="DE"),
        insert(5, id=7, customer=9, country="DE"),
        # Texts are compared exactly, regardless of the column's collation.
        insert(6, id=8, customer=1, country="de"),
    )
    stepped = run(make_step(add=add), changes)
    shown = [(row[0], *row[4:6]) for row in rows(stepped)]
    assert [(kind, name, None if credit is None else str(credit)) for kind, name, credit in shown] == [
        ("insert", "Ada", "1.50"),
        ("update_preimage", "Ada", "1.50"),
        ("update_postimage", "Cléo", "3.00"),
        ("delete", "Bob", None),
        ("insert", None, None),
        ("insert", None, None),
        ("insert", None, None),
    ]
    # A FLOAT is looked up with the same digits that it has in the log.
    assert stepped.rows.column("rate").to_pylist()[:4] == pytest.approx([0.1, 0.1, 0, 2e-9], rel=1e-6)


def test_keys_may_be_bytes(make_step: MakeStep, mysql_server: Server, database: str) -> None:
    mysql_server.sql(f"CREATE TABLE {database}.devices (id BINARY(4) PRIMARY KEY, name VARCHAR(20))")
    mysql_server.sql(f"INSERT INTO {database}.devices VALUES (x'00ff275c', 'door'), (x'80818283', 'lamp')")
    readings = target_of({"id": "int", "device": "binary(4)"})
    keys = (b"\x00\xff'\\", b"\x80\x81\x82\x83", b"\xff\xff\xff\xff")
    changes = changes_of(readings, *(insert(n, id=n, device=key) for n, key in enumerate(keys, 1)))
    step = make_step(table=f"{database}.devices", on={"device": "id"})
    assert run(step, changes).rows.column("name").to_pylist() == ["door", "lamp", None]


def test_values_are_read_in_the_types_of_the_table_and_get_the_declared_ones(
    make_step: MakeStep, mysql_server: Server, database: str
) -> None:
    mysql_server.sql(
        f"CREATE TABLE {database}.cities (code VARCHAR(20) CHARACTER SET gbk PRIMARY KEY,"
        " name VARCHAR(200) CHARACTER SET latin1, area DECIMAL(12,4), people BIGINT UNSIGNED)"
    )
    mysql_server.sql(
        f"INSERT INTO {database}.cities VALUES ('北京', 'Pékin', 16410.5, 21893095),"
        " ('上海', 'S', 6340.1234, 5000000000)"
    )
    add = {
        "name": {"column": "name", "type": "varchar(8)"},
        "area": {"column": "area", "type": "decimal(10,2)"},
        "people": {"column": "people", "type": "int"},
    }
    visits = target_of({"id": "int", "city": "varchar(20)"})

    def added(city: str, **columns: str) -> list[Any]:
        chosen = {name: {**add[name], "type": kind} for name, kind in columns.items()} or add
        step = make_step(table=f"{database}.cities", on={"city": "code"}, add=chosen)
        stepped = run(step, changes_of(visits, insert(1, id=1, city=city)))
        return [stepped.rows.column(name).to_pylist()[0] for name in chosen]

    assert added("北京") == ["Pékin", Decimal("16410.50"), 21893095]
    assert added("天津") == [None, None, None]
    assert added("上海", area="decimal(12,4)", people="bigint") == [Decimal("6340.1234"), 5000000000]
    for columns in ({"area": "decimal(10,2)"}, {"people": "int"}):
        with pytest.raises(StepFailed, match=rf"cities\.{next(iter(columns))} does not fit"):
            added("上海", **columns)
    with pytest.raises(StepFailed, match=r"cities\.name does not fit varchar\(4\): it has more than 4"):
        added("北京", name="varchar(4)")
    step = make_step(table=f"{database}.cities", on={"city": "code"}, add={"name": add["name"]}, max_age=0)
    visit = changes_of(visits, insert(1, id=1, city="北京"))
    for charset in ("latin1", "gbk", "utf8mb4"):
        mysql_server.sql(f"ALTER TABLE {database}.cities MODIFY name VARCHAR(200) CHARACTER SET {charset}")
        assert run(step, visit).rows.column("name").to_pylist() == ["Pékin"], charset
    step.close()


def test_value_that_its_type_cannot_represent_is_null_and_keeps_its_text(
    make_step: MakeStep, mysql_server: Server, database: str
) -> None:
    mysql_server.sql(f"SET sql_mode = ''; UPDATE {database}.customers SET born = '1815-00-10' WHERE id = 1")
    step = make_step(
        add={
            "birthday": {"column": "born", "type": "date"},
            "name": {"column": "name", "type": "varchar(20)"},
        }
    )
    added = [insert(number, id=number, customer=number, country="DE") for number in (2, 1, 3)]
    for _ in range(2):
        stepped = run(step, changes_of(ORDERS, *added))
        assert stepped.rows.column("birthday").to_pylist() == [None] * 3
        texts = exact_texts(stepped.rows, "birthday")
        assert texts is not None
        assert texts.to_pylist() == [None, "1815-00-10", None]
        assert exact_texts(stepped.rows, "name") is None


def test_row_that_was_looked_up_is_kept_and_a_new_row_is_always_found(
    make_step: MakeStep, mysql_server: Server, database: str
) -> None:
    kept, read_each_time = make_step(max_age=3600), make_step(max_age=0)
    first = changes_of(
        ORDERS, insert(1, id=1, customer=1, country="DE"), insert(1, 1, id=2, customer=3, country="DE")
    )
    for step in (kept, read_each_time):
        assert run(step, first).rows.column("name").to_pylist() == ["Ada", None]
    mysql_server.sql(f"UPDATE {database}.customers SET name = 'Eve' WHERE id = 1")
    mysql_server.sql(f"INSERT INTO {database}.customers (id, country, name) VALUES (3, 'DE', 'New')")
    assert run(kept, first).rows.column("name").to_pylist() == ["Ada", "New"]
    assert run(read_each_time, first).rows.column("name").to_pylist() == ["Eve", "New"]


def test_many_keys_are_looked_up_in_bounded_statements(
    make_step: MakeStep, mysql_server: Server, database: str
) -> None:
    mysql_server.sql(
        f"INSERT INTO {database}.customers (id, country, name) WITH RECURSIVE n(i) AS (SELECT 1000 UNION ALL"
        " SELECT i + 1 FROM n WHERE i < 1999) SELECT a.i * 10 + b.i % 10, 'DE',"
        " CONCAT('n', a.i * 10 + b.i % 10) FROM n a JOIN n b ON b.i < 1010"
    )
    numbers = range(10_000, 20_000)
    changes = changes_of(
        ORDERS, *(insert(1, number, id=number, customer=number, country="DE") for number in numbers)
    )
    step = make_step(rows_max=100)
    for _ in range(2):
        assert run(step, changes).rows.column("name").to_pylist() == [f"n{number}" for number in numbers]


def test_rows_without_a_match_are_rejected_if_set_and_deleted_rows_never_are(make_step: MakeStep) -> None:
    step = make_step(missing="reject", on_error="dead_letter")
    changes = changes_of(
        ORDERS,
        insert(1, id=1, customer=1, country="DE"),
        insert(2, id=2, customer=9, country="DE"),
        delete(3, id=3, customer=9, country="DE"),
    )
    outcomes = list(step.apply(changes))
    assert [len(getattr(outcome, "changes", outcome)) for outcome in outcomes] == [1, 1, 1]
    with pytest.raises(StepFailed, match=r"no row with id=9, country='DE'"):
        list(make_step(missing="reject").apply(changes))


def test_key_of_several_rows_is_refused(make_step: MakeStep) -> None:
    changes = changes_of(ORDERS, insert(1, id=1, customer=2, country="DE"))
    with pytest.raises(OptionInvalid, match="several rows for one value of id"):
        run(make_step(on={"customer": "id"}), changes)


def test_connection_that_the_server_closed_is_opened_again(make_step: MakeStep, mysql_server: Server) -> None:
    step = make_step(max_age=0)
    changes = changes_of(ORDERS, insert(1, id=1, customer=1, country="DE"))
    run(step, changes)
    assert step._session is not None
    mysql_server.sql(f"KILL {step._session.connection.query('SELECT CONNECTION_ID() AS id')[0]['id']}")
    assert run(step, changes).rows.column("name").to_pylist() == ["Ada"]
    again = pickle.loads(pickle.dumps(step))
    assert run(again, changes).rows.column("name").to_pylist() == ["Ada"]
    for each in (step, again):
        each.close()


def test_wrong_settings_are_reported(make_step: MakeStep, mysql_server: Server) -> None:
    changes = changes_of(ORDERS, insert(1, id=1, customer=1, country="DE"))
    with pytest.raises(OptionInvalid, match="has no column 'client'"):
        make_step(on={"client": "id"}).target(ORDERS)
    with pytest.raises(OptionInvalid, match="already has a column Country"):
        make_step(add={"Country": {"column": "name", "type": "text"}}).target(ORDERS)
    with pytest.raises(AuthenticationFailed):
        run(make_step(server={"url": f"mysql://nobody:wrong@127.0.0.1:{mysql_server.port}"}), changes)
    with pytest.raises(OptionInvalid, match=r"nowhere\.customers cannot be read"):
        run(make_step(table="nowhere.customers"), changes)
    with pytest.raises(OptionInvalid, match="Unknown column 'age'"):
        run(make_step(add={"age": {"column": "age", "type": "int"}}), changes)


def test_pipeline_joins_rows_and_verify_finds_values_that_changed_since(
    mysql_server: Server, database: str, tmp_path: Path
) -> None:
    mysql_server.sql(f"CREATE TABLE {database}.orders (id INT PRIMARY KEY, customer INT, country VARCHAR(8))")
    mysql_server.sql(f"INSERT INTO {database}.orders VALUES (1, 1, 'DE'), (2, 2, 'FR')")
    lookup = {
        "server": {"url": f"mysql://root@127.0.0.1:{mysql_server.port}"},
        "table": f"{database}.customers",
        "on": {"customer": "id", "country": "country"},
        "add": {"name": {"column": "name", "type": "varchar(20)"}},
    }
    settings = pipeline_of_values(
        {
            "name": "orders",
            "source": {"url": f"mysql://root@127.0.0.1:{mysql_server.port}", "tables": f"{database}.orders"},
            "steps": [{"lookup": lookup}],
            "sink": {"sqlite": {"path": str(tmp_path / "orders.sqlite")}},
        },
        tmp_path,
    )
    run_to_end(LocalDriver(2), settings)
    mysql_server.sql(f"INSERT INTO {database}.orders VALUES (3, 2, 'DE')")
    run_to_end(LocalDriver(2), settings)
    assert verify(settings).equal
    mysql_server.sql(f"UPDATE {database}.customers SET name = 'Eve' WHERE id = 1")
    (compared,) = verify(settings, mend=True).results
    assert [difference.row["id"] for difference in compared.found] == [1]
    assert verify(settings).equal
