# SPDX-License-Identifier: Apache-2.0
"""Encodes Redis commands for whole Arrow arrays, one command per row.

A command consists of its number of words, and each word after its number of bytes:

    *2\\r\\n$6\\r\\nUNLINK\\r\\n$7\\r\\norder:1\\r\\n

The commands of an array are adjacent in one buffer, so they are sent without copying. Every command created
here is answered by one line.
"""

import itertools
from collections.abc import Sequence

import pyarrow
import pyarrow.compute as pc

# Arrow's functions take longer to call than to encode this many rows.
FEW_ROWS_MAX = 64


def commands(words: Sequence[str | pyarrow.Array]) -> pyarrow.Array:
    """Return a command for each row. A word is either the same for all rows, or an array with a word for each
    row.

    Arrays contain strings without nulls.
    """
    if max((len(word) for word in words if not isinstance(word, str)), default=0) <= FEW_ROWS_MAX:
        return _few_commands(words)
    pieces: list[str | pyarrow.Array] = [f"*{len(words)}\r\n"]
    for word in words:
        pieces += [_word(word)] if isinstance(word, str) else ["$", _bytes(word), "\r\n", word, "\r\n"]
    return join(pieces)


def _few_commands(words: Sequence[str | pyarrow.Array]) -> pyarrow.Array:
    """Return the same as `commands` for a few rows."""
    head = b"*%d\r\n" % len(words)
    # Keys that SCAN returned may be invalid text, so they stay bytes.
    columns = [
        itertools.repeat(_word_bytes(word.encode()))
        if isinstance(word, str)
        else map(_word_bytes, word.view(pyarrow.binary()).to_pylist())
        for word in words
    ]
    # A constant word never ends, so the arrays determine the number of rows.
    encoded = [head + b"".join(row) for row in zip(*columns, strict=False)]
    return pyarrow.array(encoded, pyarrow.binary()).view(pyarrow.string())


def hash_commands(
    keys: pyarrow.Array, columns: Sequence[tuple[str, pyarrow.Array]]
) -> list[tuple[pyarrow.Array, pyarrow.Array]]:
    """Return commands that set columns as fields of hashes, and delete fields whose column is null.

    Each command array comes with its keys. Columns contain strings.
    """
    pairs: list[str | pyarrow.Array] = []
    names: list[str | pyarrow.Array] = []
    nulls = pyarrow.repeat(pyarrow.scalar(0, pyarrow.int32()), len(keys))
    for name, column in columns:
        pair = [f"{_word(name)}$", _bytes(column), "\r\n", column, "\r\n"]
        if column.null_count:
            pair = [pc.fill_null(join(pair), "")]
            names.append(pc.if_else(pc.is_valid(column), "", _word(name)))
            nulls = pc.add(nulls, pc.cast(pc.is_null(column), pyarrow.int32()))
        pairs += pair
    count = pc.subtract(pyarrow.scalar(len(columns), pyarrow.int32()), nulls)
    deletions = [] if not names else _of_some("HDEL", keys, names, nulls, 1)
    return deletions + _of_some("HSET", keys, pairs, count, 2)


def _of_some(
    word: str, keys: pyarrow.Array, parts: Sequence[str | pyarrow.Array], count: pyarrow.Array, each: int
) -> list[tuple[pyarrow.Array, pyarrow.Array]]:
    """Return a command for each row whose count is positive, and the keys of those rows.

    `count` is the number of items in each row's command, and `each` is the number of words per item.
    """
    words = pc.cast(pc.add(pc.multiply(count, each), 2), pyarrow.string())
    encoded = join(["*", words, f"\r\n{_word(word)}$", _bytes(keys), "\r\n", keys, "\r\n", *parts])
    has_parts = pc.greater(count, 0)
    if pc.all(has_parts).as_py():
        return [(encoded, keys)]
    return [(encoded.filter(has_parts), keys.filter(has_parts))]


def split_commands(encoded: bytes) -> list[bytes]:
    """Split adjacent commands into single commands."""
    separate, end = [], 0
    while end < len(encoded):
        start = end
        end = encoded.index(b"\r\n", start) + 2
        for _ in range(int(encoded[start + 1 : end])):
            word = encoded.index(b"\r\n", end) + 2
            end = word + int(encoded[end + 1 : word]) + 2
        separate.append(encoded[start:end])
    return separate


def join(pieces: Sequence[str | pyarrow.Array]) -> pyarrow.Array:
    """Return strings joined from pieces, each an array or a constant; null if a piece is null."""
    return pc.binary_join_element_wise(*pieces, "")


def _word(word: str) -> str:
    return f"${len(word.encode())}\r\n{word}\r\n"


def _word_bytes(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _bytes(words: pyarrow.Array) -> pyarrow.Array:
    """Return the number of bytes of each word, as text."""
    return pc.cast(pc.binary_length(words), pyarrow.string())
