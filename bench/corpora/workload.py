# SPDX-License-Identifier: Apache-2.0
"""The interface of a workload module: tables, initial rows, and procedures that write the binlog."""

import hashlib
from dataclasses import dataclass

DATABASE = "bench"

#: A row source of the numbers 1 to {count}, for statements that insert many initial rows.
NUMBERS = (
    "(WITH RECURSIVE sequence (number) AS "
    "(SELECT 1 UNION ALL SELECT number + 1 FROM sequence WHERE number < {count}) "
    "SELECT number FROM sequence) AS numbers"
)


@dataclass(frozen=True)
class Workload:
    """One kind of load. All of it is SQL that runs inside the server, so that client round trips do not limit
    the rate.

    `seed` runs once, without logging. `sessions[n]` contains the statements that set up connection n (session
    variables). Then `CALL bench.<fill[n]>(<step>)` is repeated on that connection until the binlog has the
    requested size. Sessions change disjoint rows, so they neither wait for each other nor deadlock.
    """

    name: str
    tables: tuple[str, ...]
    seed: tuple[str, ...]
    sessions: tuple[tuple[str, ...], ...]
    fill: tuple[str, ...]
    step: int

    @property
    def definitions(self) -> tuple[str, ...]:
        """Return the statements of `seed` that create tables."""
        return tuple(statement for statement in self.seed if statement.strip().startswith("CREATE TABLE"))

    @property
    def fingerprint(self) -> str:
        """Return a digest of everything that affects the file; an edited workload is generated again."""
        text = "\0".join(
            [self.name, *self.seed, *(line for session in self.sessions for line in session), *self.fill]
        )
        return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:12]
