# SPDX-License-Identifier: Apache-2.0
"""What tells a binlog file from every other one of its name.

A name says little: RESET MASTER, a restore, a clone or another node of a Galera cluster has files of the same
names. The format description at the head of a file holds when the file was begun, in seconds, and the id of
the server that began it. A file, the server that sends it, and a log that keeps it hold the same there: a
server changes other fields of that event where a dump begins within a file.
"""

_MAGIC = b"\xfebin"
_BEGUN_AT = slice(0, 4)
_SERVER_ID_AT = slice(5, 9)


def file_fingerprint(head: bytes) -> str:
    """Return the fingerprint of a file, from its format description with the magic before it or without."""
    event = head.removeprefix(_MAGIC)
    begun = int.from_bytes(event[_BEGUN_AT], "little")
    return f"{begun}-{int.from_bytes(event[_SERVER_ID_AT], 'little')}"
