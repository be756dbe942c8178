# SPDX-License-Identifier: Apache-2.0
"""Converts conditions, which the kernel writes as bytes, to text, because requests to read rows again are
stored as JSON.
"""

import re

_LITERAL = re.compile(rb"(_binary)?'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPES = {b"0": b"\0", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"Z": b"\x1a"}


def condition_text(condition: bytes) -> str:
    """Return a condition of `sql_values` as text. Bytes of a binary column become digits: x'00ff'."""
    return _LITERAL.sub(_as_digits, condition).decode()


def _as_digits(literal: re.Match[bytes]) -> bytes:
    if literal[1] is None:
        return literal[0]
    content = _ESCAPED.sub(lambda escape: _ESCAPES.get(escape[1], escape[1]), literal[2])
    return b"x'" + content.hex().encode() + b"'"
