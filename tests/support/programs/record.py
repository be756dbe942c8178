# SPDX-License-Identifier: Apache-2.0
"""A subscriber that appends every row it is given to a file, before it acks: what a kill leaves is the truth.

    python -m tests.support.programs.record RECORD URL COORDINATION TABLE SHARDS

A line is: nanoseconds of the monotonic clock, shard, token, commit version, key, step, and a full stop, by
which a line is known to be whole.
"""

import os
import signal
import sys
import threading
import time

import structlog

from penstock.client import ChangeBatch, Subscriber
from penstock.errors import TransientError

# Says on the standard error that SIGTERM ends it in order from now on.
STARTED = "started"

SESSION_SECONDS = 2.0
CHECKPOINT_SECONDS = 0.3

# What is down comes back.
_PAUSE_SECONDS = 0.2


def main() -> None:
    """Consume until SIGTERM; whatever is down meanwhile is waited for."""
    record, url, coordination, table, shards = sys.argv[1:]
    # What a kill leaves of the log is read by people.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    ending = False
    running: list[Subscriber] = []

    def end(*_: object) -> None:
        nonlocal ending
        ending = True
        for subscriber in running:
            # A signal comes between any two instructions, with any lock held: a thread of its own can wait.
            threading.Thread(target=subscriber.stop).start()

    def keep(batch: ChangeBatch) -> None:
        began = time.monotonic_ns()
        rows = batch.to_arrow()
        kept = zip(*(rows.column(name).to_pylist() for name in ("_commit_version", "k", "step")), strict=True)
        of_batch = f"{began} {batch.shard} {batch.token}"
        lines = [f"{of_batch} {version} {key} {step} .\n" for version, key, step in kept]
        os.write(file, "".join(lines).encode())

    if os.fstat(file).st_size:
        # Whoever was killed while it wrote has left a line without its end.
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
            # The signal came before there was one to stop.
            break
        try:
            subscriber.run(keep)
        except TransientError as problem:
            print(f"again: {problem}", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
