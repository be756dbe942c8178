# SPDX-License-Identifier: Apache-2.0
"""Put rows into a pipeline's dead letter, without a run."""

from penstock.changes import Changes
from penstock.errors import StepFailed
from penstock.pipeline.dead_letter import DeadLetterPart, dead_letters
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.step import Rejected, run_steps
from penstock.sinks.sink import BatchMark
from tests.support.pipeline.changes_made import changes_of, insert, target_of

MARK = BatchMark("shop", "abc", 7)


def reject_row(settings: PipelineSettings) -> str:
    """Add one row to the dead letter; return the name of its entry."""
    rejected = changes_of(target_of({"id": "bigint"}), insert(1, id=1))
    part = DeadLetterPart(settings.dead_letter, MARK, 0)
    part.add(Rejected(rejected, "map", StepFailed("it is no number")), rejected)
    part.finish()
    (letter,) = dead_letters(settings)
    return letter.name


def put_aside(settings: PipelineSettings, changes: Changes, mark: BatchMark = MARK, part: int = 3) -> int:
    """Add the rows that a step of a pipeline rejects to the dead letter; return their number."""
    aside = DeadLetterPart(settings.dead_letter, mark, part)
    for outcome in run_steps(settings.make_steps(), changes):
        if isinstance(outcome, Rejected):
            aside.add(outcome, changes)
    aside.finish()
    return aside.rows
