# SPDX-License-Identifier: Apache-2.0
"""Nodes of ZooKeeper: how a node holds a record, and how one request reads many nodes.

The requests and answers mirror `org.apache.zookeeper.MultiOperationRecord` and `MultiResponse`.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.coordinate.store import ABSENT, Record
from penstock.errors import VersionConflict

_NONCE_BYTES = 8
_TRAILER_BYTES = 1 + 2 * _NONCE_BYTES

# A request may take at most 1 MiB (`jute.maxbuffer`), which leaves 5 KiB per path on average.
READS_MAX = 200

_GET_DATA, _GET_CHILDREN, _MULTI_READ = 4, 8, 22
_HEADER = struct.Struct("!i?i")
_LENGTH = struct.Struct("!i")
_STAT = struct.Struct("!qqqqiiiqiiq")
_END = _HEADER.pack(-1, True, -1)


class NodeStat(NamedTuple):
    """ZooKeeper's `Stat` of a node. The fields have ZooKeeper's names."""

    czxid: int
    mzxid: int
    ctime: int
    mtime: int
    version: int
    cversion: int
    aversion: int
    ephemeralOwner: int
    dataLength: int
    numChildren: int
    pzxid: int


def sealed(value: bytes) -> tuple[bytes, bytes]:
    """Return the content of a node: the value, and a nonce that identifies this write."""
    nonce = os.urandom(_NONCE_BYTES).hex().encode()
    return bytes(value) + b"\n" + nonce, nonce


def expected_version(path: str, node: tuple[bytes, Any] | None, version: int | None) -> int:
    """Return the node version that a write must expect, or ABSENT. Raises VersionConflict."""
    record = None if node is None else record_of(*node)
    present = ABSENT if record is None else record.version
    if version is not None and version != present:
        raise VersionConflict(f"the record has version {present}, not {version}", position=path)
    # A node that exists only as a parent becomes a record.
    return ABSENT if node is None else int(node[1].version)


def record_of(content: bytes, stat: Any) -> Record | None:
    """Return the record in a node; None if the node exists only as a parent."""
    if len(content) < _TRAILER_BYTES:
        return None
    return Record(content[:-_TRAILER_BYTES], stat.version, stat.czxid, of_session=stat.ephemeralOwner != 0)


class ReadMany:
    """A request for the contents of several nodes, or with `children` for the names of their children, in the
    form that kazoo sends.

    Each answer is the content and stat of a node, or the names of its children, or None for a node that
    cannot be read.
    """

    type = _MULTI_READ

    def __init__(self, nodes: Sequence[str], *, children: bool) -> None:
        self._nodes = nodes
        self._kind = _GET_CHILDREN if children else _GET_DATA

    def serialize(self) -> bytes:
        """Return the bytes of the request."""
        header = _HEADER.pack(self._kind, False, -1)
        encoded = (node.encode() for node in self._nodes)
        # The last byte says that no watch is set.
        return b"".join(header + _LENGTH.pack(len(node)) + node + b"\0" for node in encoded) + _END

    @staticmethod
    def deserialize(answer: bytes, offset: int) -> list[Any]:
        """Read the answers, in the order of the nodes."""
        answers: list[Any] = []
        while True:
            kind, is_end, _ = _HEADER.unpack_from(answer, offset)
            offset += _HEADER.size
            if is_end:
                return answers
            (number,) = _LENGTH.unpack_from(answer, offset)
            offset += _LENGTH.size
            if kind == _GET_DATA:
                end = offset + max(0, number)
                answers.append((bytes(answer[offset:end]), NodeStat(*_STAT.unpack_from(answer, end))))
                offset = end + _STAT.size
            elif kind == _GET_CHILDREN:
                names = []
                for _ in range(number):
                    (length,) = _LENGTH.unpack_from(answer, offset)
                    begin = offset + _LENGTH.size
                    offset = begin + length
                    names.append(bytes(answer[begin:offset]).decode())
                answers.append(names)
            else:
                # `number` is an error code: the node could not be read.
                answers.append(None)


class _Ask(Protocol):
    def __call__(self, paths: Sequence[str], *, children: bool) -> list[Any]:
        """Return the answers to a `ReadMany` about paths."""
        ...


def read_below(
    paths: Sequence[str],
    wanted: Callable[[str], bool],
    ask: _Ask,
    fetch: Callable[[str], tuple[bytes, Any] | None],
    list_names: Callable[[str], Sequence[str]],
) -> dict[str, Record | None]:
    """Return the records at paths and below them, level by level; see CoordinationStore.read_below.

    Nodes that `ask` cannot read are read one by one, with `fetch` or `list_names`.
    """

    def ask_all(paths: Sequence[str], *, children: bool) -> Iterator[tuple[str, Any]]:
        for begin in range(0, len(paths), READS_MAX):
            some = paths[begin : begin + READS_MAX]
            yield from zip(some, ask(some, children=children), strict=True)

    records: dict[str, Record | None] = {}
    while paths:
        records |= {path: None for path in paths if not wanted(path)}
        parents = []
        for path, answer in ask_all([path for path in paths if path not in records], children=False):
            node = answer or fetch(path)
            if node is None:
                continue
            record = record_of(*node)
            if record is not None:
                records[path] = record
            if node[1].numChildren:
                parents.append(path)
        paths = [
            f"{parent}/{name}"
            for parent, names in ask_all(parents, children=True)
            for name in names or list_names(parent)
        ]
    return records
