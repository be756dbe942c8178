# SPDX-License-Identifier: Apache-2.0
"""Receiving from a socket without the interpreter stores the same bytes as receiving piece by piece."""

import contextlib
import random
import socket
import struct
import threading
from typing import Any, cast

import pytest

from penstock._native import BlockCutter
from penstock.capture.receive import Progress, Receiver
from penstock.errors import ConnectionLost, DumpReplaced, PenstockError, StreamError
from penstock.gtid_sets import NO_GTIDS
from penstock.limits import CAPTURE_CHUNK_BYTES, MIB
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position, ServerAddress
from penstock.mysql.replica import DumpStart, ReplicaStream
from tests.support.binlog.block_cutting import framed
from tests.support.binlog.events import assemble, events
from tests.support.binlog.forged_log import insert, log_head
from tests.support.logstore.source import SETTINGS

FILE = "mysql-bin.000001"
HEAD = log_head(1)


class CountedStream(ReplicaStream):
    """A stream over one end of a socket pair that counts its drains."""

    def __init__(self, stream: socket.socket, *, drains: bool) -> None:
        unused = cast(Any, None)
        start = DumpStart(Position(0, FILE, len(HEAD)))
        super().__init__(
            ServerAddress(), stream, b"", start=start, identity=unused, name=unused, bounded=False
        )
        self._drains = drains
        self.drained = 0

    @property
    def can_drain(self) -> bool:
        """Whether the stream drains its socket."""
        return self._drains and super().can_drain

    def drain(self, cutter: BlockCutter, packets: memoryview, bytes_max: int) -> bytes:
        """Count the call."""
        self.drained += 1
        return super().drain(cutter, packets, bytes_max)


def dump_of(seed: int, last: bytes = b"") -> bytes:
    """Return the packets of transactions with rows of random sizes, some larger than a read, then a packet
    with the payload `last`.
    """
    draw = random.Random(seed)
    offset, sequence, packets = len(HEAD), 1, []
    for number in range(1, 120):
        size = draw.choice((20, 500, 20_000, 200_000, 700_000)) + draw.randrange(200)
        content = assemble(insert(number, "shop.notes", number, draw.randbytes(size)), offset=offset)
        offset += len(content)
        parts = [content[event.offset : event.offset + event.size] for event in events(content, offset=0)]
        packets += framed(parts, b"", sequence)
        sequence += len(parts)
    if last:
        packets.append(struct.pack("<I", len(last) | (sequence & 0xFF) << 24) + last)
    return b"".join(packets)


def receive(packets: bytes, *, drains: bool) -> tuple[bytes, PenstockError, Progress, int]:
    """Receive packets until their connection ends.

    Return the stored bytes, the error at the end, the progress and the number of drains.
    """
    server, client = socket.socketpair()
    client.settimeout(60)
    common: dict[str, Any] = {"epoch": 0, "server_id": 1, "flavor": "mysql"}
    settings = SETTINGS.model_copy(update={"mode": "memory", "memory_bytes": 128 * MIB})

    def send() -> None:
        # The receiver closes its end at an error.
        with server, contextlib.suppress(BrokenPipeError):
            server.sendall(packets)

    with client, MemoryLog.open_memory(settings, instance="shop") as log:
        start = len(HEAD)
        log.begin_epoch(
            **common, server_key="mysql:1", version="9.7.4", file=FILE, offset=start, gtid_set=NO_GTIDS
        )
        log.begin_file(FILE, start, HEAD[4:], NO_GTIDS, **common)
        cutter = BlockCutter(epoch=0, file=FILE, offset=start, flavor="mysql", live=True, head=HEAD)
        progress = Progress()
        receiver = Receiver(
            log,
            progress,
            threading.Event(),
            **common,
            chunk_bytes=CAPTURE_CHUNK_BYTES,
            schemas=None,
            hold=lambda why: None,
            arrived=lambda: None,
        )
        stream = CountedStream(client, drains=drains)
        sender = threading.Thread(target=send)
        sender.start()
        with pytest.raises((ConnectionLost, DumpReplaced, StreamError)) as failure:
            receiver.receive(stream, cutter)
        client.close()
        sender.join()
        visible = log.visible
        end = start if visible is None else visible.offset
        return b"".join(log.read(0, FILE, start, end)), failure.value, progress, stream.drained


@pytest.mark.parametrize("seed", range(3))
def test_drained_socket_gives_the_same_log_and_error_as_single_reads(seed: int) -> None:
    packets = dump_of(seed)
    draw = random.Random(seed)
    flipped = bytearray(packets)
    flipped[draw.randrange(len(packets) // 2, len(packets))] ^= 1
    for name, sent in (
        ("whole", packets),
        ("cut off", packets[: draw.randrange(len(packets) // 2, len(packets))]),
        ("flipped", bytes(flipped)),
    ):
        stored, error, progress, drained = receive(sent, drains=True)
        expected, expected_error, expected_progress, undrained = receive(sent, drains=False)
        assert drained > 0 == undrained, name
        assert stored == expected, name
        assert len(stored) > len(packets) // 3, name
        assert (type(error), str(error)) == (type(expected_error), str(expected_error)), name
        assert progress.gtid_set == expected_progress.gtid_set, name
        assert progress.bytes == expected_progress.bytes, name


@pytest.mark.parametrize("drains", [True, False])
def test_everything_before_an_error_of_the_server_is_stored(drains: bool) -> None:
    """It may have been purged when the server sends again. The connection ends right after the error."""
    whole, *_ = receive(dump_of(4), drains=drains)
    replaced = b"\xff" + struct.pack("<H", 4052) + b"#70100another replica"
    stored, error, _, _ = receive(dump_of(4, replaced), drains=drains)
    assert isinstance(error, DumpReplaced)
    assert stored == whole


def test_closed_stream_cannot_be_drained() -> None:
    server, client = socket.socketpair()
    with server:
        stream = CountedStream(client, drains=True)
        assert stream.can_drain
        stream.close()
        assert not stream.can_drain
        with pytest.raises(ConnectionLost, match="closed"):
            stream.drain(cast(BlockCutter, None), memoryview(b""), MIB)
