# SPDX-License-Identifier: Apache-2.0
"""Which pipeline made a target's table, as the table's comment tells, and who may alter it."""

from collections.abc import Sequence

from penstock.errors import OptionInvalid

_MADE_HERE = "made by Penstock"
_OF_PIPELINE = f"{_MADE_HERE} for "


def comment_of(pipeline: str) -> str:
    """Return the comment of a table that a pipeline makes, "" for none that has a name."""
    return f"{_OF_PIPELINE}{pipeline}" if pipeline else _MADE_HERE


def owner_of(comment: str | None) -> str | None:
    """Return the pipeline that made a table, "" where its comment names none, None where none made it."""
    if comment == _MADE_HERE:
        return ""
    return comment.removeprefix(_OF_PIPELINE) if comment and comment.startswith(_OF_PIPELINE) else None


def is_taken_over(owner: str | None, pipeline: str) -> bool:
    """Tell whether a pipeline that alters a table is another one than made it."""
    return bool(owner and pipeline and owner != pipeline)


def refuse_foreign(
    table: str, owner: str | None, pipeline: str, clauses: Sequence[str], *, take_over: bool
) -> None:
    """Raise OptionInvalid where a pipeline would alter a table that another one made, and is not told to."""
    if clauses and is_taken_over(owner, pipeline) and not take_over:
        raise OptionInvalid(
            f"the target's table {table} was made by the pipeline {owner}, and {pipeline} would alter it:"
            f" {'; '.join(clauses)[:300]}",
            hint="Write to another table by a route step; or take this one over: take_over: true in the sink",
        )
