# SPDX-License-Identifier: Apache-2.0
"""Thousands of hostile clients: silence, garbage, huge frames, decompression bombs, unread responses."""

import asyncio
import gzip
import random
import socket
import ssl
import struct
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress

# The number of concurrent connections. A connection left open is closed after this many later ones.
AT_ONCE = 200
LEFT_OPEN = 300
# The time limit for a response, or for free space in the send buffer.
_PATIENCE_SECONDS = 1.0
_SOURCES = 250

_BOMB = gzip.compress(bytes(16 << 20))
_CANAL_UNKNOWN = b"\x18\x63"


def _http(path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n" + "".join(f"{line}\r\n" for line in lines)
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _framed(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


_CHANGES = "/v1/instances/shop/changes"
_PATTERNS = b'{"tables": [' + b",".join(b'"/.*a.*b.*c/"' for _ in range(5000)) + b'], "wait_seconds": 0}'

# The messages that each kind of client sends to a listener. A listener without an entry gets a generic
# message.
_SAID: dict[str, Callable[[str, random.Random], bytes]] = {
    "says nothing": lambda listener, chance: b"",
    "garbage": lambda listener, chance: b"\xf0" + chance.randbytes(chance.choice((8, 200, 5000))),
    "half a request": lambda listener, chance: b"\0\0" if listener == "canal" else b"GET / HTTP/1.1\r\nX: ",
    "a huge frame": lambda listener, chance: (
        struct.pack(">I", chance.choice((0xFFFFFFFF, 1 << 30, 2 << 20))) + bytes(4096)
        if listener == "canal"
        else _http("/v1/subscribe", Content_Length=str(1 << 40)) + bytes(4096)
    ),
    "a bomb": lambda listener, chance: (
        _framed(b"\x20\x02" + _BOMB[: 8 << 10])
        if listener == "canal"
        else _http("/v1/fetchMessages" if listener == "ptubes" else _CHANGES, _BOMB, Content_Encoding="gzip")
    ),
    "many requests": lambda listener, chance: (
        _framed(_CANAL_UNKNOWN) * 50 if listener == "canal" else _http("/v1/getServerInfo", b"{}") * 50
    ),
    "many patterns": lambda listener, chance: (
        _framed(_CANAL_UNKNOWN) if listener == "canal" else _http(_CHANGES, _PATTERNS)
    ),
}
# The kinds of clients that leave their connection open. The others close it after they have sent their bytes.
_LEAVES_OPEN = ("says nothing", "half a request", "many requests")


async def attack(
    port: int, listener: str, count: int, seed: int, tls: ssl.SSLContext | None = None
) -> Counter[str]:
    """Connect `count` times from many addresses, and count the accepted connections by kind.

    With `tls`, half of the clients finish the handshake and the others leave it unfinished.
    """
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    left: deque[asyncio.StreamWriter] = deque()
    gate = asyncio.Semaphore(AT_ONCE)

    async def attack_once(number: int) -> None:
        kind = chance.choice(sorted(_SAID))
        content = _SAID[kind](listener, chance)
        secure = tls if tls is not None and number % 2 else None
        async with gate:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(20 * _PATIENCE_SECONDS):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", port, local_addr=(f"127.0.7.{2 + number % _SOURCES}", 0), ssl=secure
                    )
                done[kind] += 1
                try:
                    await _say(reader, writer, content, reads=number % 3 == 0)
                finally:
                    if kind in _LEAVES_OPEN:
                        left.append(writer)
                    else:
                        _drop(writer)
            while len(left) > LEFT_OPEN:
                _drop(left.popleft())

    await asyncio.gather(*(attack_once(number) for number in range(count)))
    for writer in left:
        _drop(writer)
    return done


async def _say(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, content: bytes, *, reads: bool
) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            writer.write(content)
            await writer.drain()
            if reads:
                await reader.read(1 << 16)


def _drop(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with suppress(OSError):
            # Close with a reset instead of an orderly shutdown.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
