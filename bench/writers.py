# SPDX-License-Identifier: Apache-2.0
"""Writers that commit single rows at a steady rate, in a separate process: `python -m bench.writers`."""

import itertools
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
def writing(port: int, table: str, per_second: float, tables: int = 1) -> Iterator[None]:
    """Commit this many rows per second into `table (note)` while the block runs.

    With several tables, the rows alternate between them. Their names end with their number, from 0.
    """
    words = [sys.executable, "-m", "bench.writers", str(port), table, str(per_second), str(tables)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, cwd=_ROOT)
    try:
        yield
    finally:
        # The writers end when the other end of the pipe is closed.
        process.communicate(timeout=_END_SECONDS_MAX)
        assert process.returncode == 0, "the writers failed"


def write(names: list[str], port: int, per_second: float, stop: threading.Event) -> None:
    """Commit at the rate until stopped. Each connection has its share of the rate."""
    pause = WRITERS / per_second

    def run_writer(number: int) -> None:
        connection = pymysql.connect(host="127.0.0.1", port=port, user="root", autocommit=True)
        with connection, connection.cursor() as cursor:
            due = time.monotonic()
            turns = itertools.cycle(names[number:] + names[:number])
            while not stop.wait(max(0.0, due - time.monotonic())):
                cursor.execute(f"INSERT INTO {next(turns)} (note) VALUES ('arrives')")
                due += pause

    # Start the writers at different tables, so that they do not all wait for the same table.
    begins = [number * len(names) // WRITERS for number in range(WRITERS)]
    threads = [threading.Thread(target=run_writer, args=(number,)) for number in begins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Write until standard input ends."""
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    port, table, per_second, tables = sys.argv[1:]
    names = [table] if tables == "1" else [f"{table}{number}" for number in range(int(tables))]
    write(names, int(port), float(per_second), stop)


if __name__ == "__main__":
    main()
