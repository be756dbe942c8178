# SPDX-License-Identifier: Apache-2.0
"""Calls functions that are not part of Penstock: a subscriber's callback, or a step's function."""

from types import TracebackType
from typing import Self


class Attempt:
    """Runs a block of the user's code. `failure` is the exception that the code raised, of any class, or
    None.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # An interrupt is not a failure and propagates.
        self.failure = error if isinstance(error, Exception) else None
        return self.failure is not None
