# SPDX-License-Identifier: Apache-2.0
"""Patterns of steps and loads that match no table."""

from pathlib import Path
from typing import Any

import pytest

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import Column, TableName, TablePatterns
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.pattern_check import pattern_findings, refuse_fatal
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values


def table(name: str) -> Target:
    columns = (Column("id", "int", None, False), Column("email", "varchar(20)", "utf8mb4", True))
    return Target(TableName("shop", name), columns, ("id",))


TABLES = {"here": [table("customers"), table("orders")]}


THERE = {"here": [TableName("shop", name) for name in ("_orders_old", "customers", "orders")]}


def settings(folder: Path, tables: str = "shop.*", **more: Any) -> PipelineSettings:
    source = {"url": "mysql://root@127.0.0.1", "name": "here", "tables": tables}
    return pipeline_of_values({"name": "one", "source": source, "sink": "stdout", **more}, folder)


def findings(pipeline_settings: PipelineSettings) -> list[tuple[str, str, bool, str]]:
    return [
        (pattern_finding.subject, pattern_finding.what, pattern_finding.fatal, pattern_finding.mend)
        for pattern_finding in pattern_findings(pipeline_settings, THERE, TABLES)
    ]


def test_mask_for_no_table_stops_the_pipeline(tmp_path: Path) -> None:
    mask = {"tables": "shop.custmers", "columns": {"email": "hash"}}
    pipeline_settings = settings(tmp_path, "shop.customers,shop.orders", steps=[{"mask": mask}])
    wanted = ("steps[0].mask.tables", "no table matches shop.custmers", True, "Did you mean shop.customers?")
    assert findings(pipeline_settings) == [wanted]
    with pytest.raises(
        OptionInvalid, match=r"steps\[0\].mask.tables: no table matches shop.custmers"
    ) as raised:
        refuse_fatal(pattern_findings(pipeline_settings, THERE, TABLES))
    assert raised.value.hint == "Did you mean shop.customers?"


def test_mask_of_a_source_with_unknown_tables_is_reported_as_unchecked(tmp_path: Path) -> None:
    mask = {"tables": "shop.custmers", "columns": {"email": "hash"}}
    steps = [{"filter": {"tables": "shop.nothere", "where": "id > 0"}}, {"mask": mask}]
    (finding,) = pattern_findings(settings(tmp_path, "shop.nothere", steps=steps), {}, TABLES)
    assert (finding.subject, finding.fatal) == ("steps[1].mask.tables", False)
    assert finding.what == "shop.custmers is not checked: the tables of the source here are unknown"
    of_all = settings(tmp_path, steps=[{"mask": {"columns": {"email": "hash"}}}])
    assert pattern_findings(of_all, {}, TABLES) == []


def test_other_patterns_for_no_table_are_reported(tmp_path: Path) -> None:
    pipeline_settings = settings(
        tmp_path,
        "shop.customers,shop.oders,shop.orders",
        steps=[{"filter": {"tables": ["shop.order*", "shop.items"], "where": "id > 0"}}],
        load={"where": {"shop.custoomers": "id > 0", "shop.orders": "id > 0"}},
    )
    assert findings(pipeline_settings) == [
        ("source here: tables", "no table matches shop.oders", False, "Did you mean shop.orders?"),
        ("load.where", "no table matches shop.custoomers", False, "Did you mean shop.customers?"),
        ("steps[0].filter.tables", "no table matches shop.items", False, findings(pipeline_settings)[-1][3]),
    ]
    refuse_fatal(pattern_findings(pipeline_settings, THERE, TABLES))


def test_steps_match_the_table_names_that_reach_them(tmp_path: Path) -> None:
    route: dict[str, Any] = {"tables": "shop.customers", "to": "lake.people"}
    mask: dict[str, Any] = {"tables": "lake.people", "columns": {"email": "hash"}}
    tables = "shop.customers,shop.orders"
    assert findings(settings(tmp_path, tables, steps=[{"route": route}, {"mask": mask}])) == []
    (actual,) = findings(settings(tmp_path, tables, steps=[{"mask": mask}, {"route": route}]))
    assert actual[0] == "steps[0].mask.tables"
    # Rows name the target table, so any matching name is possible.
    by_rows = route | {"to": "lake.of_{email}"}
    fits, fails = mask | {"tables": "lake.of_me"}, mask | {"tables": "lake.for_me"}
    assert findings(settings(tmp_path, tables, steps=[{"route": by_rows}, {"mask": fits}])) == []
    assert len(findings(settings(tmp_path, tables, steps=[{"route": by_rows}, {"mask": fails}]))) == 1


def test_table_taken_for_a_copy_is_reported_and_read_if_named(tmp_path: Path) -> None:
    ((subject, what, fatal, _),) = findings(settings(tmp_path))
    assert (subject, fatal) == ("source here: tables", False)
    assert what.startswith("shop._orders_old is taken for the copy")
    assert findings(settings(tmp_path, "shop._orders_old,shop.customers,shop.orders")) == []
    named = PipelinePatterns(TablePatterns(["shop._orders_old", "shop.*"]))
    assert named.matches("shop", "_orders_old")
    assert not named.matches("shop", "_orders_gho")
    assert not PipelinePatterns(TablePatterns(["shop._orders*", "shop.orders"])).matches(
        "shop", "_orders_old"
    )
