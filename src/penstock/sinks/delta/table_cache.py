# SPDX-License-Identifier: Apache-2.0
"""Caches Delta tables in this process, so that a batch only reads new entries of their logs.

Reading a log from its checkpoint costs more than a small commit, and a batch may change hundreds of tables.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow.fs
from deltalake import DeltaTable

from penstock.sinks.lake.parquet_files import Folder

# The least recently used tables are evicted.
_TABLES_MAX = 8192

_Key = tuple[str, tuple[tuple[str, str], ...]]
_lock = threading.Lock()
_cache: OrderedDict[_Key, "_CachedTable"] = OrderedDict()


@dataclass(frozen=True)
class _CachedTable:
    """A table at a version, and the size and time of that version's log entry."""

    table: DeltaTable
    stamp: tuple[object, ...]


def keep(table: DeltaTable, url: str, options: Mapping[str, str], folder: Folder) -> None:
    """Cache a table for `take`. The caller must not use it afterwards."""
    stamp = _stamp(table, folder)
    if stamp is None:
        return
    key = _key(url, options)
    with _lock:
        _cache[key] = _CachedTable(table, stamp)
        _cache.move_to_end(key)
        while len(_cache) > _TABLES_MAX:
            _cache.popitem(last=False)


def take(url: str, options: Mapping[str, str], folder: Folder) -> DeltaTable | None:
    """Return a cached table, updated, for the caller's exclusive use; None if it has to be read.

    Also None if the log entry of the cached version has changed: then the table was recreated, or its log was
    shortened. Raises the exceptions of `deltalake`.
    """
    with _lock:
        cached = _cache.pop(_key(url, options), None)
    if cached is None or _stamp(cached.table, folder) != cached.stamp:
        return None
    cached.table.update_incremental()
    return cached.table


def _key(url: str, options: Mapping[str, str]) -> _Key:
    return url, tuple(sorted(options.items()))


def _stamp(table: DeltaTable, folder: Folder) -> tuple[object, ...] | None:
    entry = folder.filesystem.get_file_info(folder.file(f"_delta_log/{table.version():020}.json"))
    if entry.type != pyarrow.fs.FileType.File or entry.mtime_ns is None:
        return None
    return table.version(), entry.size, entry.mtime_ns
