# SPDX-License-Identifier: Apache-2.0
"""Hashes keys so that keys that the source considers equal have the same hash.

The source's collations treat many spellings as equal. A hash therefore depends only on characters that no
collation equates with others: digits, and the letters that no other letter equals or expands to. This spreads
rows well and never divides a key.
"""

import zlib
from collections.abc import Iterator, Sequence

import numpy
import pyarrow
import pyarrow.compute as pc

_DROPPED = "[^0-9bcgkmpvwxz]"
_DIGITS = ["".join(chr(zero + digit) for zero in (0x660, 0x6F0, 0x966, 0x9E6, 0xE50)) for digit in range(10)]
_BYTES_COUNTED = 16
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def key_hashes(rows: pyarrow.RecordBatch | pyarrow.Table, key: Sequence[str], seed: str) -> numpy.ndarray:
    """Return the hash of each row's key, an unsigned 64-bit number, the same in every process."""
    mixed = numpy.full(rows.num_rows, zlib.crc32(seed.encode()), numpy.uint64)
    for name in key:
        for numbers in _numbers(rows.column(name)):
            mixed ^= numbers
            # Mix every bit of a number into the low bits, which choose the part (splitmix64).
            for shift, factor in _MIXING:
                mixed = (mixed ^ (mixed >> numpy.uint64(shift))) * numpy.uint64(factor)
            mixed ^= mixed >> numpy.uint64(31)
    return mixed


def _numbers(column: pyarrow.Array | pyarrow.ChunkedArray) -> Iterator[numpy.ndarray]:
    """Yield numbers that are equal for any two values of a column that the source may consider equal."""
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pyarrow.ChunkedArray):
            column = pyarrow.concat_arrays(column.chunks)
    kind = column.type
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind):
        yield _filled(pc.cast(column, pyarrow.int64()))
    elif pyarrow.types.is_temporal(kind):
        if pyarrow.types.is_date32(kind):
            column = pc.cast(column, pyarrow.int32())
        yield _filled(pc.cast(column, pyarrow.int64()))
    elif pyarrow.types.is_binary(kind):
        yield from _last_bytes(column)
    elif pyarrow.types.is_string(kind) or pyarrow.types.is_decimal(kind):
        yield from _last_bytes(pc.cast(_essence(pc.cast(column, pyarrow.string())), pyarrow.binary()))
    # Positive and negative zero are the same key, so the sign is ignored. Lists cannot be keys and are
    # ignored as well.


def _essence(texts: pyarrow.Array) -> pyarrow.Array:
    plain = pc.all(pc.string_is_ascii(texts)).as_py()
    if plain is False:
        texts = pc.utf8_normalize(texts, "NFKD")
        for digit, others in enumerate(_DIGITS):
            texts = pc.replace_substring_regex(texts, f"[{others}]", str(digit))
    return pc.replace_substring_regex(pc.utf8_lower(texts), _DROPPED, "")


def _filled(column: pyarrow.Array) -> numpy.ndarray:
    numbers: numpy.ndarray = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    return numbers.astype(numpy.int64).view(numpy.uint64)


def _last_bytes(column: pyarrow.Array) -> Iterator[numpy.ndarray]:
    """Yield the last bytes of each value, as two numbers."""
    _, offsets_buffer, data_buffer = column.buffers()
    count = len(column)
    offsets = numpy.frombuffer(offsets_buffer, numpy.int32, count + 1, column.offset * 4).astype(numpy.int64)
    data = (
        numpy.frombuffer(data_buffer, numpy.uint8) if data_buffer is not None else numpy.zeros(0, numpy.uint8)
    )
    lengths = numpy.diff(offsets)
    if column.null_count:
        lengths = numpy.where(column.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    taken = numpy.zeros((count, _BYTES_COUNTED), numpy.uint8)
    for back in range(1, _BYTES_COUNTED + 1):
        there = lengths >= back
        taken[there, -back] = data[offsets[1:][there] - back]
    both = taken.view(numpy.uint64)
    yield both[:, 0]
    yield both[:, 1]
