# SPDX-License-Identifier: Apache-2.0
"""Seeded damage for binlogs, like that of disks, networks and attackers."""

import random
import struct
from collections.abc import Sequence
from dataclasses import replace

import zstandard

from tests.support.binlog.events import HEADER, TRANSACTION_PAYLOAD, Event, assemble, events

_EDGES = (0, 1, 2, 0x7F, 0x80, 0xFA, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_EDGES_WIDE = (*_EDGES, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_MUTATIONS_MAX = 6
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PAYLOAD_BYTES_MAX = 1 << 20


def mutate(corpus: Sequence[bytes], chance: random.Random) -> bytes:
    """Return one log of the corpus, damaged in its raw bytes or in its events with valid checksums."""
    data = chance.choice(corpus)
    if chance.random() < 0.4:
        return mutate_bytes(data, corpus, chance)
    return mutate_events(data, corpus, chance)


def mutate_bytes(data: bytes, corpus: Sequence[bytes], chance: random.Random) -> bytes:
    """Return bytes with flipped bits, numbers at their limits, and parts removed, duplicated or replaced."""
    out = bytearray(data)
    for _ in range(chance.randint(1, _MUTATIONS_MAX)):
        if not out:
            break
        at = chance.randrange(len(out))
        length = min(len(out) - at, chance.choice((1, 2, 4, 8, 19, 64, 300)))
        match chance.randrange(8):
            case 0:
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                out[at] = chance.choice(_EDGES) & 0xFF
            case 2:
                width = chance.choice((2, 4, 8))
                value = chance.choice(_EDGES_WIDE) & ((1 << 8 * width) - 1)
                out[at : at + width] = value.to_bytes(width, "little")
            case 3:
                del out[at : at + length]
            case 4:
                out[at:at] = out[at : at + length]
            case 5:
                other = chance.choice(corpus)
                position = chance.randrange(len(other))
                out[at : at + length] = other[position : position + length]
            case 6:
                out[at : at + length] = chance.randbytes(length)
            case _:
                del out[at : len(out) if chance.random() < 0.2 else at + 1]
    return bytes(out)


def mutate_events(data: bytes, corpus: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a log damaged inside its events, with consistent lengths, positions and checksums."""
    log_events = [event for event in events(data) if event.size >= HEADER.size]
    for _ in range(chance.randint(1, _MUTATIONS_MAX)):
        at = chance.randrange(len(log_events))
        match chance.randrange(10):
            case 0:
                del log_events[at]
            case 1:
                log_events.insert(chance.randrange(len(log_events)), log_events[at])
            case 2:
                log_events[at] = replace(
                    log_events[at], code=chance.choice((*range(45), *range(158, 175), 255))
                )
            case 3:
                other = list(events(chance.choice(corpus)))
                log_events.insert(at, chance.choice(other))
            case 4:
                log_events[at] = replace(
                    log_events[at], flags=chance.getrandbits(16), timestamp=chance.choice(_EDGES)
                )
            case _:
                log_events[at] = _mutate_body(log_events[at], corpus, chance)
        if not log_events:
            break
    return (
        assemble(log_events)
        if chance.random() < 0.95
        else assemble(log_events)[: chance.randrange(len(data))]
    )


def _mutate_body(event: Event, corpus: Sequence[bytes], chance: random.Random) -> Event:
    """Damage an event's body. In a compressed transaction, the damage may hit its header and the events
    inside.
    """
    if event.code == TRANSACTION_PAYLOAD and chance.random() < 0.8:
        plain = _unpack(event.body)
        if plain is not None:
            inside = _mutate_inside(plain, corpus, chance)
            if chance.random() < 0.3:
                inside = mutate_bytes(inside, corpus, chance)
            return replace(event, body=_pack(inside, chance))
    return replace(event, body=mutate_bytes(event.body, corpus, chance) if event.body else b"")


def _mutate_inside(plain: bytes, corpus: Sequence[bytes], chance: random.Random) -> bytes:
    try:
        inside = list(events(plain, checksum=False, offset=0))
    except (ValueError, struct.error):
        return plain
    return b"".join(_mutate_body(event, corpus, chance).encode() for event in inside)


def _unpack(body: bytes) -> bytes | None:
    start = body.find(_ZSTD_MAGIC)
    if start < 0:
        return None
    try:
        return zstandard.ZstdDecompressor().decompress(body[start:], max_output_size=_PAYLOAD_BYTES_MAX)
    except zstandard.ZstdError:
        return None


def _pack(plain: bytes, chance: random.Random) -> bytes:
    """Write a payload body: fields of type, length and value, a final 0, then the compressed events."""
    packed = zstandard.ZstdCompressor(level=1).compress(plain)
    announced = len(plain) if chance.random() < 0.9 else chance.choice(_EDGES_WIDE)
    fields = ((2, 0), (3, announced), (1, len(packed)))
    head = b"".join(bytes([kind, 9, 0xFE]) + value.to_bytes(8, "little") for kind, value in fields)
    return head + b"\x00" + packed
