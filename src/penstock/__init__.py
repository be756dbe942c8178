# SPDX-License-Identifier: Apache-2.0
"""Penstock: row changes from MySQL's binary log, typed and in order.

    import penstock

    for batch in penstock.read_binlog("/backup/mysql-bin.*", tables="shop.orders"):
        print(batch.table, batch.to_arrow())

Each name is imported on first use, because a Spark executor that decodes files needs no server client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.binlog import read_binlog
    from penstock.errors import OperatorError, PenstockError, StreamError, TransientError
    from penstock.model import Column, Position, ServerAddress, TableName, TablePatterns, TableSchema
    from penstock.pipelines import Pipeline
    from penstock.source.reading import Batch, Selection, read_range
    from penstock.source.source import ByteRange, Source, SourceOptions, open_source

__all__ = [
    "Batch",
    "ByteRange",
    "Column",
    "OperatorError",
    "PenstockError",
    "Pipeline",
    "Position",
    "Selection",
    "ServerAddress",
    "Source",
    "SourceOptions",
    "StreamError",
    "TableName",
    "TablePatterns",
    "TableSchema",
    "TransientError",
    "__version__",
    "open_source",
    "read_binlog",
    "read_range",
]

_HOMES = {
    "penstock.binlog": ("read_binlog",),
    "penstock.errors": ("OperatorError", "PenstockError", "StreamError", "TransientError"),
    "penstock.model": ("Column", "Position", "ServerAddress", "TableName", "TablePatterns", "TableSchema"),
    "penstock.pipelines": ("Pipeline",),
    "penstock.source.reading": ("Batch", "Selection", "read_range"),
    "penstock.source.source": ("ByteRange", "Source", "SourceOptions", "open_source"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    # Imported here because importing `importlib.metadata` takes a tenth of a second.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("penstock")
    except PackageNotFoundError:
        # A source tree that is on the path but was never installed has no metadata.
        return "0+uninstalled"
