# SPDX-License-Identifier: Apache-2.0
"""A subscriber that appends every received row to a file before it acks, so that the file survives a kill.

    python -m tests.support.programs.record RECORD URL COORDINATION TABLE SHARDS

A line holds: nanoseconds of the monotonic clock, shard, token, commit version, key, step, and a full stop,
which marks the line as complete.
"""

import os
import signal
import sys
import threading
import time

import structlog

from penstock.client import ChangeBatch, Subscriber
from penstock.errors import TransientError

# This line is printed to standard error once SIGTERM stops the process in order.
STARTED = "started"

SESSION_SECONDS = 2.0
CHECKPOINT_SECONDS = 0.3

# The backoff while the daemon or the store is down.
_PAUSE_SECONDS = 0.2


def main() -> None:
    """Consume until SIGTERM, and retry while the daemon or the store is down."""
    record, url, coordination, table, shards = sys.argv[1:]
    # Log as text: people read the log of a killed process.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    ending = False
    running: list[Subscriber] = []

    def end(*_: object) -> None:
        nonlocal ending
        ending = True
        for subscriber in running:
            # A signal handler may run while the interrupted thread holds any lock, so a separate thread has
            # to wait.
            threading.Thread(target=subscriber.stop).start()

    def keep(batch: ChangeBatch) -> None:
        began = time.monotonic_ns()
        rows = batch.to_arrow()
        kept = zip(*(rows.column(name).to_pylist() for name in ("_commit_version", "k", "step")), strict=True)
        of_batch = f"{began} {batch.shard} {batch.token}"
        lines = [f"{of_batch} {version} {key} {step} .\n" for version, key, step in kept]
        os.write(file, "".join(lines).encode())

    if os.fstat(file).st_size:
        # A process killed during its write has left an incomplete line.
        os.write(file, b"\n")
    signal.signal(signal.SIGTERM, end)
    print(STARTED, file=sys.stderr, flush=True)
    while not ending:
        subscriber = Subscriber(
            url,
            name="records",
            tables=[table],
            shards=int(shards),
            changes=["update_postimage"],
            columns=["k", "step"],
            begin="earliest",
            coordination=coordination,
            session_seconds=SESSION_SECONDS,
            checkpoint_seconds=CHECKPOINT_SECONDS,
        )
        running[:] = [subscriber]
        if ending:
            # The signal arrived before a subscriber was created.
            break
        try:
            subscriber.run(keep)
        except TransientError as problem:
            print(f"again: {problem}", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
