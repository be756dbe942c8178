# SPDX-License-Identifier: Apache-2.0
"""Writers that commit single rows at a steady rate, in a separate process: `python -m bench.writers`."""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pymysql

WRITERS = 2
_END_SECONDS_MAX = 120.0
_ROOT = Path(__file__).parents[1]


@contextmanager
def writing(port: int, table: str, per_second: float, tables: int = 1) -> Iterator[list[float]]:
    """Commit `per_second` rows per second into `table (note)` while the block runs.

    With several tables, the rows alternate between them. The tables' names end with their number, from 0.
    After the block, the yielded list contains the seconds that each statement took.
    """
    words = [sys.executable, "-m", "bench.writers", str(port), table, str(per_second), str(tables)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, text=True)
    seconds: list[float] = []
    try:
        yield seconds
    finally:
        # The writers end when the other end of the pipe is closed.
        output, _ = process.communicate(timeout=_END_SECONDS_MAX)
        assert process.returncode == 0, "the writers failed"
        seconds += json.loads(output)


def write(names: list[str], port: int, per_second: float, stop: threading.Event) -> list[float]:
    """Commit at the given rate until stopped, and return the seconds that each statement took.

    The rate is divided equally among the connections.
    """
    pause = WRITERS / per_second
    seconds: list[float] = []

    def run_writer(number: int) -> None:
        connection = pymysql.connect(host="127.0.0.1", port=port, user="root", autocommit=True)
        with connection, connection.cursor() as cursor:
            due = time.monotonic()
            turns = itertools.cycle(names[number:] + names[:number])
            while not stop.wait(max(0.0, due - time.monotonic())):
                begun = time.perf_counter()
                cursor.execute(f"INSERT INTO {next(turns)} (note) VALUES ('arrives')")
                seconds.append(time.perf_counter() - begun)
                due += pause

    # Start the writers at different tables, so that they do not all wait for the same table.
    begins = [number * len(names) // WRITERS for number in range(WRITERS)]
    threads = [threading.Thread(target=run_writer, args=(number,)) for number in begins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def main() -> None:
    """Write until standard input ends."""
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    port, table, per_second, tables = sys.argv[1:]
    names = [table] if tables == "1" else [f"{table}{number}" for number in range(int(tables))]
    print(json.dumps(write(names, int(port), float(per_second), stop)))


if __name__ == "__main__":
    main()
