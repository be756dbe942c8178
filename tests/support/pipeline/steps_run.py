# SPDX-License-Identifier: Apache-2.0
"""Create steps from their options, and run changes through them."""

from collections.abc import Iterable
from typing import Any

from penstock.changes import Changes
from penstock.pipeline.step import Step, make_step, run_steps, settings_of, target_through
from tests.support.pipeline.changes_made import rows_schema, target_of

ORDERS = target_of(
    {"id": "bigint", "status": "varchar(20)", "email": "varchar(100)", "total": "decimal(10,2)"},
    unique=[("email",)],
)


def step(verb: str, told: Any) -> Step:
    return make_step(verb, settings_of(verb).model_validate(told))


def rows(changes: Changes) -> list[tuple[Any, ...]]:
    """Return each row as its kind and its own columns' values."""
    found = changes.rows.to_pylist()
    return [(row["_change_type"], *(row[name] for name in changes.target.column_names)) for row in found]


def run(chain: Step | Iterable[Step], changes: Changes) -> Changes:
    """Return the only output of the steps, after checking its target and schema."""
    steps = [chain] if isinstance(chain, Step) else list(chain)
    (found,) = run_steps(steps, changes)
    assert isinstance(found, Changes)
    target = target_through(steps, changes.target)
    assert found.target == target
    assert found.rows.schema.equals(rows_schema(found.target))
    return found
