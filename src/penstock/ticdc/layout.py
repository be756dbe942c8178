# SPDX-License-Identifier: Apache-2.0
"""The files that TiCDC's storage sink writes, by their paths.

    metadata                                                     the checkpoint
    shop/meta/schema_<version>_<checksum>.json                   a statement about a database
    shop/orders/meta/schema_<version>_<checksum>.json            a table's definition, and its statement
    shop/orders/<version>/[<partition>/][<date>/]CDC000001.json  rows
    shop/orders/<version>/[...]meta/CDC.index                    the last file's name, for the writer alone

A writer of the newer architecture has its id in the names: CDC_<writer>_000001.json. Source: the sink's
documentation, "Sync data to storage services", and the paths in tiflow's `pkg/sink/cloudstorage`.
"""

import re
from dataclasses import dataclass
from typing import Literal

from penstock.errors import EventMalformed

METADATA = "metadata"

_SCHEMA = re.compile(r"schema_(\d{1,20})_(\d{10})\.json")
_DATA = re.compile(r"CDC(?:_([0-9A-Za-z-]+)_)?(\d{6,20})\.(json|csv)")
_INDEX = re.compile(r"CDC(?:_[0-9A-Za-z-]+)?\.index")
_PARTITION = re.compile(r"\d+")
_DATE = re.compile(r"\d{4}(?:-\d{2}(?:-\d{2})?)?")
# A file of the local file system has this suffix until it is complete.
_UNFINISHED = re.compile(r".+\.tmp\.[0-9a-f-]{36}")


@dataclass(frozen=True)
class SchemaFile:
    """A schema file. `table` is empty for a statement about a database."""

    path: str
    database: str
    table: str
    version: int
    checksum: int


@dataclass(frozen=True)
class DataFile:
    """A file with rows of one version of a table. The files of a `sequence` are numbered from 1."""

    path: str
    database: str
    table: str
    version: int
    sequence: str
    number: int
    format: Literal["json", "csv"]


def classify(path: str) -> SchemaFile | DataFile | None:
    """Return the description of a file by its path below the sink's root; None for a file that readers do not
    need.

    Raises EventMalformed for a file that the sink does not write: it may hold changes in an unknown form.
    """
    parts = path.split("/")
    name = parts[-1]
    if path == METADATA or _UNFINISHED.fullmatch(name):
        return None
    if len(parts) in (3, 4) and parts[-2] == "meta" and (schema := _SCHEMA.fullmatch(name)):
        table = parts[1] if len(parts) == 4 else ""
        return SchemaFile(path, parts[0], table, int(schema[1]), int(schema[2]))
    is_index = parts[-2:-1] == ["meta"] and _INDEX.fullmatch(name) is not None
    folders = parts[2 : -2 if is_index else -1]
    data = _DATA.fullmatch(name)
    if (data or is_index) and _are_version_folders(folders):
        if data is None:
            return None
        sequence = f"{path.removesuffix(name)}{data[1] or ''}"
        kind: Literal["json", "csv"] = "json" if data[3] == "json" else "csv"
        return DataFile(path, parts[0], parts[1], int(folders[0]), sequence, int(data[2]), kind)
    raise EventMalformed(
        f"{path!r} is not a file of TiCDC's storage sink",
        hint="Give the source of the sink a folder of its own, and remove other files",
    )


def _are_version_folders(folders: list[str]) -> bool:
    """Return whether these folders are a version, optionally followed by a partition, a date, or both."""
    if not folders or not _PARTITION.fullmatch(folders[0]):
        return False
    match folders[1:]:
        case []:
            return True
        case [single]:
            return bool(_PARTITION.fullmatch(single) or _DATE.fullmatch(single))
        case [partition, date]:
            return bool(_PARTITION.fullmatch(partition) and _DATE.fullmatch(date))
    return False
