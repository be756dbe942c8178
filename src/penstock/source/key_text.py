# SPDX-License-Identifier: Apache-2.0
"""Parses the key values by which a user names a row, as in `penstock history shop.orders 7`."""

import re

import pyarrow

from penstock.durations import duration_of
from penstock.errors import OptionInvalid

# The zone at the end of a time. A TIMESTAMP without a zone is UTC, as in conditions.
_ZONE = re.compile(r":.*(Z|[+-]\d\d(:?\d\d)?)$", re.IGNORECASE)


def key_scalar(text: str, column: str, kind: pyarrow.DataType) -> pyarrow.Scalar:
    """Return the value of a key column. Raises OptionInvalid."""
    try:
        if pyarrow.types.is_binary(kind) and text.lower().startswith("0x"):
            return pyarrow.scalar(bytes.fromhex(text[2:]), kind)
        if pyarrow.types.is_duration(kind):
            if (duration := duration_of(text)) is None:
                raise ValueError("no TIME")
            return pyarrow.scalar(duration, kind)
        if pyarrow.types.is_timestamp(kind) and kind.tz and not _ZONE.search(text):
            text += "Z" if ":" in text else " 00:00:00Z"
        return pyarrow.scalar(text).cast(kind)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, ValueError) as problem:
        raise OptionInvalid(
            f"{text!r} is no value of the column {column}, which is {kind}", hint="Give the value as in SQL"
        ) from problem
