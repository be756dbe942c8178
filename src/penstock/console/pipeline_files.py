# SPDX-License-Identifier: Apache-2.0
"""The pipeline files of the console, for information that a state store does not have: rejected rows, steps
and sinks.

A file is read again for each request, so that the console shows its current content.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.changes import Target
from penstock.console.pipeline_states import PipelineStates
from penstock.errors import PenstockError, SourceMissing
from penstock.pipeline.dead_letter import DeadLetter, Replayed, purge, replay
from penstock.pipeline.settings import PipelineSettings, load_pipeline, place_of_state

# Steps that may rename columns.
RENAMING_STEPS = ("map", "python")


class PipelineFiles:
    """The pipeline files of the console. Thread-safe. Every method reads files."""

    def __init__(self, paths: Sequence[Path], states: PipelineStates) -> None:
        self._paths = tuple(paths)
        self._states = states
        # Held while a replay or a purge runs. Two concurrent replays of an entry would write its rows twice,
        # and a purge during a replay would lose them.
        self._replaying = threading.Lock()

    def find(self, store: int, name: str) -> Path | None:
        """Return the file of a pipeline, None if the console has no file for it."""
        for path in self._paths:
            try:
                location = place_of_state(path)
            except PenstockError:
                # Skip this file: the other files may still be readable. The page of the affected pipeline
                # reports that it has no file.
                continue
            if location.name == name and self._states.url(store) == location.state:
                return path
        return None

    def path(self, store: int, name: str) -> Path:
        """Return the file of a pipeline. Raises SourceMissing."""
        path = self.find(store, name)
        if path is None:
            raise SourceMissing(
                f"the console does not know the file of the pipeline {name}",
                hint="Name it: penstock console --pipelines FILE, or console.pipelines in penstock.yaml",
            )
        return path

    def load(self, store: int, name: str) -> PipelineSettings:
        """Return the settings of a pipeline with all of its sinks. Raises SourceMissing, OptionInvalid."""
        return load_pipeline(self.path(store, name))

    def settings(self, store: int, name: str, sink: str) -> PipelineSettings:
        """Return the settings of a pipeline's sink. Raises SourceMissing, OptionInvalid."""
        return self.load(store, name).of_sink(sink or None)

    def replay(self, settings: PipelineSettings, entries: Sequence[str]) -> Iterator[Replayed]:
        """Replay rejected rows, one request at a time, and yield the outcome of each entry.

        Raises SourceMissing, OptionInvalid.
        """
        with self._replaying:
            yield from replay(settings, entries)

    def purge(self, settings: PipelineSettings, letters: Sequence[DeadLetter], user: str, why: str) -> None:
        """Delete rejected rows for good. Waits for replays to end. Raises DiskFailed."""
        with self._replaying:
            purge(settings, letters, user=user, reason=why)


def hidden_columns(settings: PipelineSettings, target: Target) -> frozenset[str]:
    """Return the columns of a source table whose values the pipeline's steps hide from the target.

    Rejected rows are as the source sent them, so they contain the unmasked values. If a step before `mask`
    may have renamed columns, every column is returned.
    """
    hidden: set[str] = set()
    for number, step in enumerate(settings.steps):
        if step.verb != "mask":
            continue
        if any(earlier.verb in RENAMING_STEPS for earlier in settings.steps[:number]):
            return frozenset(target.column_names)
        masked = {name.casefold() for name in step.settings.columns}  # type: ignore[attr-defined]
        hidden |= {name for name in target.column_names if name.casefold() in masked}
    return frozenset(hidden)
