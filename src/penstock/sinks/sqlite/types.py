# SPDX-License-Identifier: Apache-2.0
"""How SQLite stores values of each Arrow type.

SQLite has 64-bit integers, doubles, texts and bytes. The declared type of a column only determines how
inserted values are converted (https://sqlite.org/datatype3.html, section 3.1). The declared types used here
cause no conversion, and each of them names the Arrow type that is restored when the values are read.
"""

import re

import numpy
import pyarrow
import pyarrow.compute as pc

# The declared types without parameters. A name that contains INT gives a column integer affinity, TEXT gives
# text affinity, BLOB gives none, and FLOA and DOUB give floating-point affinity.
_DECLARED: dict[pyarrow.DataType, str] = {
    pyarrow.int8(): "TINYINT",
    pyarrow.int16(): "SMALLINT",
    pyarrow.int32(): "INT",
    pyarrow.int64(): "BIGINT",
    pyarrow.float32(): "FLOAT",
    pyarrow.float64(): "DOUBLE",
    pyarrow.string(): "TEXT",
    pyarrow.binary(): "BLOB",
    pyarrow.date32(): "DATE_TEXT",
    pyarrow.timestamp("us"): "DATETIME_TEXT",
    pyarrow.timestamp("us", "UTC"): "TIMESTAMP_TEXT",
    pyarrow.list_(pyarrow.field("element", pyarrow.float32())): "VECTOR_BLOB",
}
_TYPES = {declared: kind for kind, declared in _DECLARED.items()}
_DECIMAL = re.compile(r"DECIMAL_TEXT\((\d+), ?(\d+)\)")
_FLOAT_BYTES = 4
# An integer type with enough digits for the unscaled value of any decimal.
_WHOLE = pyarrow.decimal128(38, 0)


def declared_type(kind: pyarrow.DataType) -> str:
    """Return the declared type of a column that stores values of an Arrow type."""
    if pyarrow.types.is_decimal(kind):
        return f"DECIMAL_TEXT({kind.precision}, {kind.scale})"
    return _DECLARED[kind]


def arrow_type(declared: str) -> pyarrow.DataType | None:
    """Return the Arrow type of a column with a declared type, None if `declared_type` never returns it."""
    if match := _DECIMAL.fullmatch(declared):
        return pyarrow.decimal128(int(match[1]), int(match[2]))
    return _TYPES.get(declared)


def bound_values(column: pyarrow.Array) -> list[object]:
    """Return a column's values as SQLite binds them."""
    kind = column.type
    if pyarrow.types.is_decimal(kind):
        column = _decimal_texts(column)
    elif pyarrow.types.is_timestamp(kind):
        # Without its zone, a point in time is in UTC, as SQLite's own functions expect.
        column = pc.cast(pc.cast(column, pyarrow.timestamp("us")), pyarrow.string())
    elif pyarrow.types.is_date(kind):
        column = pc.cast(column, pyarrow.string())
    elif pyarrow.types.is_list(kind):
        column = _vector_bytes(column)
    values: list[object] = column.to_pylist()
    return values


def stored_values(values: list[object], kind: pyarrow.DataType) -> pyarrow.Array:
    """Convert values read from an SQLite column to the column's Arrow type.

    Raises pyarrow.ArrowInvalid or pyarrow.ArrowTypeError if another program stored values of other types.
    """
    if pyarrow.types.is_decimal(kind) or pyarrow.types.is_date(kind):
        return pc.cast(pyarrow.array(values, pyarrow.string()), kind)
    if pyarrow.types.is_timestamp(kind):
        moments = pc.cast(pyarrow.array(values, pyarrow.string()), pyarrow.timestamp("us"))
        return pc.assume_timezone(moments, kind.tz) if kind.tz else moments
    if pyarrow.types.is_list(kind):
        return _vectors(pyarrow.array(values, pyarrow.binary()), kind)
    return pyarrow.array(values, kind)


def widened(name: str, stored: pyarrow.DataType, wanted: pyarrow.DataType) -> str:
    """Return the SQL of a stored column's values in a wider type."""
    types = pyarrow.types
    if types.is_decimal(wanted):
        scale = stored.scale if types.is_decimal(stored) else 0
        point = "." if not scale and wanted.scale else ""
        return f"CAST({name} AS TEXT) || '{point}{'0' * (wanted.scale - scale)}'"
    if types.is_string(wanted):
        return f"CAST({name} AS TEXT)"
    if types.is_floating(wanted):
        return f"CAST({name} AS REAL)"
    return name


def _decimal_texts(column: pyarrow.Array) -> pyarrow.Array:
    """Return decimals as texts with all digits of their scale, never with an exponent."""
    scale = column.type.scale
    # A decimal's bytes are those of an integer: the value times a power of ten.
    unscaled = pyarrow.Array.from_buffers(_WHOLE, len(column), column.buffers(), offset=column.offset)
    texts = pc.cast(unscaled, pyarrow.string())
    if not scale:
        return texts
    sign = pc.if_else(pc.starts_with(texts, "-"), "-", "")
    digits = pc.utf8_lpad(pc.utf8_ltrim(texts, "-"), scale + 1, "0")
    whole, fraction = pc.utf8_slice_codeunits(digits, 0, -scale), pc.utf8_slice_codeunits(digits, -scale)
    return pc.binary_join_element_wise(sign, whole, ".", fraction, "")


def _vector_bytes(column: pyarrow.Array) -> pyarrow.Array:
    """Return vectors as the bytes of their little-endian 32-bit floats."""
    # A slice of an Arrow array still refers to the offsets and floats of all rows.
    offsets = column.offsets.to_numpy()
    ends = ((offsets - offsets[0]) * _FLOAT_BYTES).astype(numpy.int32)
    floats = column.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy(zero_copy_only=False)
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(floats.astype("<f4").tobytes())]
    texts = pyarrow.Array.from_buffers(pyarrow.binary(), len(column), buffers)
    return pc.if_else(pc.is_valid(column), texts, pyarrow.scalar(None, pyarrow.binary()))


def _vectors(column: pyarrow.Array, kind: pyarrow.DataType) -> pyarrow.Array:
    """Return the inverse of `_vector_bytes`."""
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    if (lengths % _FLOAT_BYTES).any():
        raise pyarrow.ArrowInvalid("a vector's bytes are no 32-bit floats")
    offsets = numpy.concatenate(([0], numpy.cumsum(lengths // _FLOAT_BYTES))).astype(numpy.int32)
    floats = pyarrow.array(numpy.frombuffer(b"".join(pc.fill_null(column, b"").to_pylist()), "<f4"))
    return pyarrow.ListArray.from_arrays(offsets, floats, type=kind, mask=pc.is_null(column))
