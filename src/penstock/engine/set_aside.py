# SPDX-License-Identifier: Apache-2.0
"""Lets a run continue without a source that has failed, until that source answers again.

A failed source is set aside together with its position, its loads and its requests, and the pipeline's other
sources continue. A thread checks the source periodically. When the source answers, the run takes it back.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from penstock.engine.source_log import SourceLog
from penstock.errors import CoordinationLost, LeaseLost, OperatorError, PenstockError, TransientError
from penstock.mysql.connection import connect
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.retry import Backoff, Retry
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)

# Pauses before a source is checked again. They grow, because taking a source back restarts the run.
_PAUSES = Backoff(first=5.0, longest=300.0)
# How long a source is retried, while the other sources wait, before it is set aside.
ASIDE_SECONDS = 10.0


@dataclass
class _Aside:
    """A source that failed: the reason, and the number of failures since it last worked."""

    problem: PenstockError
    failures: int = 1
    # Whether the source answers again.
    has_returned: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class SourcesAside:
    """The sources of one run that are set aside, by name.

    `ask` checks a source and raises a PenstockError if the source does not answer.
    """

    def __init__(self, settings: PipelineSettings, ask: Callable[[PipelineSource], None]) -> None:
        self._sources = {source.name: source for source in settings.sources}
        self._ask = ask
        self._aside: dict[str, _Aside] = {}
        # Failures since the last batch, including those of sources that were taken back.
        self._failures: dict[str, int] = {}

    @property
    def problems(self) -> Mapping[str, PenstockError]:
        """Why each source that is set aside failed."""
        return {name: aside.problem for name, aside in self._aside.items()}

    @property
    def has_returned(self) -> bool:
        """Whether a source that is set aside answers again."""
        return any(aside.has_returned.is_set() for aside in self._aside.values())

    def active(self, settings: PipelineSettings) -> PipelineSettings:
        """Return the settings without the sources that are set aside."""
        return replace(
            settings, sources=tuple(source for source in settings.sources if source.name not in self._aside)
        )

    @property
    def has_several(self) -> bool:
        """Whether the pipeline has several sources."""
        return len(self._sources) > 1

    def may_set_aside(self, problem: PenstockError) -> bool:
        """Return whether an error may come from a single source while other sources are active."""
        is_of_state = isinstance(problem, (CoordinationLost, LeaseLost))
        return len(self._sources) - len(self._aside) > 1 and not is_of_state

    def set_aside(self, name: str, problem: PenstockError) -> None:
        """Continue without a source, and check it from time to time."""
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        aside = self._aside[name] = _Aside(problem, failures)
        _log.error(
            "a source failed and is set aside, the other sources continue", source=name, why=str(problem)
        )
        threading.Thread(
            target=self._watch, args=(self._sources[name], aside), name=f"ask-{name}", daemon=True
        ).start()

    def take_back(self, *, everything: bool = False) -> None:
        """Continue with the sources that answer again, or with all sources."""
        for name, aside in list(self._aside.items()):
            if everything or aside.has_returned.is_set():
                _log.warning("a source that was set aside is read again", source=name)
                aside.ended.set()
                del self._aside[name]

    def worked(self, names: Iterable[str]) -> None:
        """Reset the failures of sources that a batch has read."""
        for name in names:
            self._failures.pop(name, None)

    def close(self) -> None:
        """Stop asking."""
        for aside in self._aside.values():
            aside.ended.set()

    def _watch(self, source: PipelineSource, aside: _Aside) -> None:
        retry = Retry("a source that was set aside does not answer", backoff=_PAUSES, stop=aside.ended)
        # The pauses go on growing from where the last ones ended.
        retry.failures = aside.failures - 1
        problem = aside.problem
        while not aside.ended.is_set():
            # Without a shortest pause, a source that fails in every batch could be taken back at once.
            retry.wait(problem, at_least=_PAUSES.bound(retry.failures + 1) / 2, source=source.name)
            if aside.ended.is_set():
                return
            try:
                self._ask(source)
            except PenstockError as again:
                problem = again
                continue
            aside.has_returned.set()
            return


def named(source: str, problem: PenstockError) -> PenstockError:
    """Return a source's error with the source's name added."""
    message = f"source {source}: {problem.message}"
    return type(problem)(message, position=problem.position, hint=problem.hint)


def ask_source(settings: PipelineSettings, source: PipelineSource) -> None:
    """Query a source's log for its end, and its server for a session. Raises the error if either query
    fails.
    """
    with closing(SourceLog(source, settings, cores=1)) as log:
        log.target()
    if source.server is not None:
        connect(source.server).close()


def failed_sources(
    logs: Mapping[str, SourceLog], offsets: Mapping[str, Mapping[str, Any]], problem: PenstockError
) -> dict[str, PenstockError]:
    """Return the sources that may have caused an error, each with the error that it raises when queried.

    A source that fails with a transient error when queried always counts. A source that fails with any other
    error counts only if that error has the same class as `problem`.
    """
    if not isinstance(problem, TransientError | OperatorError):
        return {}
    failed: dict[str, PenstockError] = {}
    for name, log in logs.items():
        try:
            if log.source.server is not None:
                connect(log.source.server).close()
            if name in offsets:
                log.next(log.resume(Offset.from_json(offsets[name])), None)
            else:
                log.target()
        except PenstockError as error:
            if isinstance(error, TransientError) or type(error) is type(problem):
                failed[name] = error
    return failed
