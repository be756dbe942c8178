# SPDX-License-Identifier: Apache-2.0
"""The settings of an instance that merges others."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.captures import OwnInstances, RunningCapture, make_capture
from penstock.merge.capture import MergeCapture
from penstock.settings.daemon import Settings


def settings_of(**more: Any) -> Settings:
    instances = {
        "db1": {"source": "mysql://repl@db1"},
        "db2": {"source": "mysql://repl@db2"},
        "tidb": {"source": "tidb://pd1:2379"},
        "both": {"merge": ["db1", "db2"]},
    }
    instances |= more.pop("instances", {})
    return Settings.model_validate({"instances": instances, **more})


def test_merge_and_its_members_are_captured_in_the_daemons_process(tmp_path: Path) -> None:
    settings = settings_of(processes="per-instance", log={"folder": str(tmp_path)})
    assert settings.process_groups() == [["tidb"]]

    def make(name: str) -> RunningCapture:
        members = own.members(settings.instances[name].merge)
        return make_capture(name, settings, lambda name: None, captures=members)

    own = OwnInstances(["both", "db1", "db2"], make)
    own.make(own.by_name)
    captures = {capture.name: capture for capture in own.captures()}
    assert isinstance(captures["both"], MergeCapture)
    assert captures["both"].snapshot().server == "db1, db2"
    assert own.members(["db1"]) == {"db1": captures["db1"]}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"instances": {"both": {"merge": ["db1"]}}}, "at least two instances"),
        ({"instances": {"both": {"merge": ["db1", "db1"]}}}, "each once"),
        ({"instances": {"both": {"merge": ["db1", "db9"]}}}, "no such instance"),
        ({"instances": {"both": {"merge": ["db1", "tidb"]}}}, "no MySQL or MariaDB server"),
        ({"instances": {"more": {"merge": ["db1", "both"]}}}, "no MySQL or MariaDB server"),
        ({"instances": {"both": {}}}, "in its place merge"),
        ({"instances": {"both": {"merge": ["db1", "db2"], "source": "mysql://db3"}}}, "in its place merge"),
        ({"instances": {"both": {"merge": ["db1", "db2"], "servers": ["db3"]}}}, "servers: only for"),
        ({"instances": {"both": {"merge": ["db1", "db2"], "semi_sync": True}}}, "semi_sync: only for"),
        ({"instances": {"db1": {"source": "mysql://db1", "log": {"mode": "memory"}}}}, "needs a log on disk"),
        (
            {
                "fleet": {},
                "coordination": "zookeeper://z:2181/p",
                "instances": {"tidb": {"source": "mysql://t"}},
            },
            "which a daemon without fleet captures",
        ),
    ],
)
def test_merge_of_what_cannot_be_merged_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        settings_of(**changes)
