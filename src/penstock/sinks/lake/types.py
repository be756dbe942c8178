# SPDX-License-Identifier: Apache-2.0
"""The column types of lake tables: Arrow types that Parquet, Delta and Iceberg support.

Most types are as in docs/reference/types.md. No lake format has a time type for negative values or values
above 24 hours, so a TIME is stored as a 64-bit number of microseconds. Iceberg has no integer types smaller
than 32 bits.
"""

import pyarrow
import pyarrow.compute as pc

# The name of list elements in Parquet, and in Delta's and Iceberg's schemas.
_ELEMENT = "element"


def stored_type(declared: pyarrow.DataType, integer_bits_min: int = 8) -> pyarrow.DataType:
    """Return the type in which a lake stores values of a declared type."""
    if pyarrow.types.is_duration(declared):
        return pyarrow.int64()
    if pyarrow.types.is_integer(declared) and declared.bit_width < integer_bits_min:
        return pyarrow.int32()
    if pyarrow.types.is_list(declared):
        return pyarrow.list_(pyarrow.field(_ELEMENT, stored_type(declared.value_type, integer_bits_min)))
    if pyarrow.types.is_struct(declared):
        # Spark cannot open a Delta table with a required nested field unless its protocol lists invariants.
        fields = [pyarrow.field(field.name, stored_type(field.type, integer_bits_min)) for field in declared]
        return pyarrow.struct(fields)
    return declared


def cast(column: pyarrow.ChunkedArray, wanted: pyarrow.DataType) -> pyarrow.ChunkedArray:
    """Convert a column to the type in which it is stored, or back from that type.

    Raises pyarrow.ArrowInvalid if a value does not fit.
    """
    if column.type == wanted:
        return column
    if pyarrow.types.is_duration(column.type) and not pyarrow.types.is_duration(wanted):
        column = column.cast(pyarrow.int64())
    return pc.cast(column, wanted)


def is_widened(stored: pyarrow.DataType, wanted: pyarrow.DataType) -> bool:
    """Return whether a wanted type differs from a stored type and represents all of its values exactly."""
    types = pyarrow.types
    if types.is_integer(stored):
        if types.is_integer(wanted):
            return bool(wanted.bit_width > stored.bit_width)
        if types.is_decimal(wanted):
            return bool(wanted.precision - wanted.scale >= len(str(2 ** (stored.bit_width - 1))))
        return bool(types.is_string(wanted) or (types.is_float64(wanted) and stored.bit_width <= 32))
    if types.is_decimal(stored):
        if types.is_decimal(wanted):
            whole = wanted.precision - wanted.scale >= stored.precision - stored.scale
            return bool(whole and wanted.scale >= stored.scale)
        return bool(types.is_string(wanted))
    return bool(types.is_float32(stored) and types.is_float64(wanted))
