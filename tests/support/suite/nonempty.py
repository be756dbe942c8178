# SPDX-License-Identifier: Apache-2.0
"""A guard for assertions in loops, because a loop over an empty collection proves nothing."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


def each(collection: Iterable[_Item], least: int = 1) -> Iterator[_Item]:
    """Yield the elements of a computed collection. Fails after the last element if there are fewer than
    `least`.
    """
    count = 0
    for item in collection:
        count += 1
        yield item
    assert count >= least, f"the loop ran {count} times, and the test needs at least {least}"
