# SPDX-License-Identifier: Apache-2.0
"""Converts envelope rows into typed rows on executors, one batch at a time."""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow
import pyarrow.compute

from penstock import _native
from penstock.model import TableName, TableSchema
from penstock.spark.schema import TableShape, spark_schema


def decode_table(frame: Any, table: str, schema: TableSchema | TableShape, *, mariadb: bool = False) -> Any:
    """Extract the changes of one table from an envelope DataFrame, as typed rows.

    The DataFrame may be batch or streaming, and of a classic or a Connect session. `schema` declares the
    columns. A column that is missing from a row is null and listed in `_metadata.absent`; any other
    difference raises SchemaChanged. `mariadb` is true if the types of a TableSchema are MariaDB's. An update
    becomes two rows. The columns are those of typed mode.
    """
    name = TableName.parse(table)
    shape = schema if isinstance(schema, TableShape) else TableShape(name, schema.columns, mariadb)
    metadata = frame["_metadata"]
    rows = frame.where((metadata["database"] == name.database) & (metadata["table"] == name.table))
    return rows.mapInArrow(partial(decode_batches, shape), spark_schema(shape.arrow()))


def decode_batches(
    shape: TableShape, batches: Iterable[pyarrow.RecordBatch]
) -> Iterator[pyarrow.RecordBatch]:
    """Yield a typed batch for each table definition among the rows of each envelope batch of one table."""
    declared = [(column.name, column.type_text, column.charset, column.nullable) for column in shape.columns]
    expected = shape.arrow()
    for batch in batches:
        definitions = batch.column("definition").dictionary_encode()
        for index, text in enumerate(definitions.dictionary.to_pylist()):
            rows = batch.filter(pyarrow.compute.equal(definitions.indices, index))
            columns, wires, mariadb = _definition(text)
            decoded = _native.decode_envelope(rows, columns, wires, mariadb=mariadb, declared=declared)
            yield pyarrow.record_batch(decoded).cast(expected)


def _definition(
    text: str,
) -> tuple[list[tuple[str, str, str | None, bool]], list[tuple[int, int]], bool]:
    """Parse the definition in envelope rows: columns, their wire types, and whether the server is MariaDB."""
    value = json.loads(text)
    columns = [(column["name"], column["type"], column["charset"], True) for column in value["columns"]]
    wires = [(column["code"], column["metadata"]) for column in value["columns"]]
    return columns, wires, value["mariadb"]
