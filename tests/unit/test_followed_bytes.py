# SPDX-License-Identifier: Apache-2.0
"""A daemon sends its newest bytes as they arrive. They are those that requests return."""

import itertools
import json
import math
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from penstock.gtid_sets import LoggedSet
from penstock.limits import MIB
from penstock.logstore.log import Log
from penstock.logstore.memory import MemoryTier
from penstock.model import Position
from penstock.serve.http import log as log_routes
from penstock.serve.http import newest_bytes
from penstock.serve.http.change_frames import frame_head
from penstock.source import followed_bytes
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from penstock.source.followed_bytes import FOLLOWED_TYPE, ArrivedBytes, ByteStreams, FollowedBytes
from tests.support.daemon.served_log import INSTANCE, ServedLog, serving
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import Captured, open_log
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import certificate

FIRST = Position(0, "log.000001", 4)
OPENED = f"HTTP/1.1 200 OK\r\ncontent-type: {FOLLOWED_TYPE}\r\n\r\n".encode()


def frame(content: bytes, end: int, gtid_set: str) -> bytes:
    header = json.dumps({"end": end, "gtid_set": gtid_set, "bytes": len(content)}).encode()
    return struct.pack(">I", len(header)) + header + content


class _Reached(Exception):
    """Raised once the log has grown."""


@pytest.fixture
def log() -> Iterator[Log]:
    """The beginning of a log, whose bytes are in memory."""
    with open_log(SimulatedDisk()) as log:
        log.memory = MemoryTier(MIB)
        grow(log)
        yield log


@pytest.fixture
def daemon(log: Log) -> Iterator[ServedLog]:
    with serving(log) as served:
        yield served


def grow(log: Log, served: ServedLog | None = None) -> bool:
    """Capture one more block of whole transactions, as the daemon does; return whether there was one."""
    before = log.visible

    def stop_there(captured: Captured, count: int) -> None:
        if captured.log.visible != before:
            raise _Reached

    try:
        Captured(log, each=stop_there).run()
    except _Reached:
        if served is not None:
            served.served.arrivals.arrived(INSTANCE)
        return True
    return False


@contextmanager
def client_of(daemon: ServedLog, authority: str | None = None) -> Iterator[DaemonClient]:
    url = f"://127.0.0.1:{daemon.port()}/{INSTANCE}"
    url = f"penstock{url}" if authority is None else f"penstocks{url}?ssl_ca={authority}"
    address = DaemonAddress.parse(url, token="secret")
    with closing(DaemonClient(address, address.base_urls[0])) as client:
        yield client


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Position]:
    """Note the positions after which clients request bytes, instead of taking them from a stream."""
    positions: list[Position] = []
    request = DaemonClient._request_bytes

    def note(client: DaemonClient, position: Position, *arguments: Any) -> ArrivedBytes | None:
        positions.append(position)
        return request(client, position, *arguments)

    monkeypatch.setattr(DaemonClient, "_request_bytes", note)
    monkeypatch.setattr(followed_bytes, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(followed_bytes, "_SILENT_SECONDS_MAX", math.inf)
    return positions


def read_all(daemon: ServedLog, client: DaemonClient) -> list[ArrivedBytes]:
    """Read the last file of a log while it grows to its end."""
    log = daemon.log
    parts: list[ArrivedBytes] = []
    has_grown = True
    while has_grown:
        head = log.head()
        start = parts[-1].end if parts and parts[-1].head.file == head.file else _start_of(log, head)
        while start < head.offset:
            # A first request without a wait tells the client that the log grows fast.
            arrived = client.bytes_behind(head.epoch, head.file, start, "", 0.0, MIB)
            if arrived is not None and not arrived.content:
                arrived = client.bytes_behind(head.epoch, head.file, start, "", WAIT_SECONDS_MAX, MIB)
            assert arrived is not None
            parts.append(arrived)
            start = arrived.end
        has_grown = grow(log, daemon)
    return parts


def _start_of(log: Log, head: Position) -> int:
    return min(run.start for run in log.extents() if (run.epoch, run.file) == (head.epoch, head.file))


def check_stream(daemon: ServedLog, client: DaemonClient, requests: list[Position]) -> None:
    """Require that a stream has the bytes and the GTID sets of the log."""
    parts = read_all(daemon, client)
    assert len(requests) < len(parts) / 2, "most bytes come without a request"
    log = daemon.log
    for file, of_file in itertools.groupby(parts, key=lambda part: part.head.file):
        content = list(of_file)
        epoch, end = content[-1].head.epoch, content[-1].end
        joined = b"".join(part.content for part in content)
        assert joined == b"".join(map(bytes, log.read(epoch, file, end - len(joined), end)))
        for part in content:
            assert part.gtid_set == log.gtid_set(Position(epoch, file, part.end))


def test_stream_has_the_bytes_and_the_gtid_sets_of_the_log(
    daemon: ServedLog, requests: list[Position]
) -> None:
    with client_of(daemon) as client:
        check_stream(daemon, client, requests)


def test_stream_over_tls_has_them_too(log: Log, requests: list[Position], tmp_path: Path) -> None:
    certificate.make(tmp_path / "tls")
    files = certificate.server_options(tmp_path / "tls")
    with (
        serving(log, {"tls": {"cert": files["ssl-cert"], "key": files["ssl-key"]}}) as daemon,
        client_of(daemon, files["ssl-ca"]) as client,
    ):
        check_stream(daemon, client, requests)


def test_position_that_is_far_behind_is_not_followed(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = daemon.log.head()
    path = f"/v1/instances/{INSTANCE}/bytes?epoch={head.epoch}&file={head.file}&follow=1&start="
    monkeypatch.setattr(newest_bytes, "FOLLOW_SECONDS_MAX", 0.01)
    assert daemon.ask("GET", f"{path}{head.offset}").headers["content-type"] == followed_bytes.FOLLOWED_TYPE
    monkeypatch.setattr(newest_bytes, "PIECE_BYTES_AT_ONCE", 10)
    assert daemon.ask("GET", f"{path}{head.offset - 11}").status == 204
    assert daemon.ask("GET", f"{path}{head.offset + 1}").status == 204
    daemon.log.memory = None
    assert daemon.ask("GET", f"{path}{head.offset}").status == 204


def test_idle_stream_has_frames_without_bytes(daemon: ServedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest_bytes, "_IDLE_SECONDS_MAX", 0.0)
    monkeypatch.setattr(newest_bytes, "FOLLOW_SECONDS_MAX", 0.05)
    head = daemon.log.head()
    path = f"/v1/instances/{INSTANCE}/bytes?epoch={head.epoch}&file={head.file}&follow=1&start={head.offset}"
    sent = daemon.ask("GET", path).body
    idle = frame_head({"end": head.offset, "gtid_set": "", "bytes": 0})
    assert sent
    assert sent == idle * (len(sent) // len(idle))


def test_stream_does_not_use_up_the_concurrent_requests_of_an_account(requests: list[Position]) -> None:
    access = [{"name": "pipeline", "token": "secret", "requests_max": 1}]
    with open_log(SimulatedDisk()) as log:
        log.memory = MemoryTier(MIB)
        grow(log)
        with serving(log, access=access) as served, client_of(served) as client:
            head = log.head()
            start = _start_of(log, head)
            for _ in range(2):
                arrived = client.bytes_behind(head.epoch, head.file, start, "", 0.0, MIB)
                assert arrived is not None
                assert arrived.end == head.offset
            assert client.ask("head") == {"position": str(head)}
    assert len(requests) == 2


# --- The client's side ------------------------------------------------------------------------


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FollowedBytes, socket.socket]]:
    monkeypatch.setattr(followed_bytes, "_SILENT_SECONDS_MAX", math.inf)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FollowedBytes(ours, "http://here", FIRST), theirs


@pytest.mark.parametrize("seed", range(10))
def test_frames_that_arrive_in_any_parts_are_joined(
    seed: int, stream: tuple[FollowedBytes, socket.socket]
) -> None:
    followed, theirs = stream
    randomness = random.Random(seed)
    contents = [randomness.randbytes(randomness.randrange(1, 50)) for _ in range(6)]
    ends = list(itertools.accumulate(map(len, contents), initial=FIRST.offset))[1:]
    sent = b"".join(frame(content, end, f"a:1-{end}") for content, end in zip(contents, ends, strict=True))
    taken = b""
    while sent:
        size = randomness.randrange(1, 80)
        theirs.sendall(sent[:size])
        sent = sent[size:]
        arrived = followed.take(0.0, 60)
        assert arrived is not None
        assert len(arrived.content) <= 60
        taken += arrived.content
        assert (arrived.end, arrived.head) == (FIRST.offset + len(taken), followed.position)
        assert not arrived.content or (arrived.end in ends and arrived.gtid_set == f"a:1-{arrived.end}")
    while (arrived := followed.take(0.0, 60)) is not None and arrived.content:
        taken += arrived.content
    assert taken == b"".join(contents)


def test_frame_that_is_larger_than_a_batch_must_be_requested(
    stream: tuple[FollowedBytes, socket.socket],
) -> None:
    followed, theirs = stream
    theirs.sendall(frame(b"small", 9, "a:1") + frame(b"much larger", 20, "a:1-2"))
    assert followed.take(0.0, 10) == ArrivedBytes(b"small", 9, Position(0, FIRST.file, 9), LoggedSet("a:1"))
    assert followed.take(0.0, 10) is None


def test_stream_that_ends_or_is_silent_tells_nothing(
    stream: tuple[FollowedBytes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, theirs = stream
    nothing = followed.take(0.0, 10)
    assert nothing == ArrivedBytes(b"", FIRST.offset, FIRST, LoggedSet(""))
    theirs.sendall(frame(b"last", 8, "a:1"))
    theirs.close()
    assert followed.take(0.0, 10) is not None, "what arrived before the end counts"
    assert followed.take(WAIT_SECONDS_MAX, 10) is None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(followed_bytes, "_SILENT_SECONDS_MAX", -1.0)
        assert FollowedBytes(ours, "http://here", FIRST).take(0.0, 10) is None


def test_frames_without_bytes_show_that_an_idle_stream_is_alive(
    stream: tuple[FollowedBytes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_bytes, "_SILENT_SECONDS_MAX", WAIT_SECONDS_MAX)
    followed, theirs = stream
    theirs.sendall(frame(b"", FIRST.offset, ""))
    followed._heard_at = -math.inf
    assert followed.take(0.0, 10) == ArrivedBytes(b"", FIRST.offset, FIRST, LoggedSet(""))
    followed._heard_at = -math.inf
    assert followed.take(0.0, 10) is None


def test_bytes_that_cannot_be_taken_yet_stay_in_the_socket(
    stream: tuple[FollowedBytes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the daemon would not notice that its client falls behind, and the client would buffer all."""
    monkeypatch.setattr(followed_bytes, "_RECEIVED_BYTES_MAX", 4000)
    monkeypatch.setattr(followed_bytes, "_HEADER_BYTES_MAX", 100)
    followed, theirs = stream
    frames = [frame(b"x" * 50, FIRST.offset + 50 * number, "a:1") for number in range(1, 1000)]
    theirs.sendall(b"".join(frames))
    for number in range(1, 1000):
        assert followed.take(0.0, 99) == ArrivedBytes(
            b"x" * 50, FIRST.offset + 50 * number, followed.position, LoggedSet("a:1")
        )
        assert len(followed._received) < 4000 + 99 + 100


@pytest.mark.parametrize("answer", [b"", OPENED], ids=["the head", "the frames"])
def test_stream_that_a_proxy_holds_back_is_not_requested_again(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_bytes, "_OPEN_SECONDS_MAX", WAIT_SECONDS_MAX if answer else 0.01)
    monkeypatch.setattr(followed_bytes, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(followed_bytes, "_SILENT_SECONDS_MAX", -1.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as proxy,
        closing(ByteStreams(None, {})) as streams,
        ThreadPoolExecutor(1) as threads,
    ):
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        accepted = threads.submit(proxy.accept)
        accepted.add_done_callback(lambda _: accepted.result()[0].sendall(answer))
        streams.open(url, "/shop", FIRST, "")
        assert streams.take(url, FIRST, 0.0, 10) is None
        accepted.result()[0].close()
        monkeypatch.setattr(followed_bytes, "_OPEN_SECONDS_MAX", 0.01)
        streams.open(url, "/shop", FIRST, "")
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.parametrize("wrong", [frame(b"events", 11, "a:1"), b"\xff\xff\xff\xff", b"\x00\x00\x00\x01x"])
def test_wrong_frames_are_refused(wrong: bytes, stream: tuple[FollowedBytes, socket.socket]) -> None:
    followed, theirs = stream
    theirs.sendall(wrong)
    with pytest.raises(ValueError, match=r"ended at|header of|Expecting"):
        followed.take(0.0, MIB)


def test_daemon_that_cannot_follow_is_asked_for_each_batch(
    daemon: ServedLog, requests: list[Position], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier daemon does not know the parameter, and answers like to any other request.
    monkeypatch.setattr(
        log_routes, "followed_bytes", lambda *_: Response(b"events", media_type="application/octet-stream")
    )
    with client_of(daemon) as client:
        parts = read_all(daemon, client)
    assert len(requests) >= len(parts)
    assert parts[-1].head == daemon.log.head()


def test_client_requests_the_bytes_after_a_stream_broke_off(
    daemon: ServedLog, requests: list[Position], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(_followed: FollowedBytes, _seconds: float, _bytes_max: int) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(FollowedBytes, "take", break_off)
    with client_of(daemon) as client:
        parts = read_all(daemon, client)
    assert len(requests) >= len(parts)
    assert parts[-1].head == daemon.log.head()
