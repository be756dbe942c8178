# SPDX-License-Identifier: Apache-2.0
"""The rows and columns that a Canal destination shows: each image is judged by its own values, and nothing of
the other images is in an entry.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from penstock.coordinate.backends.memory import MemoryStore
from penstock.errors import AccessDenied, StatementLogged
from penstock.logstore.log import Log
from penstock.serve import limited, piece
from penstock.serve.canal.entries import entries_of
from penstock.serve.limited import NO_LIMITS, Limits
from penstock.serve.own_log import OwnSource
from penstock.serve.piece import Piece, View, make_piece
from tests.support.binlog.events import UPDATE_ROWS
from tests.support.binlog.random_log import (
    COLUMNS,
    TABLES,
    Change,
    Image,
    RowsEvent,
    Statement,
    Transaction,
    binlog_of,
    keep_log,
    random_image,
    random_transactions,
)
from tests.support.canal.client import (
    PROTO,
    ROWDATA,
    CanalClient,
    Refused,
    describe_entries,
    entry_of,
    row_change_of,
)
from tests.support.daemon.served_log import INSTANCE, serving
from tests.support.suite.nonempty import each

# Conditions, each with an equivalent Python function.
TRUTHS: dict[str, Any] = {
    "region = 'eu'": lambda image: image["region"] == "eu",
    "Region IN ('eu', 'us') AND amount >= 0": lambda image: (
        image["region"] in ("eu", "us") and image["amount"] is not None and image["amount"] >= 0
    ),
    "region IS NULL OR amount < 0": lambda image: (
        image["region"] is None or (image["amount"] is not None and image["amount"] < 0)
    ),
    "NOT region = 'eu'": lambda image: image["region"] not in ("eu", None),
    "id BETWEEN 3 AND 6": lambda image: 3 <= image["id"] <= 6,
    "TRUE": lambda image: True,
    "FALSE": lambda image: False,
}


def pieces_of(log: Log, view: View, seeded: random.Random) -> Iterator[Piece]:
    """Yield all pieces, some of them decoded by a new decoder."""
    source = OwnSource("shop", log)
    position, follower, part = log.earliest(), None, 0
    assert position is not None
    while True:
        kept = follower if seeded.random() < 0.7 else None
        decoded = make_piece(source, view, position, None, kept, threading.Event(), part)
        if decoded is None:
            return
        shown_piece, follower = decoded
        yield shown_piece
        position, part = shown_piece.end, 0 if shown_piece.is_whole else shown_piece.part + 1


def entries_in(log: Log, limits: Limits, seeded: random.Random) -> list[bytes]:
    """Return all entries of a log, taken in batches of random sizes."""
    entries: list[bytes] = []
    for decoded in pieces_of(log, View("canal", limits=limits), seeded):
        kept = entries_of(decoded)
        at = 0
        while at < kept.count:
            taken = kept.take(at, seeded.randrange(1, 2000), at_least_one=True)
            content = b"".join(taken.parts)
            batch = list(PROTO["Messages"].FromString(content).messages)
            rows = [row_change_of(entry) for entry in map(entry_of, batch) if entry.entryType == ROWDATA]
            assert taken.rows == sum(len(change.rowDatas) for change in rows)
            entries += batch
            at = taken.next
    return entries


def shown_changes(rows: RowsEvent, texts: Sequence[str]) -> list[Change]:
    """Return the changes that a log with the visible images alone would have."""

    def shown(image: Image | None) -> Image | None:
        return image if image is not None and all(TRUTHS[text](image) for text in texts) else None

    visible = [(shown(before), shown(after)) for before, after in rows.changes]
    return [change for change in visible if change != (None, None)]


def expected_lines(
    transactions: Sequence[Transaction], where: dict[str, list[str]], columns: dict[str, tuple[str, ...]]
) -> list[tuple[Any, ...]]:
    """Return what `describe_entries` says about the visible entries."""

    def texts(table: str, image: Image | None) -> dict[str, str | None]:
        shown = columns.get(table, COLUMNS)
        values = {name: value for name, value in (image or {}).items() if name in shown}
        return {name: None if value is None else str(value) for name, value in values.items()}

    lines: list[tuple[Any, ...]] = []
    for transaction in transactions:
        if not transaction[0].events:
            lines.append(("ALTER", "orders", transaction[0].text))
            continue
        inner: list[tuple[Any, ...]] = []
        for statement in transaction:
            written: list[tuple[Any, ...]] = []
            for rows in statement.events:
                for before, after in shown_changes(rows, where.get(rows.table, [])):
                    kind = "UPDATE" if before and after else "DELETE" if before else "INSERT"
                    written.append((kind, rows.table, texts(rows.table, before), texts(rows.table, after)))
            tables = {rows.table for rows in statement.events}
            if written and not tables & (where.keys() | columns.keys()):
                inner.append(("QUERY", "", statement.text))
            inner += written
        if inner:
            lines += [("BEGIN",), *inner, ("END",)]
    return lines


def test_destination_shows_what_a_log_of_its_visible_rows_and_columns_has() -> None:
    seeded = random.Random(1111)
    shown = hidden = split = 0
    for _ in range(60):
        transactions = random_transactions(seeded, seeded.randrange(1, 25))
        where = {
            "orders": seeded.sample(list(TRUTHS), seeded.choice([1, 1, 2])),
            "hidden": ["FALSE"],
        }
        patterns = dict(zip(("shop.*ders", "*.ORDERS"), where["orders"], strict=False))
        columns = seeded.choice(
            [{}, {"users": ("id", "region")}, {"users": ("id", "amount"), "orders": ("id", "amount")}]
        )
        named = {
            f"shop.{table}": [name.upper() for name in names if name != "id"]
            for table, names in columns.items()
        }
        limits = Limits.of_settings("shop", {**patterns, "shop.hidden": "FALSE"}, named)
        with keep_log(binlog_of(transactions, seeded)) as log:
            lines = describe_entries(entries_in(log, limits, seeded))
            everything = describe_entries(entries_in(log, NO_LIMITS, seeded))
        assert lines == expected_lines(transactions, where, columns), (patterns, columns)
        assert everything == expected_lines(transactions, {}, {})
        shown += len(lines)
        hidden += len(everything) - len(lines)
        split += sum(
            None in change
            for transaction in transactions
            for statement in transaction
            for rows in statement.events
            if rows.code == UPDATE_ROWS
            for change in shown_changes(rows, where.get(rows.table, []))
        )
    assert shown > 2000
    assert hidden > 1000
    assert split > 100


def test_large_transaction_is_judged_and_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = random.Random(6)
    for module in (limited, piece):
        monkeypatch.setattr(module, "PIECE_PART_BYTES", 8000)
    small = random_transactions(seeded, 20)
    large = tuple(
        part for transaction in random_transactions(seeded, 300) for part in transaction if part.events
    )
    transactions = [*small, large, *small]
    limits = Limits.of_settings("shop", {"shop.*": "region = 'eu'"}, {"shop.users": ["amount"]})
    where = {table: ["region = 'eu'"] for table in TABLES}
    with keep_log(binlog_of(transactions, seeded)) as log:
        lines = describe_entries(entries_in(log, limits, seeded))
        parts = [kept.part for kept in pieces_of(log, View("canal", limits=limits), seeded)]
    assert lines == expected_lines(transactions, where, {"users": ("id", "amount")})
    assert max(parts) > 3


def test_update_that_leaves_or_enters_the_condition_is_a_delete_or_an_insert_in_order() -> None:
    seeded = random.Random(1)
    eu, us = ({"id": 1, "region": region, "amount": 5} for region in ("eu", "us"))
    changes = ((eu, eu), (eu, us), (eu, us), (us, us), (us, eu), (eu, eu))
    transactions = [(Statement("UPDATE", (RowsEvent("orders", changes),)),)]
    limits = Limits.of_settings("shop", {"shop.orders": "region = 'eu'"}, {})
    with keep_log(binlog_of(transactions, seeded)) as log:
        entries = [entry_of(content) for content in entries_in(log, limits, seeded)]
        whole = [entry_of(content) for content in entries_in(log, NO_LIMITS, seeded)]
    rows = [entry for entry in entries if entry.entryType == ROWDATA]
    counts = [(len(row_change_of(entry).rowDatas), entry.header.props[-1].value) for entry in rows]
    assert counts == [(1, "1"), (2, "2"), (1, "1"), (1, "1")]
    assert b"us" not in b"".join(entry.storeValue for entry in rows)
    # Each entry has the position of its event, as the unlimited entry has.
    (event,) = [entry for entry in whole if entry.entryType == ROWDATA and entry.header.tableName]
    places = {(entry.header.logfileOffset, entry.header.eventLength, entry.header.gtid) for entry in rows}
    assert places == {(event.header.logfileOffset, event.header.eventLength, event.header.gtid)}
    assert [entry for entry in whole if entry.entryType != ROWDATA] == [
        entry for entry in entries if entry.entryType != ROWDATA
    ]


def test_columns_keep_their_numbers_and_flags() -> None:
    seeded = random.Random(2)
    before, after = {"id": 1, "region": "eu", "amount": 5}, {"id": 1, "region": "us", "amount": 5}
    transactions = [(Statement("UPDATE", (RowsEvent("orders", ((before, after),)),)),)]
    limits = Limits.of_settings("shop", {}, {"shop.orders": ["amount"]})
    with keep_log(binlog_of(transactions, seeded)) as log:
        rows = [
            entry for entry in map(entry_of, entries_in(log, limits, seeded)) if entry.entryType == ROWDATA
        ]
    (row,) = row_change_of(rows[0]).rowDatas
    assert [(column.index, column.name, column.isKey, column.updated) for column in row.afterColumns] == [
        (0, "id", True, False),
        (2, "amount", False, False),
    ]


def test_unchanged_column_that_the_image_after_an_update_lacks_is_that_before_it() -> None:
    seeded = random.Random(3)
    changes = tuple(
        ({"id": number, "region": region, "amount": 1}, {"id": number, "region": region, "amount": 2})
        for number, region in enumerate(["eu", "us", None, "eu"])
    )
    transactions = [(Statement("UPDATE", (RowsEvent("orders", changes),)),)]
    limits = Limits.of_settings("shop", {"shop.orders": "region = 'eu'"}, {})
    with keep_log(binlog_of(transactions, seeded, after_columns=0b101)) as log:
        lines = describe_entries(entries_in(log, limits, seeded))
    assert [line[2:] for line in lines if line[0] == "UPDATE"] == [
        ({"id": "0", "region": "eu", "amount": "1"}, {"id": "0", "amount": "2"}),
        ({"id": "3", "region": "eu", "amount": "1"}, {"id": "3", "amount": "2"}),
    ]


REFUSED = {
    "a missing column": (
        {"shop.orders": "regoin = 'eu'"},
        {},
        "depend on column regoin",
        "Did you mean region",
    ),
    "a comparison that its type does not support": (
        {"shop.orders": "region > 5"},
        {},
        "cannot be evaluated with the types of region",
        "canal_where of instance shop",
    ),
    "a list without a column of the table": (
        {},
        {"shop.orders": ["regoin"]},
        "shows regoin of shop.orders, which has no such column",
        "It has id, region, amount: correct canal_columns of instance shop",
    ),
}


def test_limits_that_cannot_be_applied_stop_before_the_first_row_that_they_concern() -> None:
    for case, (where, columns, message, hint) in each(REFUSED.items()):
        seeded = random.Random(4)
        notes = [
            (Statement("INSERT", (RowsEvent("notes", ((None, random_image(seeded)),)),)),) for _ in range(5)
        ]
        orders = (
            Statement(
                "INSERT", (RowsEvent("orders", ((None, {"id": 1, "region": "a secret", "amount": 1}),)),)
            ),
        )
        limits = Limits.of_settings("shop", where, columns)
        pieces: list[Piece] = []
        with keep_log(binlog_of([*notes, orders, *notes], seeded)) as log:
            with pytest.raises(AccessDenied, match=message) as refused:
                pieces.extend(pieces_of(log, View("canal", limits=limits), seeded))
            kept = [entries_of(known).take(0, 1 << 30, at_least_one=True) for known in pieces]
            content = b"".join(part for taken in kept for part in taken.parts)
            lines = describe_entries(list(PROTO["Messages"].FromString(content).messages))
        assert [line for line in lines if line[0] == "INSERT"] == [
            line for line in expected_lines(notes, {}, {}) if line[0] == "INSERT"
        ], case
        assert hint in str(refused.value.hint), case
        assert "secret" not in f"{refused.value.message} {refused.value.hint}", case


def test_changes_before_a_logged_statement_are_sent_and_its_text_is_hidden() -> None:
    seeded = random.Random(6)
    rows = [
        (Statement("INSERT", (RowsEvent("orders", ((None, random_image(seeded)),)),)),) for _ in range(20)
    ]
    statement = (Statement("INSERT INTO orders VALUES (1, 'a secret', 1)", ()),)
    for where, columns in (({"shop.orders": "TRUE"}, {}), ({}, {"shop.orders": ("id",)})):
        pieces: list[Piece] = []
        view = View("canal", limits=Limits.of_settings("shop", where, columns))
        with (
            keep_log(binlog_of([*rows, statement, *rows], seeded)) as log,
            pytest.raises(StatementLogged, match="text is hidden") as stopped,
        ):
            pieces.extend(pieces_of(log, view, seeded))
        assert sum(known.rows for known in pieces) == 3 * len(rows), (where, "BEGIN, INSERT and END of each")
        assert "secret" not in str(stopped.value)
        assert stopped.value.position


@pytest.mark.parametrize("limits", [NO_LIMITS, Limits.of_settings("shop", {"shop.orders": "TRUE"}, {})])
def test_transactions_before_a_refused_statement_are_one_piece(limits: Limits) -> None:
    """Decoding each of them by itself would cost the square of their number."""
    seeded = random.Random(7)
    row = (Statement("INSERT", (RowsEvent("orders", ((None, random_image(seeded)),)),)),)
    statement = (Statement("INSERT INTO orders VALUES (1, 'a', 1)", ()),)
    for transactions, count in (([row] * 20 + [statement, row], 1), ([statement, row], 0)):
        pieces: list[Piece] = []
        with keep_log(binlog_of(transactions, seeded)) as log, pytest.raises(StatementLogged):
            pieces.extend(pieces_of(log, View("canal", limits=limits), seeded))
        assert len(pieces) == count


def test_error_after_a_large_transaction_does_not_withhold_its_last_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(piece, "PIECE_PART_BYTES", 2000)
    seeded = random.Random(8)
    large = (
        Statement(
            "INSERT",
            tuple(RowsEvent("orders", ((None, random_image(seeded)),)) for _ in range(100)),
        ),
    )
    statement = (Statement("INSERT INTO orders VALUES (1, 'a secret', 1)", ()),)
    for where in ({}, {"shop.orders": "TRUE"}):
        limits = Limits.of_settings("shop", where, {})
        pieces: list[Piece] = []
        with keep_log(binlog_of([large, statement], seeded)) as log, pytest.raises(StatementLogged):
            pieces.extend(pieces_of(log, View("canal", limits=limits), seeded))
        assert sum(known.rows for known in pieces) >= 100, where
        assert pieces[-1].is_whole, where
        assert len(pieces) > 2, where


def test_no_other_format_can_leave_rows_out() -> None:
    seeded = random.Random(5)
    transactions = [(Statement("INSERT", (RowsEvent("orders", ((None, random_image(seeded)),)),)),)]
    limits = Limits.of_settings("shop", {"shop.orders": "TRUE"}, {})
    with keep_log(binlog_of(transactions, seeded)) as log:
        for shape in ("canal_flat", "debezium", "maxwell", "ptubes", "json"):
            with pytest.raises(Exception, match="cannot leave out single rows"):
                list(pieces_of(log, View(shape, limits=limits), seeded))


def test_client_sees_the_limits_of_its_destination_from_its_next_connection_on() -> None:
    changes = [
        (None, {"id": number, "region": region, "amount": 1}) for number, region in enumerate(["eu", "us"])
    ]
    transactions = [(Statement("INSERT", (RowsEvent("orders", (change,)),)),) for change in changes]
    store = MemoryStore("canal-limits")
    with (
        keep_log(binlog_of(transactions, random.Random(7))) as log,
        serving(log, {"canal": "127.0.0.1:0"}, store=store) as daemon,
    ):

        def received(where: str) -> list[tuple[Any, ...]]:
            daemon.served.canal_limits[INSTANCE] = Limits.of_settings(INSTANCE, {"shop.orders": where}, {})
            with CanalClient(daemon.port("canal"), INSTANCE).log_in("", "") as client:
                client.subscribe()
                return [line for line in describe_entries(client.get()[1]) if line[0] == "INSERT"]

        for region in ("us", "eu"):
            assert [line[3]["region"] for line in received(f"region = '{region}'")] == [region]
        with pytest.raises(Refused, match="depend on column country, which the table does not have here"):
            received("country = 'de'")
        daemon.served.canal_limits.clear()
        with CanalClient(daemon.port("canal"), INSTANCE).log_in("", "") as client:
            client.subscribe()
            assert sum(line[0] == "INSERT" for line in describe_entries(client.get()[1])) == 2
    store.close()
