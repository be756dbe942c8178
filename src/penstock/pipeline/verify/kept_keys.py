# SPDX-License-Identifier: Apache-2.0
"""Which columns of a key reach the target with the values that they have in the source."""

from collections.abc import Iterable

from penstock.pipeline.settings import StepSettings
from penstock.pipeline.steps.map import Settings as Map
from penstock.pipeline.steps.mask import Settings as Mask

# Steps that change no value of the columns that a table has when it reaches them.
_KEEPING_VALUES = frozenset({"filter", "only", "dedupe", "soft_delete", "route", "shard"})


def keeps_column(steps: Iterable[StepSettings], name: str) -> bool:
    """Tell whether steps leave a column's values and name as they are. Of a user's own function that is not
    known."""
    wanted = name.casefold()
    return all(_leaves(step, wanted) for step in steps)


def _leaves(step: StepSettings, wanted: str) -> bool:
    settings = step.settings
    if isinstance(settings, Mask):
        return wanted not in {name.casefold() for name in settings.columns}
    if isinstance(settings, Map):
        expressions = {name for name, text in (settings.columns or {}).items() if text is not None}
        names = {*expressions, *settings.add, *settings.cast, *settings.rename, *settings.rename.values()}
        return wanted not in {name.casefold() for name in names}
    return step.verb in _KEEPING_VALUES
