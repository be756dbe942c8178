# SPDX-License-Identifier: Apache-2.0
"""A pipeline driven step by step without Spark, for tests of code that uses a pipeline's state."""

from pathlib import Path
from typing import Any

from penstock.changes import Changes
from penstock.pipeline.load.chunks import plan_chunks
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.load.watermark import take_watermark
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.pipeline.step import Rejected, run_steps, target_through
from penstock.pipeline.verify.log_reader import LogReader
from penstock.sinks.sink import BatchMark, Evolution
from tools.servers import Server


class HandDriven:
    """Runs one pipeline step by step. `load` copies its tables and `follow` applies later changes, each up to
    the end of the source's log.

    The state is stored where `penstock run` would store it, so that readers of the state treat it like that
    of any other pipeline.
    """

    def __init__(
        self,
        source: Server,
        tables: str,
        sink: dict[str, Any],
        folder: Path,
        log: Path | None = None,
        **more: Any,
    ) -> None:
        # A source that is a captured log also names its server.
        place = {"url": source.url()} if log is None else {"path": str(log), "server": source.url()}
        written = {"source": {**place, "name": "here", "tables": [tables]}, "sink": sink}
        self.settings: PipelineSettings = pipeline_of_values({"name": "hand", **written, **more}, folder)
        self._steps = self.settings.make_steps()
        self._sink = self.settings.make_sink()
        self._number = 0
        (self.source,) = self.settings.sources
        assert self.source.server is not None
        self.address = self.source.server

    def load(self) -> None:
        """Create the target's tables and fill them with the current rows."""
        mark = take_watermark(self.address)
        made: list[Changes] = []
        for table in targets_of(self.address, self.source.tables):
            target = target_through(self._steps, table)
            if target is None:
                continue
            self._sink.prepare(target, Evolution.EVOLVE)
            where = self.settings.load.where_of(table.name.database, table.name.table)
            for chunk in plan_chunks(self.address, table):
                made += read_chunk(self.address, table, chunk, instance="here", watermark=mark, where=where)
        place = mark.position
        self._write(made, {"epoch": 0, "file": place.file, "offset": place.offset})

    def follow(self) -> None:
        """Apply the changes logged since the last call."""
        checkpoint = self._checkpoint()
        tables = {table.name: table for table in targets_of(self.address, self.source.tables)}
        log = LogReader(self.source, checkpoint.offsets["here"], tables)
        try:
            made = list(log.read())
            assert not log.redefined, log.redefined
        finally:
            log.close()
        place = log.position
        self._write(made, {"epoch": 0, "file": place.file, "offset": place.offset})

    def begin(self) -> None:
        """Record a batch up to the head, like a runner that is killed before it completes the batch."""
        state = PipelineState.open(self.settings.state, self.settings.name)
        try:
            checkpoint = state.take()
            place = take_watermark(self.address).position
            end = {"here": {"epoch": 0, "file": place.file, "offset": place.offset}}
            state.begin(BatchRecord(checkpoint.number + 1, checkpoint.offsets, end, (), (), 1))
        finally:
            state.close()

    def _checkpoint(self) -> Checkpoint:
        state = PipelineState.open(self.settings.state, self.settings.name)
        try:
            return state.checkpoint() or Checkpoint.new()
        finally:
            state.close()

    def _write(self, made: list[Changes], offset: dict[str, Any]) -> None:
        state = PipelineState.open(self.settings.state, self.settings.name)
        try:
            checkpoint = state.take()
            number = checkpoint.number + 1
            mark = BatchMark(self.settings.name, checkpoint.generation, number)
            writer = self._sink.open(mark, 0)
            for one in made:
                for passed in run_steps(self._steps, one):
                    # A step rejects rows only if the settings allow the pipeline to continue without them.
                    if not isinstance(passed, Rejected):
                        writer.write(passed)
            self._sink.commit(mark, [writer.finish()])
            state.write(
                Checkpoint(
                    checkpoint.generation, number, {"here": offset}, planned=True, token=checkpoint.token
                )
            )
        finally:
            state.close()
