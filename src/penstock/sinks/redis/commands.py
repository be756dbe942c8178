# SPDX-License-Identifier: Apache-2.0
"""Redis commands for whole Arrow arrays: the bytes of one command for each row.

A command is the number of its words, and each word behind the number of its bytes:

    *2\\r\\n$6\\r\\nUNLINK\\r\\n$7\\r\\norder:1\\r\\n

Those of an array lie side by side in one buffer, so they are sent as they are. Every command made here is
answered by one line.
"""

from collections.abc import Sequence

import pyarrow
import pyarrow.compute as pc


def commands(words: Sequence[str | pyarrow.Array]) -> pyarrow.Array:
    """Return a command for each row: each word is the same in all rows, or an array with one in each.

    Arrays are of strings without nulls.
    """
    pieces: list[str | pyarrow.Array] = [f"*{len(words)}\r\n"]
    for word in words:
        pieces += [_word(word)] if isinstance(word, str) else ["$", _bytes(word), "\r\n", word, "\r\n"]
    return join(pieces)


def hash_commands(
    keys: pyarrow.Array, columns: Sequence[tuple[str, pyarrow.Array]]
) -> list[tuple[pyarrow.Array, pyarrow.Array]]:
    """Return commands that make hashes have these columns as fields, and no field where a column is null.

    Each comes with the keys it is about. Columns are of strings.
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
    made = [] if not names else _of_some("HDEL", keys, names, nulls, 1)
    return made + _of_some("HSET", keys, pairs, count, 2)


def _of_some(
    word: str, keys: pyarrow.Array, parts: Sequence[str | pyarrow.Array], count: pyarrow.Array, each: int
) -> list[tuple[pyarrow.Array, pyarrow.Array]]:
    """Return a command for the rows that have some of what is counted, each so many words, and their keys."""
    words = pc.cast(pc.add(pc.multiply(count, each), 2), pyarrow.string())
    made = join(["*", words, f"\r\n{_word(word)}$", _bytes(keys), "\r\n", keys, "\r\n", *parts])
    some = pc.greater(count, 0)
    if pc.all(some).as_py():
        return [(made, keys)]
    return [(made.filter(some), keys.filter(some))]


def join(pieces: Sequence[str | pyarrow.Array]) -> pyarrow.Array:
    """Return strings made of pieces, each an array or the same in all rows; null where one is."""
    return pc.binary_join_element_wise(*pieces, "")


def _word(word: str) -> str:
    return f"${len(word.encode())}\r\n{word}\r\n"


def _bytes(words: pyarrow.Array) -> pyarrow.Array:
    """Return how many bytes each has, as text."""
    return pc.cast(pc.binary_length(words), pyarrow.string())
