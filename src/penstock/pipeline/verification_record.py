# SPDX-License-Identifier: Apache-2.0
"""The outcome of the last comparison of a whole sink, stored in its state for alerts, metrics and pages.

The record is `/pipelines/NAME/verified`, next to the other records of the pipeline or sink. One record covers
all shards.
"""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.coordinate.store import reading_record
from penstock.pipeline.resnapshot import HINT_STATE
from penstock.pipeline.state import PipelineState

if TYPE_CHECKING:
    from penstock.pipeline.verify.verify import Verification

_NAME = "verified"


@dataclass(frozen=True)
class VerificationRecord:
    """The outcome of a comparison of the source with the target.

    Times are in microseconds since 1970, UTC. `equal_us` is the time of the last comparison without a
    difference, 0 if there was none. `differences` counts the rows that differ and were not repaired.
    `complete` is false if some rows were not compared.
    """

    time_us: int
    equal_us: int
    tables: int
    rows: int
    differences: int
    complete: bool

    @classmethod
    def of(cls, verification: "Verification", before: Self | None) -> Self:
        """Return the record of a comparison that ends now; `before` is the record of the previous one."""
        now_us = time.time_ns() // 1000
        differences = verification.remaining
        is_equal = not differences and verification.whole
        return cls(
            now_us,
            now_us if is_equal else 0 if before is None else before.equal_us,
            len(verification.results),
            sum(result.source_rows for result in verification.results),
            differences,
            verification.whole,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def record_verification(state: PipelineState, verification: "Verification") -> None:
    """Record a comparison of all tables of a sink, over all of its shards. Raises CoordinationLost."""
    before = read_verification(state)
    state.put_large(_NAME, VerificationRecord.of(verification, before).to_json())


def read_verification(state: PipelineState) -> VerificationRecord | None:
    """Return the last comparison of a sink, None if there is none. Raises CoordinationLost, SchemaInvalid."""
    value = state.get_large(_NAME)
    if value is None:
        return None
    with reading_record("the last comparison of a pipeline", HINT_STATE):
        return VerificationRecord(**value)
