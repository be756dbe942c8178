# SPDX-License-Identifier: Apache-2.0
"""The frames of `application/vnd.penstock.changes`: u32 length of a header, the header as JSON, its payload.

The header's `bytes` is the length of the payload. Headers are padded with blanks so that a payload starts at
a multiple of eight, where Arrow can read it in place.
"""

import functools
import json
import struct
from collections.abc import Mapping
from typing import Any

import pyarrow

MEDIA_TYPE = "application/vnd.penstock.changes"

_ALIGNMENT = 8

# Returns a value as JSON without blanks. `json.dumps` would make an encoder for each frame.
compact_json = json.JSONEncoder(separators=(",", ":")).encode


def frame_head(header: Mapping[str, Any]) -> bytes:
    """Return a frame up to its payload; the header includes `bytes`."""
    return framed(compact_json(header).encode())


def framed(text: bytes) -> bytes:
    """Return a frame up to its payload, from a header that is already JSON."""
    text += b" " * (-(len(text) + 4) % _ALIGNMENT)
    return struct.pack(">I", len(text)) + text


@functools.cache
def _options(compression: str | None) -> pyarrow.ipc.IpcWriteOptions:
    return pyarrow.ipc.IpcWriteOptions(compression=compression)


def arrow_stream(batch: pyarrow.RecordBatch, compression: str | None) -> memoryview:
    """Return a record batch as a separate Arrow IPC stream."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema, options=_options(compression)) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def message_bytes(values: pyarrow.LargeBinaryArray) -> memoryview:
    """Return the bytes of consecutive messages without copying them."""
    offsets, content = values.buffers()[1:]
    if not len(values) or content is None:
        return memoryview(b"")
    message_offsets = pyarrow.Array.from_buffers(
        pyarrow.int64(), len(values) + 1, [None, offsets], offset=values.offset
    )
    return memoryview(content)[message_offsets[0].as_py() : message_offsets[-1].as_py()]


def compressed(content: memoryview, codec: str) -> memoryview:
    """Compress bytes to one frame of a codec, `zstd` or `lz4`."""
    return memoryview(pyarrow.compress(content, codec=codec))
