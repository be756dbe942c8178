# SPDX-License-Identifier: Apache-2.0
"""Delta tables that this process has read, so that a batch reads only what their logs got since the last one.

Reading a log from its checkpoint costs more than a small commit does, and a batch may change hundreds of
tables.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow.fs
from deltalake import DeltaTable

from penstock.sinks.lake.parquet_files import Folder

# The least recently used are let go.
_TABLES_MAX = 1024

_Key = tuple[str, tuple[tuple[str, str], ...]]
_lock = threading.Lock()
_kept: OrderedDict[_Key, "_Kept"] = OrderedDict()


@dataclass(frozen=True)
class _Kept:
    """A table as of a version, whose entry in the log was of this size and time."""

    table: DeltaTable
    stamp: tuple[object, ...]


def keep(table: DeltaTable, url: str, options: Mapping[str, str], folder: Folder) -> None:
    """Keep a table for `take`. Whoever calls uses it no more."""
    stamp = _stamp(table, folder)
    if stamp is None:
        return
    key = _key(url, options)
    with _lock:
        _kept[key] = _Kept(table, stamp)
        _kept.move_to_end(key)
        while len(_kept) > _TABLES_MAX:
            _kept.popitem(last=False)


def take(url: str, options: Mapping[str, str], folder: Folder) -> DeltaTable | None:
    """Return a kept table as it is now, for the caller alone; None where it has to be read.

    That is so too where the entry of the version that is known is not the one that was there: then the table
    was made anew, or its log has been shortened. Raises what `deltalake` raises.
    """
    with _lock:
        found = _kept.pop(_key(url, options), None)
    if found is None or _stamp(found.table, folder) != found.stamp:
        return None
    found.table.update_incremental()
    return found.table


def _key(url: str, options: Mapping[str, str]) -> _Key:
    return url, tuple(sorted(options.items()))


def _stamp(table: DeltaTable, folder: Folder) -> tuple[object, ...] | None:
    entry = folder.filesystem.get_file_info(folder.file(f"_delta_log/{table.version():020}.json"))
    if entry.type != pyarrow.fs.FileType.File or entry.mtime_ns is None:
        return None
    return table.version(), entry.size, entry.mtime_ns
