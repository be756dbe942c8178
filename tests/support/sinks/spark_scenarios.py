# SPDX-License-Identifier: Apache-2.0
"""Runs the spark sink on a real session with Delta's or Iceberg's runtime, and checks its tables.

python -m tests.support.sinks.spark_scenarios delta FOLDER JAR...
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.changes import Changes, Origin, Target
from penstock.errors import OptionInvalid, SchemaChanged, ValueMalformed
from penstock.model import Column, TableName
from penstock.sinks.sink import BatchMark, Evolution, Sink, make_sink, settings_of
from tests.conformance.batches import Pipe, row
from tests.support.messages.avro_types import every_type
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.spark.session import session_settings

_EXTENSIONS = {
    "delta": "io.delta.sql.DeltaSparkSessionExtension",
    "iceberg": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
}
_CATALOGS = {
    "delta": {"spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog"},
    "iceberg": {
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
    },
}


class Scenarios:
    """The scenarios of one format, each with a separate table."""

    def __init__(self, using: str, session: SparkSession, folder: Path) -> None:
        self.using, self.session, self.folder = using, session, folder
        self.prefix = "lake." if using == "iceberg" else ""

    def sink(self, **settings: Any) -> Sink:
        values = {
            "table": f"{self.prefix}{{database}}.{{table}}",
            "using": self.using,
            "staging": str(self.folder / "staged rows"),
        }
        sink = make_sink("spark", settings_of("spark")(**(values | settings)))
        sink.pipeline = "conformance"
        return sink

    def target(self, name: str, columns: dict[str, str | Column] | None = None) -> Target:
        return target_of(columns or {"id": "int", "name": "varchar(40)"}, name=f"shop.{name}")

    def rows(self, sink: Sink, target: Target) -> list[dict[str, Any]]:
        rows = [row for batch in sink.read(target) for row in batch.to_pylist()]
        return sorted(rows, key=lambda row: tuple(row[name] for name in target.primary_key))

    def commits(self, target: Target) -> int:
        """Return the number of commits to a table."""
        name = f"{self.prefix}{target.name}"
        statement = f"DESCRIBE HISTORY {name}" if self.using == "delta" else f"SELECT * FROM {name}.snapshots"
        return self.session.sql(statement).count()

    def mirror_follows_changes_and_a_repeated_batch_changes_nothing(self) -> None:
        sink, target = self.sink(properties={"delta.enableDeletionVectors": "true"}), self.target("orders")
        pipe = Pipe(sink)
        assert sink.plan(target, Evolution.EVOLVE)[0].startswith("CREATE TABLE")
        pipe.changes(target, insert(1, id=1, name="a"), insert(1, 1, id=2, name="b'\\"), insert(2, id=3))
        assert sink.plan(target, Evolution.EVOLVE) == []
        batch = [
            update(3, row(3), row(30, "c")),
            update(4, row(1, "a"), row(-1, "a")),
            update(4, row(2, "b'\\"), row(1, "b'\\"), 1),
            update(4, row(-1, "a"), row(2, "a"), 2),
            delete(5, id=30, name="c"),
        ]
        for again in (False, True):
            pipe.changes(target, *batch, again=again)
            assert self.rows(sink, target) == [row(1, "b'\\"), row(2, "a")]
        commits = self.commits(target)
        # A new process stages the rows again, and commits them under the same number.
        other = Pipe(self.sink())
        other.number = pipe.number
        other.changes(target, *batch, again=True)
        assert self.rows(sink, target) == [row(1, "b'\\"), row(2, "a")]
        if self.using == "delta":
            assert self.commits(target) == commits, "Delta skips a number that it has"
        mark = BatchMark("conformance", "1", pipe.number)
        last = pipe.number if self.using == "delta" else None
        assert self.sink().last_number(mark, [target, self.target("missing")]) == last
        assert sink.remembers("conformance", [target])
        assert not sink.remembers("another", [target])

    def commit_may_be_repeated_with_the_same_receipts(self) -> None:
        sink, target = self.sink(), self.target("repeated")
        sink.prepare(target, Evolution.EVOLVE)
        for number in (1, 2):
            mark = BatchMark("conformance", "1", number)
            writer = sink.open(mark, 0)
            writer.write(changes_of(target, insert(number, id=number, name="x")))
            receipts = [writer.finish()]
            sink.commit(mark, receipts)
            sink.commit(mark, receipts)
        assert [entry["id"] for entry in self.rows(sink, target)] == [1, 2]
        staged = [path.name for path in (self.folder / "staged rows/penstock/conformance/1").iterdir()]
        assert staged == ["000000000002"], staged

    def emptied_table_keeps_later_rows(self) -> None:
        sink, target = self.sink(), self.target("emptied")
        Pipe(sink).changes(target, insert(1, id=1, name="a"), insert(1, 1, id=2, name="b"))
        for rows, expected in (([insert(4, id=2, name="c")], [row(2, "c")]), ([], [])):
            mark = BatchMark("conformance", "1", 2 if rows else 3)
            writer = sink.open(mark, 0)
            writer.write(changes_of(target, insert(2, id=9)))
            writer.empty(target, 3)
            if rows:
                writer.write(changes_of(target, *rows))
            sink.commit(mark, [writer.finish()])
            assert self.rows(sink, target) == expected

    def loads_of_several_parts_and_columns_that_change(self) -> None:
        sink, target = self.sink(partition_by=["id"]), self.target("evolving", {"id": "int", "n": "int"})
        loads = [
            [changes_of(target, insert(5, id=number, n=number), origin=Origin.LOAD)] for number in range(3)
        ]
        Pipe(sink).batch(*loads)
        wider = self.target("evolving", {"id": "int", "n": "int", "text": "varchar(9)"})
        pipe = Pipe(sink)
        pipe.number = 1
        pipe.changes(wider, update(6, {"id": 1, "n": 1}, {"id": 1, "n": 10, "text": "é"}))
        assert [tuple(entry.values()) for entry in self.rows(sink, wider)] == [
            (0, 0, None),
            (1, 10, "é"),
            (2, 2, None),
        ]
        narrower = self.target("evolving", {"id": "int", "n": "varchar(9)"})
        refused(SchemaChanged, lambda: sink.prepare(wider_column(narrower), Evolution.STOP))
        refused(
            SchemaChanged, lambda: sink.prepare(self.target("evolving", {"id": "date"}), Evolution.EVOLVE)
        )

    def ignored_columns_are_left_out_and_values_beyond_a_column_are_refused(self) -> None:
        for mode in ("mirror", "feed"):
            sink, narrow = self.sink(mode=mode), self.target(f"ignoring_{mode}", {"id": "int", "n": "int"})
            Pipe(sink).changes(narrow, insert(1, id=1, n=1))
            wide = self.target(f"ignoring_{mode}", {"id": "int", "n": "bigint", "text": "varchar(9)"})
            pipe = Pipe(sink, Evolution.IGNORE)
            pipe.number = 1
            pipe.changes(wide, insert(2, id=2, n=2, text="x"))
            table = self.session.table(f"{self.prefix}{narrow.name}")
            assert sorted(tuple(entry) for entry in table.select("id", "n").collect()) == [(1, 1), (2, 2)]
            beyond = insert(3, id=3, n=1 << 40)
            refused(ValueMalformed, lambda: pipe.changes(wide, beyond))  # noqa: B023

    def feed_has_each_change_once(self) -> None:
        sink, target = self.sink(mode="feed"), self.target("feed")
        changes = changes_of(target, insert(1, id=1), update(2, row(1), row(1, "x")), delete(3, id=1))
        pipe = Pipe(sink)
        for again in (False, True, True):
            pipe.batch([changes], again=again)
        pipe.batch([changes_of(target, insert(7, id=1))])
        counted = self.session.table(f"{self.prefix}{target.name}").count()
        assert counted == 5, counted
        mark = BatchMark("conformance", "1", pipe.number)
        assert sink.settle_load(mark, [target]) == 7
        assert self.sink(mode="feed").last_number(mark, [target]) == pipe.number
        assert sink.settle_load(replace(mark, number=pipe.number + 1), [target]) is None

    def keys_are_read_by_range(self) -> None:
        columns = {"text": "varchar(9)", "at": "datetime(6)", "raw": "varbinary(4)", "number": "decimal(9,2)"}
        sink, target = self.sink(), target_of(columns, key=tuple(columns), name="shop.ranges")
        moment = datetime(2026, 3, 1, 1, 2, 3, 456_789)
        keys = [
            dict(zip(columns, values, strict=True))
            for values in (
                ("a'\\", moment, b"", Decimal("-1.50")),
                ("b", None, b"", Decimal("0.00")),
                ("b", moment, b"", Decimal("0.00")),
                ("b", moment, b"\x00\xff", Decimal("-0.01")),
                ("b", moment, b"\x00\xff", Decimal("0.01")),
                ("ß", moment.replace(year=1900), b"", Decimal("0.00")),
            )
        ]
        null = {"at": "0000-00-00 00:00:00"}
        made = [
            replace(insert(1, number, **key)[0], unrepresentable=null if key["at"] is None else {})
            for number, key in enumerate(keys)
        ]
        Pipe(sink).batch([changes_of(target, made)])
        for low, high in itertools.combinations(range(len(keys)), 2):
            batches = sink.read(target, keys[low], keys[high])
            read = [entry for batch in batches for entry in batch.to_pylist()]
            assert sorted(map(repr, read)) == sorted(map(repr, keys[low:high])), (low, high, read)

    def every_type_reads_back(self) -> None:
        sink = self.sink()
        whole = every_type(name="shop.types")
        inserted: Changes = whole.with_rows(whole.rows.slice(0, 1))
        Pipe(sink).batch([inserted])
        (entry,) = self.rows(sink, whole.target)
        expected = inserted.rows.select(list(whole.target.column_names)).to_pylist()[0]
        assert entry == expected, [name for name in expected if entry[name] != expected[name]]

    def table_of_another_format_is_refused(self) -> None:
        self.session.sql("CREATE DATABASE IF NOT EXISTS shop")
        self.session.sql("CREATE TABLE shop.plain (id INT) USING parquet")
        sink = self.sink(
            table="spark_catalog.{database}.{table}" if self.using == "iceberg" else "shop.{table}"
        )
        refused(OptionInvalid, lambda: sink.prepare(self.target("plain"), Evolution.EVOLVE))

    def session_of_the_user_has_no_number(self) -> None:
        assert self.session.conf.get("spark.databricks.delta.write.txnAppId", "none") == "none"


_TOOLS = ("sink", "target", "rows", "commits")
SCENARIOS = [name for name in vars(Scenarios) if not name.startswith("_") and name not in _TOOLS]


def wider_column(target: Target) -> Target:
    return replace(target, name=TableName("shop", "evolving"))


def refused(error: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def session_settings_of(using: str, folder: Path, jars: Sequence[str]) -> dict[str, str]:
    """Return the settings of a session that has a table format, with its tables in a folder."""
    settings = {
        **session_settings(),
        "spark.jars": ",".join(jars),
        "spark.sql.extensions": _EXTENSIONS[using],
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
        **_CATALOGS[using],
    }
    if using == "iceberg":
        settings["spark.sql.catalog.lake.warehouse"] = str(folder / "lake")
    return settings


def main(words: Sequence[str]) -> None:
    using, folder, jars = words[0], Path(words[1]), words[2:]
    settings = session_settings_of(using, folder, jars)
    session = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
    scenarios = Scenarios(using, session, folder)
    for name in SCENARIOS:
        getattr(scenarios, name)()
        print(f"ok {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
