# SPDX-License-Identifier: Apache-2.0
"""Readers of a durable log receive only data that enough members have synced, so a takeover cannot lose what
they received.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.errors import PositionInvalid, ServerBusy
from penstock.fleet.copying import LogCopy
from penstock.logstore.confirmed_log import ConfirmedLog
from penstock.logstore.extent import Extent
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.durable import DurableInstance
from penstock.settings.daemon import Settings
from penstock.source.daemon_address import DaemonAddress
from tests.support.daemon.served_log import INSTANCE, LogInstance, ServedLog, serving
from tests.support.logstore.disk import Loss, SimulatedDisk
from tests.support.logstore.source import FOLDER, SETTINGS, TIME_S, Captured, open_log
from tests.support.suite.patience import wait_until

DURABLE = SETTINGS.model_copy(update={"serve": "durable"})


def open_copy(disk: SimulatedDisk) -> Log:
    """Open a copy of a durable log."""
    return Log.open(Path("/copy"), DURABLE, disk, clock=lambda: TIME_S)


@contextmanager
def copying(served: ServedLog, disk: SimulatedDisk, durable: DurableInstance) -> Iterator[LogCopy]:
    """Copy a served log inside the block, as member `b`; `durable` records the data that its readers saw."""
    address = DaemonAddress((("127.0.0.1", served.port()),), INSTANCE)
    copy = LogCopy(
        INSTANCE,
        lambda: open_copy(disk),
        lambda: address,
        lambda: pytest.fail("it is whole"),
        "b",
        durable.note_readable,
    )
    copy.start()
    try:
        yield copy
    finally:
        copy.stop()


def head_of(served: ServedLog) -> Position | None:
    """Return the end that a reader sees, None while nothing is confirmed."""
    answer = served.ask("GET", f"/v1/instances/{INSTANCE}/head")
    if answer.status == 503:
        return None
    text = answer.json["position"]
    return None if text is None else Position.parse(text)


def test_view_of_a_log_equals_the_log_as_it_was_at_each_end() -> None:
    ends: list[tuple[Position, list[Extent], object]] = []

    def note(captured: Captured, count: int) -> None:
        visible = captured.log.visible
        if visible is not None:
            ends.append((visible, captured.log.extents(), captured.log.gtid_set(visible)))

    with open_log(SimulatedDisk()) as log:
        Captured(log, each=note).run()
        confirmed: list[Position | None] = [None]
        view = ConfirmedLog(log, lambda: confirmed[0])
        assert (view.visible, view.extents(), view.earliest()) == (None, [], None)
        for end, extents, gtid_set in ends:
            confirmed[0] = end
            view.follow()
            assert (view.head(), view.extents(), view.gtid_set(end)) == (end, extents, gtid_set)
            assert view.locate_time(2**62).position <= end
            start = extents[-1].start
            stored = b"".join(log.read(end.epoch, end.file, start, end.offset))
            assert b"".join(view.read(end.epoch, end.file, start, end.offset)) == stored
            if end != ends[-1][0]:
                with pytest.raises(PositionInvalid):
                    b"".join(view.read(end.epoch, end.file, end.offset, end.offset + 1))
        assert len({end.epoch for end, _, _ in ends}) > 1


def test_reader_sees_what_the_second_member_has_synced() -> None:
    with open_log(SimulatedDisk()) as log:
        Captured(log, each=lambda captured, count: captured.sync()).run()
        arrivals: list[str] = []
        instance = DurableInstance(LogInstance(log), 2, arrivals.append)
        with pytest.raises(ServerBusy, match="2 members"):
            instance.log()
        assert instance.stored_log().visible == log.visible
        first = log.extents()[0].last
        instance.confirm("b", first)
        assert arrivals == [INSTANCE]
        assert instance.log().visible == first
        status = instance.status()
        assert status["readable"] == str(first)
        assert status["unconfirmed_bytes"] == log.bytes_behind(first) > 0
        assert "b is" in status["why"]
        # A copy that begins again does not retract confirmations.
        instance.confirm("b", Position(0, first.file, 4))
        assert instance.log().visible == first
        assert log.visible is not None
        instance.confirm("c", log.visible)
        assert instance.log().visible == log.visible
        assert instance.status()["unconfirmed_bytes"] == 0


def test_daemon_is_ready_before_a_copy_has_confirmed_anything() -> None:
    """Copies may start only once the daemon is ready."""
    with open_log(SimulatedDisk()) as log, serving(log, copies=2) as served:
        Captured(log).run()
        log.sync()
        assert head_of(served) is None
        assert served.ask("GET", "/readyz").status == 200


def test_reader_of_a_log_without_copies_sees_what_was_synced() -> None:
    with open_log(SimulatedDisk()) as log:
        seen: list[str] = []
        instance = DurableInstance(LogInstance(log), 1, seen.append)

        def compare(captured: Captured, count: int) -> None:
            if log.durable is not None:
                assert instance.log().visible == log.durable
            if count % 3 == 0:
                captured.sync()

        Captured(log, each=compare).run()
        log.sync()
        assert instance.log().visible == log.visible
        assert INSTANCE in seen


def test_confirmations_of_a_log_that_was_reopened_are_forgotten() -> None:
    """The copies may have lost their folders while another member captured."""
    disk = SimulatedDisk()
    with open_log(disk) as log:
        Captured(log).run()
        log.sync()
        opened = LogInstance(log)
        instance = DurableInstance(opened, 2, lambda name: None)
        first = log.extents()[0].last
        instance.confirm("b", first)
        assert instance.log().visible == first
    with open_log(disk) as log:
        opened._log = log
        assert instance.log().visible == first
        instance.confirm("c", Position(0, first.file, 4))
        assert instance.log().visible == first, "the copy that had more may be gone"


@pytest.mark.deep(keep=("DROP",))
@pytest.mark.parametrize("loss", [Loss.DROP, Loss.GARBLE])
def test_capturer_killed_with_its_folder_takes_no_byte_that_a_reader_saw(loss: Loss) -> None:
    disk = SimulatedDisk()
    with Log.open(FOLDER, DURABLE, SimulatedDisk()) as log, serving(log, copies=2) as served:
        seen: list[Position] = []
        heir = DurableInstance(LogInstance(log), 2, lambda name: None)

        def look(captured: Captured, count: int) -> None:
            captured.sync()
            served.served.arrivals.arrived(INSTANCE)
            if count % 25 == 0:
                wait_until(lambda: (copy.log() is not None and head_of(served)) or None)
                head = head_of(served)
                assert head is not None
                seen.append(head)

        with copying(served, disk, heir) as copy:
            Captured(log, each=look).run()
            wait_until(lambda: head_of(served) == log.visible)
            # The host of the copy loses power at this moment, too.
            left = disk.after_power_failure(loss)
        seen.append(log.visible or seen[-1])
        expected = {extent.first: b"".join(_bytes_of(log, extent)) for extent in log.extents()}
    with open_copy(left) as continued:
        assert continued.visible is not None
        assert continued.visible >= max(seen)
        for extent in continued.extents():
            assert b"".join(_bytes_of(continued, extent)) == expected[extent.first]
        taking_over = DurableInstance(LogInstance(continued), 2, lambda name: None)
        # Data that readers already saw is served at once; the rest waits for a copy.
        taking_over.note_readable(heir._confirmed or seen[0])
        assert taking_over.log().visible == heir._confirmed


def _bytes_of(log: Log, extent: Extent) -> Iterator[memoryview]:
    return log.read(extent.epoch, extent.file, extent.start, extent.end)


@pytest.mark.parametrize(
    ("log", "more", "refusal"),
    [
        ({"mode": "memory"}, {}, "log.mode memory"),
        ({"fsync": "never"}, {}, "log.fsync never"),
        ({}, {"processes": 2}, "processes"),
    ],
)
def test_durable_serving_is_refused_where_nothing_becomes_durable(
    log: dict[str, str], more: dict[str, int], refusal: str
) -> None:
    with pytest.raises(ValueError, match=refusal):
        Settings.model_validate(
            {
                "log": {"serve": "durable", **log},
                "instances": {"shop": {"source": "mysql://u@127.0.0.1:1"}},
                **more,
            }
        )
