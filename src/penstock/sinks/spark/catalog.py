# SPDX-License-Identifier: Apache-2.0
"""Tables of a Spark catalog: which exist, their contents, and the batches that they contain."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import OptionInvalid, ServerBusy, ValueMalformed
from penstock.sinks.sink import extra_missing
from penstock.sinks.spark.statements import quoted, table_name

# The table property with the pipeline that created a table.
PIPELINE_PROPERTY = "penstock.pipeline"
# The commit property that identifies the batch: it contains the name of the application, which numbers its
# own batches, and the batch's number.
BATCH_PROPERTY = "penstock-batch"

# Settings that the statements depend on. They override the user's session.
_SESSION = {
    # Texts of timestamps must not depend on the host.
    "spark.sql.session.timeZone": "UTC",
    # A value beyond the range of its column is an error instead of wrapping around.
    "spark.sql.storeAssignmentPolicy": "ANSI",
    "spark.sql.parser.escapedStringLiterals": "false",
    # Staged rows that Spark cannot read are an error instead of being skipped.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    # Days before 1582 use the proleptic calendar, in which they were staged.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    # TIMESTAMP in a statement is a point in time.
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
}

# Java classes of permanent Delta errors: a violated table constraint, and a MERGE in which several source
# rows match the same target row. Delta has moved these classes between packages.
_OF_ROWS = ("InvariantViolationException", ".DeltaUnsupportedOperationException")

_DELTA_APPLICATION = "spark.databricks.delta.write.txnAppId"
_DELTA_NUMBER = "spark.databricks.delta.write.txnVersion"
_DELTA_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


def session_of_process() -> Any:
    """Return a new session with the same settings as the pipeline's session.

    A separate session is needed because the batch's number is set as a session setting, which must not affect
    the user's own writes. Raises OptionInvalid if there is no session or only a Connect session, which cannot
    open another one; DependencyMissing.
    """
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as missing:
        raise extra_missing("pyspark", "spark") from missing
    hint = (
        "It needs Spark in this process: penstock run FILE, without --local and without sc://;"
        " penstock verify FILE --master 'local[*]'"
    )
    try:
        shared = SparkSession.active()
    except PySparkException as problem:
        raise OptionInvalid("the spark sink needs a Spark session", hint=hint) from problem
    if not isinstance(shared, SparkSession) or not hasattr(shared, "sparkContext"):
        raise OptionInvalid("the spark sink cannot write through Spark Connect", hint=hint)
    own = shared.newSession()
    for name, value in shared.conf.getAll.items():
        if own.conf.get(name, None) != value:
            own.conf.set(name, value)
    for name, value in _SESSION.items():
        own.conf.set(name, value)
    return own


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate Spark's exceptions into Penstock errors. `what` describes the operation."""
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import (
            AnalysisException,
            IllegalArgumentException,
            ParseException,
            PySparkException,
        )
    except ImportError as missing:
        raise extra_missing("pyspark", "spark") from missing
    try:
        yield
    except (AnalysisException, IllegalArgumentException, ParseException) as problem:
        raise OptionInvalid(
            f"{what}: Spark refuses it: {_first_lines(problem)}", hint="Check the settings of the spark sink"
        ) from problem
    except (PySparkException, Py4JError) as problem:
        thrown = _java_classes(problem)
        if any(name.endswith(_OF_ROWS) for name in thrown):
            raise ValueMalformed(
                f"{what}: the target refuses the rows: {_first_lines(problem)}",
                hint="Drop the constraint of the target, or correct the rows",
            ) from problem
        if "java.lang.ArithmeticException" in thrown:
            raise ValueMalformed(
                f"{what}: a column of the target cannot hold a value: {_first_lines(problem)}",
                hint="Let the target's columns evolve: set schema_changes, or load the table again",
            ) from problem
        # A conflict with another writer, or a lost executor.
        raise ServerBusy(
            f"{what}: Spark did not complete it: {_first_lines(problem)}",
            hint="The batch is retried; the driver's log tells why",
        ) from problem


def _java_classes(problem: Exception) -> set[str]:
    """Return the classes of a Java exception and of its causes, with their superclasses.

    An error of a task is the cause of the exception that the driver raises.
    """
    names: set[str] = set()
    # PySpark stores the Java exception in `_origin` of an exception that it converts. It does not convert
    # unknown exceptions, so they keep Py4J's `java_exception`.
    thrown = getattr(problem, "java_exception", None) or getattr(problem, "_origin", None)
    while thrown is not None:
        java_class = thrown.getClass()
        while java_class is not None:
            names.add(java_class.getName())
            java_class = java_class.getSuperclass()
        thrown = thrown.getCause()
    return names


def _first_lines(problem: Exception) -> str:
    return str(problem).strip()[:500]


class CatalogTable:
    """A table of Spark's catalogs, by name, whether or not it exists."""

    def __init__(self, session: Any, parts: tuple[str, ...], using: str) -> None:
        self._session = session
        self._parts = parts
        self._using = using
        self.name = table_name(parts)

    def exists(self) -> bool:
        """Return whether the table exists. Raises OptionInvalid if it has another format."""
        if not self._session.catalog.tableExists(self.name):
            return False
        rows = self._session.sql(f"DESCRIBE TABLE EXTENDED {self.name}").collect()
        providers = [row["data_type"] for row in rows if row["col_name"] == "Provider"]
        if providers and providers[0].lower() != self._using:
            raise OptionInvalid(
                f"the table {self.name} is of {providers[0]}, not of {self._using}",
                hint="Set using of the spark sink, or choose another table",
            )
        return True

    def column_types(self) -> dict[str, Any]:
        """Return the Arrow types of the columns by their names."""
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self._session.table(self.name).schema)
        return {field.name: field.type for field in schema}

    def create_namespace(self) -> None:
        """Create the database of the table if it does not exist."""
        namespace = self._parts[:-1]
        if namespace and not self._session.catalog.databaseExists(table_name(namespace)):
            self._session.sql(f"CREATE NAMESPACE IF NOT EXISTS {table_name(namespace)}")

    def number(self, application: str) -> int | None:
        """Return the number of an application's last batch, as recorded in the table's commits."""
        if self._using == "delta":
            history = self._session.sql(f"DESCRIBE HISTORY {self.name}").select("userMetadata").collect()
            marks = [row[0] for row in history]
        else:
            mark = f"summary[{BATCH_PROPERTY!r}]"
            marks = [
                row[0] for row in self._session.sql(f"SELECT {mark} FROM {self.name}.snapshots").collect()
            ]
        numbers = [
            int(mark.rpartition("#")[2])
            for mark in marks
            if mark is not None and mark.rpartition("#")[0] == application
        ]
        return max(numbers, default=None)

    def remembers(self, pipeline: str) -> bool:
        """Return whether a pipeline created the table and the table has rows."""
        properties = self._session.sql(f"SHOW TBLPROPERTIES {self.name}").collect()
        own = any(row[0] == PIPELINE_PROPERTY and row[1] == pipeline for row in properties)
        return own and not self._session.table(self.name).isEmpty()

    def last_version(self) -> int | None:
        """Return the highest commit version in a feed."""
        version = quoted("_commit_version")
        row = self._session.sql(f"SELECT max({version}) FROM {self.name}").first()
        return None if row is None else row[0]


@contextmanager
def numbered(session: Any, application: str, number: int) -> Iterator[None]:
    """Make Delta store a batch's number in the block's commits, and skip commits that it already has."""
    settings = {
        _DELTA_APPLICATION: application,
        _DELTA_NUMBER: str(number),
        _DELTA_METADATA: batch_mark(application, number),
    }
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            session.conf.unset(name)


def batch_mark(application: str, number: int) -> str:
    """Return the text that identifies a batch in a commit."""
    return f"{application}#{number}"
