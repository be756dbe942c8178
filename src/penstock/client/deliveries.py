# SPDX-License-Identifier: Apache-2.0
"""Counts the batches that a member has delivered to its program. Thread-safe: each shard has its own
thread.
"""

import threading
from collections import Counter

from penstock.client.flow import Step

ROWS, ERRORS = "rows", "errors"


class Deliveries:
    """Counts delivered rows, failed calls of the user's code, and the steps taken after them: the values of
    `Step`.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def delivered(self, rows: int) -> None:
        """Count the rows of a batch that was handed out."""
        with self._lock:
            self._counts[ROWS] += rows

    def failed(self, step: Step) -> None:
        """Count a failed call and the step that follows it."""
        with self._lock:
            self._counts[ERRORS] += 1
            self._counts[step.value] += 1

    def counts(self) -> Counter[str]:
        """Return the current counts."""
        with self._lock:
            return Counter(self._counts)
