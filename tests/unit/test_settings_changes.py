# SPDX-License-Identifier: Apache-2.0
"""The settings that a running daemon applies, and the settings that require a restart."""

from typing import Any

import pytest

from penstock.errors import OptionInvalid
from penstock.settings.changes import InstanceChange
from penstock.settings.daemon import Settings

SHOP = {"source": "mysql://repl@db1"}


def settings_of(instances: dict[str, Any], **sections: Any) -> Settings:
    """Return the settings with these instances and further sections."""
    return Settings.model_validate({"instances": instances, **sections})


def test_instances_that_differ_are_named() -> None:
    before = settings_of({"a": SHOP, "b": SHOP, "c": SHOP, "d": SHOP})
    log = {"retention": {"age": "1h"}}
    after = settings_of({"a": SHOP, "b": {**SHOP, "weight": 2}, "c": {**SHOP, "log": log}, "e": SHOP})
    assert InstanceChange.between(before, after) == InstanceChange(("e",), ("b", "c"), ("d",), ("c",))
    assert not InstanceChange.between(before, settings_of({"d": SHOP, "c": SHOP, "b": SHOP, "a": SHOP}))


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ({}, {"log": {"folder": "/elsewhere"}}, "other sections differ too: log"),
        ({}, {"listen": {"http": "127.0.0.1:1"}, "processes": 2}, "too: listen, processes"),
        ({"processes": 2}, {"processes": 2}, "a number shares"),
        ({"listeners": 2}, {"listeners": 2}, "listener processes keep"),
    ],
)
def test_what_needs_a_restart_is_refused(before: Any, after: Any, problem: str) -> None:
    with pytest.raises(OptionInvalid, match=problem):
        InstanceChange.between(settings_of({"a": SHOP}, **before), settings_of({"b": SHOP}, **after))


MEMBERS = {"a": SHOP, "b": SHOP}
MERGE = {"merge": ["a", "b"]}


@pytest.mark.parametrize(
    ("processes", "moved"), [("single", ()), ("per-instance", ("a", "b"))], ids=["single", "per-instance"]
)
def test_merge_is_added_and_removed(processes: str, moved: tuple[str, ...]) -> None:
    without = settings_of({**MEMBERS, "c": SHOP}, processes=processes)
    merged = settings_of({**MEMBERS, "c": SHOP, "all": MERGE}, processes=processes)
    # In the daemon's process, the captures of the members continue.
    assert InstanceChange.between(without, merged) == InstanceChange(("all",), moved)
    assert InstanceChange.between(merged, without) == InstanceChange((), moved, ("all",))
    with_members = settings_of({**MEMBERS, "d": SHOP, "all": MERGE})
    assert InstanceChange.between(settings_of({"d": SHOP}), with_members).added == ("a", "b", "all")
    further = settings_of({**MEMBERS, "c": SHOP, "all": {"merge": ["a", "b", "c"]}}, processes=processes)
    change = InstanceChange.between(merged, further)
    assert change.changed == (*(["c"] if moved else []), "all")


def test_member_of_a_merge_that_stays_is_not_replaced() -> None:
    before = settings_of({**MEMBERS, "all": MERGE})
    changed = {"a": SHOP, "b": {**SHOP, "tables": ["x.y"]}}
    with pytest.raises(OptionInvalid, match="b is a member of the merge all"):
        InstanceChange.between(before, settings_of({**changed, "all": MERGE}))
    with pytest.raises(ValueError, match="all names b, and there is no such instance"):
        settings_of({"a": SHOP, "all": MERGE})
    merge = {**MERGE, "labels": {"unit": "x"}}
    assert InstanceChange.between(before, settings_of({**changed, "all": merge})).changed == ("b", "all")
    assert InstanceChange.between(before, settings_of(changed)) == InstanceChange((), ("b",), ("all",))


def test_cluster_of_tidb_is_not_changed() -> None:
    tidb = {"source": "tidb://pd1:2379"}
    before = settings_of({"a": SHOP, "t": tidb})
    assert InstanceChange.between(before, settings_of({"b": SHOP, "t": tidb})).added == ("b",)
    with pytest.raises(OptionInvalid, match="t is a TiDB cluster"):
        InstanceChange.between(before, settings_of({"a": SHOP}))
