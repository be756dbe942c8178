# SPDX-License-Identifier: Apache-2.0
"""Envelope rows made typed, on executors, a batch at a time."""

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
    """Return the changes of one table of an envelope frame, typed: batch or streaming, classic or Connect.

    `schema` declares the columns: a column a row lacks is null and named in `_metadata.absent`, any other
    difference raises SchemaChanged. `mariadb` tells whose types a TableSchema has. An update becomes two
    rows, as in typed mode. Columns are those of typed mode.
    """
    name = TableName.parse(table)
    shape = schema if isinstance(schema, TableShape) else TableShape(name, schema.columns, mariadb)
    metadata = frame["_metadata"]
    rows = frame.where((metadata["database"] == name.database) & (metadata["table"] == name.table))
    return rows.mapInArrow(partial(decode_batches, shape), spark_schema(shape.arrow()))


def decode_batches(
    shape: TableShape, batches: Iterable[pyarrow.RecordBatch]
) -> Iterator[pyarrow.RecordBatch]:
    """Yield a typed batch for each definition among the rows of each envelope batch of one table."""
    declared = [(one.name, one.type_text, one.charset, one.nullable) for one in shape.columns]
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
    """Read the definition that envelope rows carry: columns, their wire types, whether it is MariaDB's."""
    value = json.loads(text)
    columns = [(one["name"], one["type"], one["charset"], True) for one in value["columns"]]
    wires = [(one["code"], one["metadata"]) for one in value["columns"]]
    return columns, wires, value["mariadb"]
