# SPDX-License-Identifier: Apache-2.0
"""Caches Delta tables in this process, so that a batch only reads new entries of their logs.

Reading a log from its checkpoint costs more than a small commit, and a batch may change hundreds of tables.
To look for new entries costs half of a commit, so it is done only if the log has an entry after the cached
version.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow
import pyarrow.fs
from deltalake import DeltaTable

from penstock.sinks.lake.parquet_files import Folder

# The least recently used tables are evicted.
_TABLES_MAX = 8192

# A log that is shortened loses entries in any order, but none that are younger than this.
_LOOK_SECONDS = 600.0

_Key = tuple[str, tuple[tuple[str, str], ...]]
_Stamp = tuple[int, int]
_lock = threading.Lock()
_cache: OrderedDict[_Key, "_CachedTable"] = OrderedDict()


@dataclass(frozen=True)
class _CachedTable:
    """A table at a version with its columns, the size and time of that version's log entry, and when it was
    cached, by `time.monotonic`.
    """

    table: DeltaTable
    schema: pyarrow.Schema
    stamp: _Stamp
    cached_at: float


def keep(
    table: DeltaTable, schema: pyarrow.Schema, url: str, options: Mapping[str, str], folder: Folder
) -> None:
    """Cache a table for `take`. The caller must not use it afterwards."""
    [stamp] = _stamps(folder, table.version())
    if stamp is None:
        return
    key = _key(url, options)
    with _lock:
        _cache[key] = _CachedTable(table, schema, stamp, time.monotonic())
        _cache.move_to_end(key)
        while len(_cache) > _TABLES_MAX:
            _cache.popitem(last=False)


def take(
    url: str, options: Mapping[str, str], folder: Folder
) -> tuple[DeltaTable, pyarrow.Schema | None] | None:
    """Return a cached table, updated, for the caller's exclusive use, with its columns unless they may have
    changed; None if the table has to be read.

    Also None if the log entry of the cached version has changed: then the table was recreated, or its log was
    shortened. Raises the exceptions of `deltalake`.
    """
    with _lock:
        cached = _cache.pop(_key(url, options), None)
    if cached is None:
        return None
    version = cached.table.version()
    stamp, following = _stamps(folder, version, version + 1)
    if stamp != cached.stamp:
        return None
    if following is None and time.monotonic() - cached.cached_at < _LOOK_SECONDS:
        return cached.table, cached.schema
    cached.table.update_incremental()
    return cached.table, None


def _key(url: str, options: Mapping[str, str]) -> _Key:
    return url, tuple(sorted(options.items()))


def _stamps(folder: Folder, *versions: int) -> list[_Stamp | None]:
    """Return the size and time of the log entries of versions, None for entries that do not exist."""
    entries = folder.filesystem.get_file_info(
        [folder.file(f"_delta_log/{version:020}.json") for version in versions]
    )
    return [
        None
        if entry.type != pyarrow.fs.FileType.File or entry.mtime_ns is None
        else (entry.size, entry.mtime_ns)
        for entry in entries
    ]
