# SPDX-License-Identifier: Apache-2.0
"""Runs a reader in another language, and parses its report of the rows that it read: `PROGRAM PORT FILE END
SECONDS`.
"""

import subprocess
from collections.abc import Sequence

from bench.corpora.corpus import FILE_NAME
from bench.peers.peer import Job, Tally


def read_rows(command: Sequence[str], job: Job) -> Tally:
    """Run a reader on the served corpus, to its end or for `job.seconds_max`. It prints its counts."""
    seconds = int(job.seconds_max or 0)
    words = [*command, str(job.port), FILE_NAME, str(job.corpus.bytes), str(seconds)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    inserts, updates, deletes, offset = map(int, done.stdout.split())
    kinds = {"insert": inserts, "update": updates, "delete": deletes}
    # A reader may withhold the last event, which names the next file.
    complete = sum(kinds.values()) == job.corpus.rows
    read = job.corpus.bytes if complete else offset
    return Tally(sum(kinds.values()), read, kinds, complete, "" if complete else f"first {seconds} s")
