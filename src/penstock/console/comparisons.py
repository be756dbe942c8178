# SPDX-License-Identifier: Apache-2.0
"""Comparisons of pipelines' targets with their sources by `penstock verify`, one at a time.

Each comparison runs in a separate process, because it reads all rows of both sides and must not use the
console's memory. The newest result for each pipeline and sink is kept until the console ends.
"""

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from penstock.errors import OptionInvalid, QuotaReached

_log = structlog.get_logger(__name__)

# Exit codes: equal or repaired, different, and not everything compared; see `penstock verify`.
_OUTCOMES = (0, 1, 5)
# The number of differing keys of a table that are read in full, and the number that a repair corrects at
# once.
_KEYS_MAX, REPAIRED_KEYS_MAX = 1000, 10_000
# The number of differences that are kept for the page and the files.
_DIFFERENCES_MAX = 1000
_ERROR_CHARACTERS_MAX = 2000

# The key of a comparison: the number of a state store, and the names of a pipeline and a sink.
ComparisonKey = tuple[int, str, str]


@dataclass(frozen=True)
class Comparison:
    """A running or completed comparison. Times are microseconds UTC since 1970.

    `tables` contains the counts of each table, and `differences` the first differing rows, both as they were
    before any repair. `repaired` counts the rows that the repair has written, and `requests` contains its
    requests that the running pipeline read rows again. `error` is the reason if there is no result, and "" if
    there is a result or the comparison is still running.
    """

    began_us: int
    is_repair: bool
    ended_us: int | None = None
    tables: Sequence[Mapping[str, Any]] = ()
    differences: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    repaired: int = 0
    requests: int = 0
    error: str = ""


class Comparisons:
    """The comparisons of a console.

    Thread-safe. `command` is the program that runs a comparison; the verb and its options are appended to it.
    The comparison's process ends when this process ends.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._newest: dict[ComparisonKey, Comparison] = {}

    def newest(self, key: ComparisonKey) -> Comparison | None:
        """Return the running or most recent comparison, None if there was none."""
        with self._lock:
            return self._newest.get(key)

    def start(self, key: ComparisonKey, file: Path, *, repair: bool) -> None:
        """Start a comparison. Raises QuotaReached while another comparison runs, and OptionInvalid if there
        is no command to run.
        """
        if not self._command:
            raise OptionInvalid(
                "this console starts no comparisons", hint="Run it: penstock verify pipeline.yaml"
            )
        with self._lock:
            if any(comparison.ended_us is None for comparison in self._newest.values()):
                raise QuotaReached("another comparison is running", hint="Wait until it has ended")
            begun = Comparison(_now_us(), repair)
            # The process ends when the thread that started it ends, so the thread waits for the process.
            arguments = (key, file, begun)
            threading.Thread(target=self._run, args=arguments, name="comparison", daemon=True).start()
            # Record the comparison only after its thread has started, because a recorded comparison is ended
            # only by its thread. The thread waits for the lock before it records the end.
            self._newest[key] = begun

    def _run(self, key: ComparisonKey, file: Path, begun: Comparison) -> None:
        try:
            ended = self._compare(key, file, begun)
        except (OSError, ValueError, LookupError, TypeError) as problem:
            # The command could not be run, or its output had an unexpected format.
            _log.exception("a comparison failed", pipeline=key[1])
            ended = replace(begun, error=str(problem) or type(problem).__name__)
        with self._lock:
            self._newest[key] = replace(ended, ended_us=_now_us())

    def _compare(self, key: ComparisonKey, file: Path, begun: Comparison) -> Comparison:
        _, _, sink = key
        with tempfile.TemporaryDirectory(prefix="penstock-comparison-") as folder:
            output = Path(folder) / "differences.jsonl"
            keys_max = REPAIRED_KEYS_MAX if begun.is_repair else _KEYS_MAX
            options = ["--json", "--limit", str(keys_max), "--output", str(output)]
            options += ["--sink", sink] if sink else []
            options += ["--repair"] if begun.is_repair else []
            done = subprocess.run(
                [*self._command, "verify", str(file), *options],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode not in _OUTCOMES or not output.exists():
                why = done.stderr.strip()[-_ERROR_CHARACTERS_MAX:]
                return replace(begun, error=why or f"it ended with {done.returncode}")
            with output.open(encoding="utf-8") as lines:
                differences = [json.loads(line) for line in islice(lines, _DIFFERENCES_MAX)]
            tables = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            compared = replace(begun, tables=tables, differences=differences)
            if not begun.is_repair:
                return compared
            *tables, repair = tables
            return replace(
                compared, tables=tables, repaired=repair["repaired"], requests=len(repair["requests"])
            )


def _now_us() -> int:
    return time.time_ns() // 1000
