# SPDX-License-Identifier: Apache-2.0
"""The batch after the previous batch's end is read in one request; every other case uses a listing."""

from typing import Any

import pytest

from penstock.engine import head_follower
from penstock.engine.head_follower import HeadFollower
from penstock.errors import ConnectionLost
from penstock.gtid_sets import LoggedSet
from penstock.model import Position
from penstock.pipeline.record import BatchRecord, RangeWork
from penstock.source.bounds import Bounds
from penstock.source.daemon_address import DaemonAddress
from penstock.source.followed_bytes import ArrivedBytes
from penstock.source.offsets import Offset
from penstock.source.source import ByteRange, SourceOptions

BEGIN = Offset(Position(0, "log.000001", 100), LoggedSet("a:1-5"), "server", fingerprint="f")
WORK = RangeWork("shop", ByteRange(0, "log.000001", 4, 100, True, gtid_after="b:1"))


class Daemon:
    """Returns the configured answers, and counts the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[Position, float]] = []
        monkeypatch.setattr(
            "penstock.engine.head_follower.DaemonSource.bytes_behind",
            lambda _source, position, seconds, _bytes_max: self.answer(position, seconds),
        )

    def answer(self, position: Position, seconds: float) -> ArrivedBytes | None:
        self.asked.append((position, seconds))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert answer is None or isinstance(answer, ArrivedBytes)
        return answer


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    return Daemon(monkeypatch)


@pytest.fixture
def follower() -> HeadFollower:
    follower = HeadFollower(
        SourceOptions(daemon=DaemonAddress.parse("penstock://localhost:7070/shop")), 1 << 20
    )
    follower.note(BEGIN, BEGIN, [WORK])
    return follower


def arrived(end: int, content: bytes = b"events", head: Position | None = None) -> ArrivedBytes:
    return ArrivedBytes(content, end, head or Position(0, "log.000001", end), LoggedSet("a:1-6"))


def test_stretch_has_the_bytes_and_the_filters_of_the_log_and_is_followed_by_the_next(
    daemon: Daemon, follower: HeadFollower
) -> None:
    daemon.answers = [arrived(106), arrived(112)]
    stretch = follower.next(BEGIN)
    assert stretch is not None
    assert stretch.work is not None
    assert stretch.work.byte_range == ByteRange(0, "log.000001", 100, 106, True, gtid_after="b:1")
    assert stretch.work.content == b"events"
    assert stretch.end == Offset(
        Position(0, "log.000001", 106), LoggedSet("a:1-6"), "server", fingerprint="f"
    )
    assert (following := follower.next(stretch.end)) is not None
    assert following.end.position.offset == 112
    assert [position.offset for position, _ in daemon.asked] == [100, 106]


def test_content_is_not_recorded(daemon: Daemon, follower: HeadFollower) -> None:
    daemon.answers = [arrived(106)]
    stretch = follower.next(BEGIN)
    assert stretch is not None
    assert stretch.work is not None
    record = BatchRecord(1, {}, {}, (stretch.work,), (), 1)
    [replayed] = BatchRecord.from_json(record.to_json()).ranges
    assert replayed == stretch.work
    assert replayed.content == b""


def test_what_arrived_while_waiting_is_not_asked_for_again(daemon: Daemon, follower: HeadFollower) -> None:
    daemon.answers = [arrived(106)]
    assert follower.wait(BEGIN, 0.2)
    stretch = follower.next(BEGIN)
    assert stretch is not None
    assert stretch.work is not None
    assert daemon.asked == [(BEGIN.position, 0.2)]


def test_nothing_new_needs_no_listing(daemon: Daemon, follower: HeadFollower) -> None:
    daemon.answers = [arrived(100, b""), arrived(100, b"")]
    for _ in range(2):
        stretch = follower.next(BEGIN)
        assert stretch is not None
        assert stretch.work is None


@pytest.mark.parametrize(
    "answer",
    [arrived(100, b"", Position(0, "log.000002", 157)), None, ConnectionLost("the daemon does not answer")],
    ids=["the next file", "too many bytes", "an error"],
)
def test_anything_else_is_planned_from_a_listing(
    daemon: Daemon, follower: HeadFollower, answer: ArrivedBytes | Exception | None
) -> None:
    daemon.answers = [answer]
    assert follower.next(BEGIN) is None
    # Only a listing can tell where the log continues.
    assert follower.next(BEGIN) is None
    assert len(daemon.asked) == 1


def test_daemon_that_cannot_tell_is_not_asked_for_a_while(
    daemon: Daemon, follower: HeadFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers = [None, arrived(106)]
    assert follower.next(BEGIN) is None
    follower.note(BEGIN, BEGIN, [WORK])
    assert follower.next(BEGIN) is None
    assert len(daemon.asked) == 1
    monkeypatch.setattr(head_follower, "_PAUSE_SECONDS", 0.0)
    follower._paused_until = 0.0
    follower.note(BEGIN, BEGIN, [WORK])
    assert follower.next(BEGIN) is not None


@pytest.mark.parametrize(
    ("end", "head", "works"),
    [
        (BEGIN, Offset(Position(0, "log.000001", 900), server_key="server"), [WORK]),
        (BEGIN, BEGIN, [WORK, WORK]),
        (BEGIN, BEGIN, [RangeWork("shop", WORK.byte_range, Bounds(gtid_after="a:1"))]),
        (BEGIN, BEGIN, [RangeWork("shop", ByteRange(0, "log.000001", 4, 90, True))]),
    ],
    ids=["before the head", "two ranges", "a filter by GTID", "another end"],
)
def test_only_a_plain_range_at_the_head_is_followed(
    daemon: Daemon, follower: HeadFollower, end: Offset, head: Offset, works: list[RangeWork]
) -> None:
    follower.note(end, head, works)
    assert follower.next(end) is None
    assert not follower.wait(end, 0.2)
    assert daemon.asked == []


def test_another_daemon_is_followed_only_if_its_file_is_the_same(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = DaemonAddress.parse("penstock://one:7070,two:7070/shop")
    fingerprints = {"one": "f", "two": "f"}
    answering, asked = ["one"], list[str]()
    monkeypatch.setattr(head_follower.DaemonSource, "answering_url", property(lambda _source: answering[-1]))

    def fingerprint(_source: Any, file: str, epoch: int) -> str:
        assert (file, epoch) == ("log.000001", 0)
        asked.append(answering[-1])
        return fingerprints[answering[-1]]

    monkeypatch.setattr(head_follower.DaemonSource, "fingerprint", fingerprint)
    follower = HeadFollower(SourceOptions(daemon=address), 1 << 20)
    follower.note(BEGIN, BEGIN, [WORK])
    daemon.answers = [arrived(end) for end in (106, 112, 118, 124)]
    end = BEGIN
    for url in ("one", "one", "two"):
        answering.append(url)
        stretch = follower.next(end)
        assert stretch is not None
        end = stretch.end
    assert asked == ["one", "two"]
    answering.append("one")
    fingerprints["one"] = "another file"
    assert follower.next(end) is None
