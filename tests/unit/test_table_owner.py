# SPDX-License-Identifier: Apache-2.0
"""The pipeline that created a target's table, recorded in the table's comment."""

import pytest

from penstock.errors import OptionInvalid
from penstock.sinks.sql.table_owner import comment_of, is_taken_over, owner_of, refuse_foreign


def test_comment_names_the_pipeline_that_created_a_table() -> None:
    assert owner_of(comment_of("shop-pg")) == "shop-pg"
    assert owner_of(comment_of("")) == ""
    # Earlier versions created tables without the name of the pipeline.
    assert owner_of("made by Penstock") == ""
    assert owner_of("by hand") is None
    assert owner_of(None) is None


@pytest.mark.parametrize("owner", [None, "", "mine"])
def test_unowned_or_own_table_is_altered(owner: str | None) -> None:
    refuse_foreign("shop.t", owner, "mine", ["DROP COLUMN a"], take_over=False)
    assert not is_taken_over(owner, "mine")


def test_table_of_another_pipeline_is_altered_only_if_permitted() -> None:
    refuse_foreign("shop.t", "theirs", "mine", [], take_over=False)
    refuse_foreign("shop.t", "theirs", "mine", ["DROP COLUMN a"], take_over=True)
    refuse_foreign("shop.t", "theirs", "", ["DROP COLUMN a"], take_over=False)
    with pytest.raises(
        OptionInvalid, match="made by the pipeline theirs, and mine would alter it: DROP COLUMN a"
    ):
        refuse_foreign("shop.t", "theirs", "mine", ["DROP COLUMN a"], take_over=False)
