# SPDX-License-Identifier: Apache-2.0
"""Many subscribers at the head with minimal cost: they request changes and discard them.

`python -m bench.followers PORT INSTANCE TABLE COUNT SHARDS` prints `ready` once all followers have a
response. Each follower gets one of SHARDS shards, or all changes if SHARDS is 1. After the standard input
ends and no more data arrives, the program prints the bytes that each follower received. With `echo` as PORT,
it measures the cost of sending alone.
"""

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
#: The longest wait that a daemon accepts: a response must not end before all followers are stopped.
_WAIT_SECONDS = 55.0
_QUIET_SECONDS = 0.5
_READ_BYTES = 1 << 20
_END_SECONDS_MAX = 120.0


@contextmanager
def following(port: int, instance: str, table: str, count: int, shards: int = 1) -> Iterator[dict[str, Any]]:
    """Run this many followers of a table inside the block. Afterwards the result has the data that they
    received.
    """
    numbers = (str(count), str(shards))
    words = [sys.executable, "-m", "bench.followers", str(port), instance, table, *numbers]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the followers do not get an answer"
    received: dict[str, Any] = {}
    try:
        yield received
    finally:
        output, _ = process.communicate(timeout=_END_SECONDS_MAX)
    received.update(json.loads(output))


def sending_seconds(size: int, count: int, piece_bytes: int) -> float:
    """Return the CPU seconds for sending this many bytes to each of `count` sockets, and nothing else."""
    words = [sys.executable, "-m", "bench.followers", "echo", str(size), str(piece_bytes), str(count)]
    done = subprocess.run(words, stdout=subprocess.PIPE, cwd=_ROOT, text=True, check=True)
    return float(done.stdout)


def are_alike(sizes: list[int]) -> bool:
    """Return whether all followers received the same bytes, however the bytes were divided."""
    return max(sizes) - min(sizes) < 0.05 * max(sizes) + 4096


def _follow(port: int, instance: str, table: str, count: int, shards: int) -> None:
    body: dict[str, Any] = {"tables": [table], "credit_bytes": 1 << 40, "wait_seconds": _WAIT_SECONDS}
    ready = selectors.DefaultSelector()
    sizes: dict[int, int] = {}
    for number in range(count):
        peer = socket.create_connection(("127.0.0.1", port))
        body["subscriber"] = f"follower-{number}"
        if shards > 1:
            body["shards"] = {"count": shards, "of": [number % shards]}
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/instances/{instance}/changes HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        peer.sendall(head.encode() + content)
        ready.register(peer, selectors.EVENT_READ)
        sizes[peer.fileno()] = 0
    is_announced = ending = False
    space = bytearray(_READ_BYTES)
    ready.register(sys.stdin, selectors.EVENT_READ)
    while ready.get_map():
        events = ready.select(_QUIET_SECONDS)
        if not events and ending and (shards > 1 or are_alike(list(sizes.values()))):
            break
        for key, _ in events:
            source = key.fileobj
            if source is sys.stdin:
                ready.unregister(source)
                ending = True
                continue
            assert isinstance(source, socket.socket)
            got = source.recv_into(space)
            sizes[key.fd] += got
            if not sizes[key.fd]:
                raise AssertionError("a follower is not answered")
            if not got:
                ready.unregister(source)
        if not is_announced and all(sizes.values()):
            print("ready", flush=True)
            is_announced = True
    print(json.dumps({"bytes": list(sizes.values())}))


def _send(size: int, piece_bytes: int, count: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    # The receivers' CPU time is not a cost of sending, so they run in a child process.
    reader = subprocess.Popen(
        [sys.executable, "-c", _DROP, str(listener.getsockname()[1]), str(count)], stdin=subprocess.DEVNULL
    )
    peers = [listener.accept()[0] for _ in range(count)]
    content = memoryview(bytes(piece_bytes))
    begun = time.process_time()
    for at in range(0, size, piece_bytes):
        for peer in peers:
            peer.sendall(content[: min(piece_bytes, size - at)])
    used = time.process_time() - begun
    for peer in peers:
        peer.close()
    reader.wait()
    print(used)


_DROP = """
import selectors, socket, sys
ready, space = selectors.DefaultSelector(), bytearray(1 << 20)
for _ in range(int(sys.argv[2])):
    ready.register(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), selectors.EVENT_READ)
while ready.get_map():
    for key, _ in ready.select():
        if not key.fileobj.recv_into(space):
            ready.unregister(key.fileobj)
"""


def main() -> None:
    """Run followers, or measure sending."""
    if sys.argv[1] == "echo":
        _send(*map(int, sys.argv[2:]))
    else:
        _follow(int(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))


if __name__ == "__main__":
    main()
