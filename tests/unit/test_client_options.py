# SPDX-License-Identifier: Apache-2.0
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.client.daemons import Start
from penstock.client.options import default_coordination, default_member, read_options
from penstock.errors import OptionInvalid
from penstock.model import Position
from penstock.source.bounds import Bound

URL = "penstock://h1:7070,h2/shop"


def test_omitted_options_have_their_defaults() -> None:
    options = read_options(URL, name="cache")
    assert options.address.hosts == (("h1", 7070), ("h2", 7070))
    assert (options.instance, options.start, options.begin) == ("shop", None, Start(end="latest"))
    assert (options.shards, options.ack, options.policy.on_failure) == (None, "auto", "retry")
    assert options.member != read_options(URL, name="cache").member
    assert options.request()["subscriber"] == f"cache/{options.member}"


@pytest.mark.parametrize(
    ("option", "start"),
    [
        ("earliest", Start(end="earliest")),
        ("mysql-bin.000003:1542", Start(bound=Bound(position=Position(0, "mysql-bin.000003", 1542)))),
        (Position(2, "mysql-bin.000003", 4), Start(bound=Bound(position=Position(2, "mysql-bin.000003", 4)))),
        ("0-1-7", Start(bound=Bound(gtid_set="0-1-7"))),
        (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), Start(bound=Bound(time_us=1_000_000))),
    ],
)
def test_start_option_is_parsed(option: Any, start: Start) -> None:
    assert read_options(URL, name="cache", start=option).start == start
    assert read_options(URL, name="cache", begin=option).begin == start


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a/b"},
        {"name": " "},
        {"member": "host/1"},
        {"shards": 0},
        {"batch_rows": 0},
        {"checkpoint_seconds": -1.0},
        {"checkpoint_seconds": float("nan")},
        {"compression": "gzip"},
        {"changes": ["upsert"]},
        {"changes": []},
        {"start": "yesterday"},
        {"begin": "checkpoint"},
        {"tables": "orders"},
        {"on_failure": "ignore"},
    ],
)
def test_invalid_option_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid):
        read_options(URL, **{"name": "cache", **wrong})


def test_update_has_both_images_and_columns_keep_their_key_flags() -> None:
    request = read_options(URL, name="cache", changes="update", columns=["id"]).request()
    assert request["changes"] == ["update_preimage", "update_postimage"]
    assert request["columns"] == ["id", "_change_type", "_commit_version", "_commit_timestamp"]


def test_programs_of_one_user_share_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_coordination() == f"sqlite://{tmp_path}/penstock/coordination.db"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_coordination() == f"sqlite://{tmp_path}/.local/state/penstock/coordination.db"
    assert "/" not in default_member()


def test_options_print_no_secret() -> None:
    options = read_options(
        "penstock://hidden@h1/shop", name="cache", coordination="zookeeper://me:hidden@z1:2181/root"
    )
    assert "hidden" not in repr(options)
