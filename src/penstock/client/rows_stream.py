# SPDX-License-Identifier: Apache-2.0
"""Reads the Arrow streams of one batch each, whose schemas repeat.

A stream begins with its schema. For a few rows, parsing the schema takes longer than reading the rows, so
known schemas are kept.
"""

from functools import lru_cache

import pyarrow

# Schemas have about a kilobyte. A subscriber follows fewer tables than this at a time.
_SCHEMAS_MAX = 256
# The head of a message: four bytes of ones, and the size of its metadata. A schema has no other content.
_HEAD_BYTES = 8
_CONTINUATION = b"\xff\xff\xff\xff"


def read_stream(buffer: pyarrow.Buffer) -> pyarrow.RecordBatch:
    """Return the first batch of an Arrow stream, without copying it.

    Raises pyarrow.ArrowInvalid, OSError or StopIteration if the bytes are no stream with a batch.
    """
    # The buffer itself has signed bytes, which never equal those of the head.
    content = memoryview(buffer).cast("B")
    schema_end = _HEAD_BYTES + int.from_bytes(content[4:_HEAD_BYTES], "little")
    if content[:4] == _CONTINUATION and schema_end < len(content):
        schema = _schema_of(bytes(content[:schema_end]))
        if schema is not None:
            return pyarrow.ipc.read_record_batch(buffer.slice(schema_end), schema)
    return pyarrow.ipc.open_stream(buffer).read_next_batch()


@lru_cache(_SCHEMAS_MAX)
def _schema_of(message: bytes) -> pyarrow.Schema | None:
    """Return the schema in a message, None if dictionaries precede the rows."""
    schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(message))
    return None if any(_has_dictionary(field.type) for field in schema) else schema


def _has_dictionary(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(index).type) for index in range(kind.num_fields))
