# SPDX-License-Identifier: Apache-2.0
"""Reports, as a metric, how many entries are in the dead letters of a pipeline.

Another process may replay or purge entries, so the entries are counted at intervals. Because an object store
may be slow to answer, a separate thread counts them, and a scrape reports the thread's last counts.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from penstock.errors import PenstockError
from penstock.pipeline.dead_letter import count_letters
from penstock.pipeline.settings import PipelineSettings
from penstock.telemetry.readings import Readings, Report

_PAUSE_SECONDS = 60.0

_log = structlog.get_logger(__name__)


@contextmanager
def counting_letters(settings: PipelineSettings) -> Iterator[Report]:
    """Count the entries of each sink while the block runs. Yield a function that adds the numbers to a
    scrape.

    No number is reported for a sink whose dead letter cannot be listed.
    """
    ended = threading.Event()
    counts: dict[str, int] = {}

    def count() -> None:
        while not ended.is_set():
            for sink in settings.each_sink():
                try:
                    counts[sink.sink.name] = count_letters(sink)
                except PenstockError as problem:
                    counts.pop(sink.sink.name, None)
                    _log.warning("a dead letter cannot be listed", sink=sink.sink.name, why=str(problem))
            ended.wait(_PAUSE_SECONDS)

    def read(readings: Readings) -> None:
        for sink, number in counts.copy().items():
            readings.add("penstock_pipeline_dead_letters", number, pipeline=settings.name, sink=sink)

    # The thread may be waiting for the object store when the block ends, so do not join it.
    threading.Thread(target=count, name="dead-letters", daemon=True).start()
    try:
        yield read
    finally:
        ended.set()
