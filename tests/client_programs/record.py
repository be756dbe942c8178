# SPDX-License-Identifier: Apache-2.0
"""A subscriber that appends every row it is given to a file, before it acks: what a kill leaves is the truth.

    python -m tests.client_programs.record RECORD URL COORDINATION TABLE SHARDS

A line is: nanoseconds of the monotonic clock, shard, token, commit version, key, step.
"""

import os
import signal
import sys
import threading
import time

import structlog

from penstock.client import ChangeBatch, Subscriber
from penstock.errors import TransientError

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
        for one in running:
            # A signal comes between any two instructions, with any lock held: a thread of its own can wait.
            threading.Thread(target=one.stop).start()

    def keep(batch: ChangeBatch) -> None:
        began = time.monotonic_ns()
        rows = batch.to_arrow()
        kept = zip(*(rows.column(name).to_pylist() for name in ("_commit_version", "k", "step")), strict=True)
        lines = [f"{began} {batch.shard} {batch.token} {version} {key} {step}" for version, key, step in kept]
        # One call, so that a kill leaves all of the batch or nothing.
        os.write(file, ("\n".join(lines) + "\n").encode())

    signal.signal(signal.SIGTERM, end)
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
        try:
            subscriber.run(keep)
        except TransientError as problem:
            print(f"again: {problem}", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
