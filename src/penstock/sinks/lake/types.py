# SPDX-License-Identifier: Apache-2.0
"""What the columns of a lake's tables are: Arrow types that Parquet, Delta and Iceberg hold, and back.

Nearly all are what docs/reference/types.md says. No lake has a TIME that is negative or longer than a day, so
one is stored as the whole microseconds of it, in 64 bits. Iceberg has no integers under 32 bits.
"""

import pyarrow
import pyarrow.compute as pc

# A list's elements have this name in Parquet, and in Delta's and Iceberg's schemas.
_ELEMENT = "element"


def stored_type(declared: pyarrow.DataType, integer_bits_min: int = 8) -> pyarrow.DataType:
    """Return the type in which a lake holds values of a declared one."""
    if pyarrow.types.is_duration(declared):
        return pyarrow.int64()
    if pyarrow.types.is_integer(declared) and declared.bit_width < integer_bits_min:
        return pyarrow.int32()
    if pyarrow.types.is_list(declared):
        return pyarrow.list_(pyarrow.field(_ELEMENT, stored_type(declared.value_type, integer_bits_min)))
    if pyarrow.types.is_struct(declared):
        # Spark opens no Delta table with a part that may not be null unless its protocol lists invariants.
        fields = [pyarrow.field(one.name, stored_type(one.type, integer_bits_min)) for one in declared]
        return pyarrow.struct(fields)
    return declared


def cast(column: pyarrow.ChunkedArray, wanted: pyarrow.DataType) -> pyarrow.ChunkedArray:
    """Return a column in another type that holds its values, such as its stored type, or back from it.

    Raises pyarrow.ArrowInvalid where a value does not fit.
    """
    if column.type == wanted:
        return column
    if pyarrow.types.is_duration(column.type) and not pyarrow.types.is_duration(wanted):
        column = column.cast(pyarrow.int64())
    return pc.cast(column, wanted)


def is_widened(stored: pyarrow.DataType, wanted: pyarrow.DataType) -> bool:
    """Tell whether each value of a stored type can be had exactly in a wanted one, which is another one."""
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
