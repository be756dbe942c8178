# SPDX-License-Identifier: Apache-2.0
"""The data source `penstock`: its schema and its readers."""

import sys
from collections.abc import Mapping
from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from penstock.errors import OptionInvalid
from penstock.source.read_settings import TYPED, ReadSettings
from penstock.source.source import open_source
from penstock.source.tracking import TrackedSchemas
from penstock.spark.batch import BatchReader, batch_bounds
from penstock.spark.options import check_schemas_file, parse_settings
from penstock.spark.schema import (
    TableShape,
    envelope_arrow,
    newest_in_log,
    newest_kept,
    newest_on_server,
    spark_schema,
)

if TYPE_CHECKING:
    from penstock.spark.stream import StreamReader

# The module of Spark's worker that plans a read with filters. Spark runs this worker only if filter pushdown
# is enabled.
_FILTER_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
# Spark passes limits to Python streams from 4.2 on. A platform may have added this to an older version of
# Spark.
_ADMISSION_CONTROL = "pyspark.sql.streaming.datasource"


class PenstockDataSource(DataSource):
    """Spark data source for row changes of MySQL and MariaDB, from binlog files or a live server; see
    `options.parse_settings`.

    The `options` of the base class are left empty, because they may contain a password and Spark may print
    them.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__({})
        self._settings = parse_settings(options)
        self._shape: TableShape | None = None

    @classmethod
    def name(cls) -> str:
        """The name in `format("penstock")`."""
        return "penstock"

    def schema(self) -> StructType:
        """Return the columns of the table's newest definition, or those of the envelope.

        Reads the server's information_schema, or scans the table maps of the files from the last file
        backwards.
        """
        settings = self._settings
        check_schemas_file(settings)
        if settings.mode != TYPED:
            return spark_schema(envelope_arrow())
        self._shape = _newest(settings)
        return spark_schema(self._shape.arrow(settings.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        kind = BatchReader
        if _FILTER_WORKER in sys.modules:
            from penstock.spark.filters import FilteringBatchReader as kind
        return kind(self._settings, self._shape_for(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the stream reader."""
        kind: type[StreamReader]
        if find_spec(_ADMISSION_CONTROL) is not None:
            from penstock.spark.admission import AdmissionStreamReader as kind
        else:
            from penstock.spark.self_paced import SelfPacedStreamReader as kind
        return kind(self._settings, self._shape_for(schema))

    def _shape_for(self, schema: StructType) -> TableShape | None:
        """Return the declared table. A schema passed to Spark must equal the table's own schema."""
        settings = self._settings
        if settings.mode != TYPED:
            expected = spark_schema(envelope_arrow())
        else:
            # Spark does not call `schema` if the user passed a schema.
            self._shape = self._shape or _newest(settings)
            expected = spark_schema(self._shape.arrow(settings.columns))
        if schema != expected:
            raise OptionInvalid(
                f"the given schema is not the one of the rows: {expected.simpleString()}",
                hint="Leave .schema() out; choose columns with option columns",
            )
        return self._shape


def _newest(settings: ReadSettings) -> TableShape:
    name = settings.tables.single()
    assert name is not None, "typed mode names one table"
    if settings.source.address is not None:
        return newest_on_server(settings.source.address, name)
    with closing(open_source(settings.source)) as source:
        bounds = batch_bounds(source, settings)
        stored_shape = newest_kept(source, bounds, name) if settings.schemas is None else None
        if stored_shape is not None:
            return stored_shape
        tracked = TrackedSchemas.open(settings)
        if tracked is not None:
            tracked.advance(source, source.split(bounds.start, bounds.end))
        return newest_in_log(source, bounds, name, tracked.history if tracked is not None else None)
