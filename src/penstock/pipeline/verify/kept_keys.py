# SPDX-License-Identifier: Apache-2.0
"""Determines which key columns have the same values in the target as in the source."""

from collections.abc import Iterable

from penstock.pipeline.settings import StepSettings
from penstock.pipeline.steps.map import Settings as Map
from penstock.pipeline.steps.mask import Settings as Mask

# Steps that do not change values of existing columns.
_KEEPING_VALUES = frozenset({"filter", "only", "dedupe", "soft_delete", "route", "shard"})


def keeps_column(steps: Iterable[StepSettings], name: str) -> bool:
    """Return whether steps leave a column's values and name unchanged.

    False for a user function, whose effect is unknown.
    """
    wanted = name.casefold()
    return all(_leaves_unchanged(step, wanted) for step in steps)


def _leaves_unchanged(step: StepSettings, wanted: str) -> bool:
    settings = step.settings
    if isinstance(settings, Mask):
        return wanted not in {name.casefold() for name in settings.columns}
    if isinstance(settings, Map):
        expressions = {name for name, text in (settings.columns or {}).items() if text is not None}
        names = {*expressions, *settings.add, *settings.cast, *settings.rename, *settings.rename.values()}
        return wanted not in {name.casefold() for name in names}
    return step.verb in _KEEPING_VALUES
