# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a binlog file, which distinguishes the file from other files with the same name.

Names are not unique: RESET MASTER, a restore, a clone or another node of a Galera cluster produces files with
the same names. The format description at the head of a file contains the file's creation time in seconds, and
the id of the server that created the file. These two fields are the same in the file, in a dump of the file,
and in a log that stores it. When a dump starts inside a file, the server changes other fields of the event.
"""

_MAGIC = b"\xfebin"
_CREATED_AT = slice(0, 4)
_SERVER_ID_AT = slice(5, 9)


def file_fingerprint(head: bytes) -> str:
    """Return the fingerprint of a file, from its format description with or without the magic before it."""
    event = head.removeprefix(_MAGIC)
    created = int.from_bytes(event[_CREATED_AT], "little")
    return f"{created}-{int.from_bytes(event[_SERVER_ID_AT], 'little')}"
