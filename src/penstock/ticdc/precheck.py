# SPDX-License-Identifier: Apache-2.0
"""Checks a storage sink before it is read: its checkpoint, its files, and a row of each table."""

from collections.abc import Iterator

from penstock.check.facts import Finding
from penstock.errors import PenstockError
from penstock.settings.ticdc import TicdcSettings
from penstock.ticdc.data_files import DataReader
from penstock.ticdc.layout import DataFile, SchemaFile, classify
from penstock.ticdc.schema_files import TableSchema
from penstock.ticdc.sink_reader import SinkSchemas
from penstock.ticdc.storage import SinkStorage, read_checkpoint

_FILES_SHOWN_MAX = 5


def precheck_sink(storage: SinkStorage, settings: TicdcSettings) -> Iterator[Finding]:
    """Yield the findings. An error has the message with which the instance would stop."""
    try:
        checkpoint = read_checkpoint(storage)
        sizes = storage.sizes()
    except PenstockError as problem:
        yield Finding("checkpoint", "error", problem.message, problem.hint)
        return
    yield Finding("checkpoint", "ok", f"the checkpoint is {checkpoint}")
    schemas, newest = SinkSchemas(storage, settings), dict[tuple[str, str], DataFile]()
    problems: list[Finding] = []
    for path in sorted(sizes):
        try:
            match classify(path):
                case SchemaFile() as file:
                    schemas.add(file)
                case DataFile() as file:
                    last = newest.get((file.database, file.table), file)
                    newest[file.database, file.table] = max(last, file, key=lambda each: each.version)
        except PenstockError as problem:
            problems.append(Finding("files", "error", problem.message, problem.hint))
    yield from problems[:_FILES_SHOWN_MAX]
    if not problems:
        yield Finding("files", "ok", f"{len(sizes)} files have the layout of TiCDC's storage sink")
    for schema in schemas.newest_tables():
        data_file = newest.get((schema.database, schema.table))
        yield from _table_findings(storage, schemas, schema, data_file, sizes, checkpoint)


def _table_findings(
    storage: SinkStorage,
    schemas: SinkSchemas,
    schema: TableSchema,
    file: DataFile | None,
    sizes: dict[str, int],
    checkpoint: int,
) -> Iterator[Finding]:
    name = f"{schema.database}.{schema.table}"
    if not any(column.is_key for column in schema.columns):
        yield Finding(
            "key",
            "warning",
            f"{name} has no primary key: reading stops if TiCDC repeats its rows after a restart",
        )
    if file is None:
        return
    try:
        DataReader(storage, file, schemas.format_of(file), 0).grow(sizes[file.path], checkpoint)
    except PenstockError as problem:
        yield Finding("rows", "error", f"{name}: {problem.message}", problem.hint)
    else:
        yield Finding("rows", "ok", f"rows of {name} can be read")
