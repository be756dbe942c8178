# SPDX-License-Identifier: Apache-2.0
"""Determines which pipeline created a table, and may therefore alter it, from the table's comment."""

from collections.abc import Sequence

from penstock.errors import OptionInvalid

_CREATED = "made by Penstock"
_CREATED_FOR = f"{_CREATED} for "


def comment_of(pipeline: str) -> str:
    """Return the comment of a table that a pipeline creates. `pipeline` is "" if it has no name."""
    return f"{_CREATED_FOR}{pipeline}" if pipeline else _CREATED


def owner_of(comment: str | None) -> str | None:
    """Return the pipeline that created a table.

    Returns "" if the comment names none, None if no pipeline created the table.
    """
    if comment == _CREATED:
        return ""
    return comment.removeprefix(_CREATED_FOR) if comment and comment.startswith(_CREATED_FOR) else None


def is_taken_over(owner: str | None, pipeline: str) -> bool:
    """Return whether a pipeline alters a table that another pipeline created."""
    return bool(owner and pipeline and owner != pipeline)


def refuse_foreign(
    table: str, owner: str | None, pipeline: str, clauses: Sequence[str], *, take_over: bool
) -> None:
    """Raise OptionInvalid if a pipeline would alter another pipeline's table without `take_over`."""
    if clauses and is_taken_over(owner, pipeline) and not take_over:
        raise OptionInvalid(
            f"the target's table {table} was made by the pipeline {owner}, and {pipeline} would alter it:"
            f" {'; '.join(clauses)[:300]}",
            hint="Write to another table by a route step; or take this one over: take_over: true in the sink",
        )
