# SPDX-License-Identifier: Apache-2.0
"""Shares of a comparison side by side, as tasks of Spark."""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow
from pyspark.sql import SparkSession

from penstock.errors import PenstockError
from penstock.pipeline.verify.comparison import in_this_process
from penstock.pipeline.verify.shares import Share, Suspects, TouchedBySource, suspects_of

# So few shares are compared sooner than Spark has begun.
SHARES_MIN = 8
# Each task is sent what the log touched; where that is more, it is rather not sent.
TOUCHED_BYTES_MAX = 64 << 20

_FOUND = pyarrow.schema([("share", pyarrow.int32()), ("found", pyarrow.bool_()), ("body", pyarrow.binary())])
_FOUND_SQL = "share int, found boolean, body binary"


class SparkSpreading:
    """Compares shares on a session: as many at once as it has cores. Few of them are compared here, and those
    of a pipeline that is far behind."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def __call__(self, shares: Sequence[Share], touched: TouchedBySource) -> Iterator[tuple[int, Suspects]]:
        """Yield the outcome of each share, with its number. Raises the first error of a task."""
        if len(shares) < SHARES_MIN or sum(one.bytes for one in touched.values()) > TOUCHED_BYTES_MAX:
            yield from in_this_process(shares, touched)
            return
        data = pickle.dumps((list(shares), touched))
        tasks = len(shares)
        frame: Any = self._session.range(0, tasks, 1, tasks).mapInArrow(partial(_compare, data), _FOUND_SQL)
        for row in frame.toArrow().to_pylist():
            found = pickle.loads(row["body"])
            if not row["found"]:
                raise found
            yield row["share"], found


def _compare(data: bytes, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    shares, touched = pickle.loads(data)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            found: Suspects | PenstockError
            try:
                found = suspects_of(shares[number], touched)
            except PenstockError as problem:
                # It reaches the driver as it is; as an error of a task it would be text.
                found = problem
            columns = [[number], [isinstance(found, Suspects)], [pickle.dumps(found)]]
            arrays = [pyarrow.array(one, field.type) for one, field in zip(columns, _FOUND, strict=True)]
            yield pyarrow.RecordBatch.from_arrays(arrays, schema=_FOUND)
