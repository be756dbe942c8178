# SPDX-License-Identifier: Apache-2.0
"""A copy of many records in memory, so that a page about thousands of records queries its store only once."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from penstock.coordinate.store import CoordinationStore, Record, below_of, is_below


def snapshot_of(store: CoordinationStore, path: str, wanted: Callable[[str], bool]) -> CoordinationStore:
    """Return a store that serves `get` and `list` from a copy of another store's records below a path.

    Records for which `wanted` returns False are listed, but have no values. Raises CoordinationLost.
    """
    return cast(CoordinationStore, _Snapshot(store.url, path, store.read_below(path, wanted)))


class _Snapshot:
    def __init__(self, url: str, top: str, records: Mapping[str, Record | None]) -> None:
        self.url = url
        self._top = top
        self._records = records
        self._paths = sorted(records)

    def get(self, path: str, *, latest: bool = False) -> Record | None:
        """Return the record at a path."""
        assert is_below(path, self._top), f"{path} is not in the snapshot of {self._top}"
        if path not in self._records:
            return None
        record = self._records[path]
        assert record is not None, f"{path} was not wanted"
        return record

    def list(self, path: str) -> Sequence[str]:
        """Return the names one level below a path."""
        assert is_below(path, self._top), f"{path} is not in the snapshot of {self._top}"
        below = below_of(path)
        names: dict[str, None] = {}
        for index in range(bisect_left(self._paths, below), len(self._paths)):
            if not self._paths[index].startswith(below):
                break
            names[self._paths[index].removeprefix(below).partition("/")[0]] = None
        return sorted(names)
