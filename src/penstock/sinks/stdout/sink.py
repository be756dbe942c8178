# SPDX-License-Identifier: Apache-2.0
"""Changes as JSON lines on the standard output of the process that runs the pipeline."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from penstock.changes import Changes, Target
from penstock.settings.values import Section
from penstock.sinks.messages import messages_of
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Receipt, Sink, Spread, Writer

EXTRA = ""


class Settings(Section):
    """The format of the lines."""

    format: Literal["debezium", "debezium_schema", "maxwell", "canal_flat", "json"] = Field(
        default="json", description="the message format; json is Penstock's own"
    )


class StdoutSink(Sink):
    """Writes lines to standard output. If tasks run in other processes, the lines appear in the output of
    those processes.
    """

    kind = "stdout"
    delivery = Delivery.AT_LEAST_ONCE
    spread = Spread.WHOLE
    keeps_state = False
    shares_columns = False
    in_driver = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def check(self) -> Sequence[Finding]:
        return ()

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        return ()

    def prepare(self, target: Target, evolution: Evolution) -> None:
        return

    def open(self, mark: BatchMark, part: int) -> Writer:
        return _LineWriter(self.settings)


make = StdoutSink


class _LineWriter(Writer):
    """Writes lines as they arrive."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tables: Counter[str] = Counter()
        self._bytes = 0

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            lines = messages_of(changes, self._settings.format, lines=True).value
        text = b"".join(lines.to_pylist())
        # Write bytes unchanged to the buffer. A replaced stream may have no buffer.
        buffer = getattr(sys.stdout, "buffer", None)
        if buffer is None:
            sys.stdout.write(text.decode())
        else:
            sys.stdout.flush()
            buffer.write(text)
        self._tables[str(changes.target.name)] += len(changes)
        self._bytes += len(text)

    def finish(self) -> Receipt:
        sys.stdout.flush()
        return Receipt(rows=self._tables.total(), bytes=self._bytes, tables=self._tables)
