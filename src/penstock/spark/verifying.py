# SPDX-License-Identifier: Apache-2.0
"""Compares shares in parallel, as Spark tasks."""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow
from pyspark.sql import SparkSession

from penstock.errors import PenstockError
from penstock.pipeline.verify.comparison import in_this_process
from penstock.pipeline.verify.shares import Share, Suspects, TouchedBySource, suspects_of

# If there are fewer shares than this, comparing them in this process is faster than starting Spark.
SHARES_MIN = 8
# Every task gets the keys that the log touched. If there are more keys than this, compare in this process.
TOUCHED_BYTES_MAX = 64 << 20

_FOUND = pyarrow.schema([("share", pyarrow.int32()), ("found", pyarrow.bool_()), ("body", pyarrow.binary())])
_FOUND_SQL = "share int, found boolean, body binary"


class SparkSpreading:
    """Compares shares on a Spark session, as many concurrently as the session has cores.

    Some comparisons run in this process instead: those of few shares, of a pipeline that is far behind, and
    of targets that only this process can read.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def __call__(self, shares: Sequence[Share], touched: TouchedBySource) -> Iterator[tuple[int, Suspects]]:
        """Yield the outcome of each share, with its number. Raises the first error of a task."""
        if (
            len(shares) < SHARES_MIN
            or sum(touched_keys.bytes for touched_keys in touched.values()) > TOUCHED_BYTES_MAX
            or any(share.table.sink.make().reads_in_driver for share in shares)
        ):
            yield from in_this_process(shares, touched)
            return
        data = pickle.dumps((list(shares), touched))
        tasks = len(shares)
        frame: Any = self._session.range(0, tasks, 1, tasks).mapInArrow(partial(_compare, data), _FOUND_SQL)
        for row in frame.toArrow().to_pylist():
            outcome = pickle.loads(row["body"])
            if not row["found"]:
                raise outcome
            yield row["share"], outcome


def _compare(data: bytes, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    shares, touched = pickle.loads(data)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            outcome: Suspects | PenstockError
            try:
                outcome = suspects_of(shares[number], touched)
            except PenstockError as problem:
                # Return the error as a value. Raised in a task, it would reach the driver as text.
                outcome = problem
            columns = [[number], [isinstance(outcome, Suspects)], [pickle.dumps(outcome)]]
            arrays = [
                pyarrow.array(column, field.type) for column, field in zip(columns, _FOUND, strict=True)
            ]
            yield pyarrow.RecordBatch.from_arrays(arrays, schema=_FOUND)
