# SPDX-License-Identifier: Apache-2.0
"""A Drainer in a separate process, which merges the Pumps of a cluster into a log and decodes the log.

    python -m bench.drainer_process '{"pd": "127.0.0.1:2379", "folder": "/tmp/log", "until": 470639...}'

It prints "stalled" once the merge waits for a Pump, and at the end the fields of `Drained` as JSON.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from penstock import read_binlog
from tools.tidb.drainer import running_capture

_STALLED = "stalled"
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Drained:
    """The result of running a Drainer: rows, seconds, the CPU seconds spent on merging and on decoding, and
    its memory in bytes.
    """

    rows: int
    seconds: float
    merge_cpu: float
    decode_cpu: float
    resident_before: int
    resident_stalled: int
    resident_max: int


class DrainerProcess:
    """A running Drainer process. `result` waits for the process to end."""

    def __init__(self, pd: str, folder: Path, until: int) -> None:
        order = json.dumps({"pd": pd, "folder": str(folder), "until": until})
        words = [sys.executable, "-m", "bench.drainer_process", order]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def wait_until_stalled(self) -> None:
        """Wait until the merge has stopped reading."""
        assert self._process.stdout is not None
        # The process also writes its log lines to this stream.
        assert any(line == f"{_STALLED}\n" for line in self._process.stdout), "it ended"

    def result(self) -> Drained:
        """Wait for the Drainer to end, and return the figures that it printed."""
        assert self._process.stdout is not None
        lines = self._process.stdout.readlines()
        assert self._process.wait() == 0, lines
        return Drained(**json.loads(lines[-1]))

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def _drain(pd: str, folder: Path, until: int) -> Drained:
    memory = psutil.Process().memory_info
    before, cpu, clock = memory().rss, time.process_time(), time.monotonic()
    stalled = 0
    with running_capture(pd, folder) as capture:
        while (status := capture.status())["commit_ts"] is None or status["commit_ts"] < until:
            if not stalled and "the merge waits" in (status["why"] or ""):
                stalled = memory().rss
                print(_STALLED, flush=True)
            # Check rarely, because each check costs processor time.
            time.sleep(_LOOK_SECONDS)
    merged, seconds = time.process_time(), time.monotonic() - clock
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows = sum(len(batch) for batch in read_binlog(folder))
    return Drained(rows, seconds, merged - cpu, time.process_time() - merged, before, stalled, most)


if __name__ == "__main__":
    options: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(asdict(_drain(options["pd"], Path(options["folder"]), options["until"]))))
