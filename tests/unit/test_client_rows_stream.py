# SPDX-License-Identifier: Apache-2.0
"""A stream that is read with a kept schema has the rows, or the error, of a stream that is read whole."""

from collections.abc import Callable
from typing import Any

import numpy
import pyarrow
import pytest

from penstock.client.rows_stream import read_stream
from penstock.serve.http.change_frames import arrow_stream

_METADATA = pyarrow.struct([("gtid", pyarrow.string()), ("absent", pyarrow.list_(pyarrow.string()))])


def batch_of(random: numpy.random.Generator) -> pyarrow.RecordBatch:
    """Return a batch with random columns and rows."""
    rows = int(random.integers(0, 20))
    numbers = random.integers(-5, 5, rows).tolist()
    texts = [None if number < 0 else "x" * number for number in numbers]
    columns = {
        "number": pyarrow.array(numbers, pyarrow.int64()),
        "text": pyarrow.array(texts, pyarrow.string()),
        "kind": pyarrow.array(texts, pyarrow.string()).dictionary_encode(),
        "_metadata": pyarrow.array(
            [{"gtid": text, "absent": None if text is None else [text]} for text in texts], _METADATA
        ),
    }
    chosen = [name for name in columns if random.integers(0, 2)] or ["number"]
    return pyarrow.record_batch({name: columns[name] for name in chosen})


def whole(buffer: pyarrow.Buffer) -> pyarrow.RecordBatch:
    return pyarrow.ipc.open_stream(buffer).read_next_batch()


def outcome(read: Callable[[pyarrow.Buffer], pyarrow.RecordBatch], content: bytes) -> Any:
    try:
        return read(pyarrow.py_buffer(content))
    except (pyarrow.ArrowInvalid, OSError, StopIteration):
        return "no stream"


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("seed", range(10))
def test_kept_schema_gives_the_rows_of_the_whole_stream(seed: int, compression: str | None) -> None:
    random = numpy.random.default_rng(seed)
    for _ in range(10):
        batch = batch_of(random)
        buffer = pyarrow.py_buffer(bytes(arrow_stream(batch, compression)))
        for _ in range(2):
            read = read_stream(buffer)
            assert read.equals(batch, check_metadata=True)
            read.validate(full=True)


def test_cut_stream_is_refused_as_by_reading_it_whole() -> None:
    batch = pyarrow.record_batch({"number": pyarrow.array([1, 2, 3]), "text": ["a", None, "c"]})
    content = bytes(arrow_stream(batch, None))
    kept = [size for size in range(len(content)) if outcome(read_stream, content[:size]) != "no stream"]
    assert kept == [size for size in range(len(content)) if outcome(whole, content[:size]) != "no stream"]
    for other in (b"", b"\xff" * 64, b"abcdefgh" * 8, content[:8] + bytes(200)):
        assert outcome(read_stream, other) == "no stream"


def test_schema_of_a_known_table_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pyarrow.record_batch({"number": pyarrow.array([1, 2, 3]), "text": ["a", None, "c"]})
    buffer = pyarrow.py_buffer(bytes(arrow_stream(batch, None)))
    read_stream(buffer)

    def refuse(*_: Any) -> Any:
        raise AssertionError("the schema is read again")

    monkeypatch.setattr(pyarrow.ipc, "open_stream", refuse)
    monkeypatch.setattr(pyarrow.ipc, "read_schema", refuse)
    assert read_stream(buffer).equals(batch, check_metadata=True)
