# SPDX-License-Identifier: Apache-2.0
"""A pipeline with a TiDB cluster as a source cannot have sources of other kinds."""

import pytest

from penstock.engine.beginning import refuse_mixed
from penstock.errors import OptionInvalid

_TIDB = {"file": "tidb-binlog.000001", "offset": 4, "server_key": "tidb:7001"}
_OTHER_TIDB = {**_TIDB, "server_key": "tidb:7002"}
_MYSQL = {"file": "mysql-bin.000001", "offset": 4, "server_key": "mysql:8004385c-e5a1-11f1-b80b-02fc00000001"}
_FILES = {"file": "mysql-bin.000001", "offset": 4}


@pytest.mark.parametrize("sources", [(), (_TIDB, _OTHER_TIDB), (_MYSQL, _FILES)])
def test_sources_of_one_kind_are_accepted(sources: tuple[dict[str, object], ...]) -> None:
    offsets = {f"source {number}": offset for number, offset in enumerate(sources)}
    before = dict(offsets)
    refuse_mixed(offsets)
    assert offsets == before


@pytest.mark.parametrize("other", [_MYSQL, _FILES])
def test_tidb_and_other_sources_are_refused_by_name(other: dict[str, object]) -> None:
    with pytest.raises(OptionInvalid, match=r"TiDB clusters \(orders\)"):
        refuse_mixed({"orders": _TIDB, "stock": other})


def test_merge_is_refused_and_its_members_are_named_instead() -> None:
    with pytest.raises(OptionInvalid, match="the source shop is a merge of instances") as refused:
        refuse_mixed({"shop": {"server_key": "merge:5bd6a5a1", "epoch": 0}})
    assert "Name the instances" in str(refused.value.hint)
