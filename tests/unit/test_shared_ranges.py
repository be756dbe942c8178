# SPDX-License-Identifier: Apache-2.0
"""What the runs of several sinks share: decoded ranges, and the positions where batches end."""

import random
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine import shared_ranges
from penstock.engine import sink_runs as sink_runs_module
from penstock.engine.reading import Part
from penstock.engine.shared_ends import SharedEnds, Stretch
from penstock.engine.shared_ranges import SharedRanges
from penstock.engine.source_log import SourceLog
from penstock.errors import ConnectionLost, SchemaMismatch, ServerBusy
from penstock.model import Position, TablePatterns
from penstock.narrowed_patterns import NarrowedPatterns
from penstock.pipeline.record import RangeWork
from penstock.source.offsets import Offset
from penstock.source.reading import Batch
from penstock.source.source import ByteRange
from penstock.source.tracking import TrackedSchemas
from tests.support.binlog.forged_log import NOTE_IDS
from tests.support.pipeline.local_runs import notes_pipeline, run_sinks_here
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tests.unit.test_pipeline_sinks import feed_of, ids_in

WORK = RangeWork("shop", ByteRange(0, "bin.000001", 4, 900, True))
ALL = TablePatterns("shop.*")
ENDS: Any = "where the range begins and ends"
PARTS = 30


def batch_of(number: int, table: str = "notes", size: int = 10) -> Batch:
    native = SimpleNamespace(
        database="shop",
        table=table,
        schema_version=1,
        rows=number,
        position=("bin.000001", number),
        bytes=size,
    )
    return Batch(native, 0)


class Decoders:
    """Opens decoders of one range, and counts how many were opened and closed."""

    def __init__(self, parts: Callable[[TablePatterns | None], Iterator[Part]]) -> None:
        self._parts = parts
        self.opened = 0
        self.closed = 0

    def open(
        self, plan: object, work: object, number: int, ends: Any, tables: TablePatterns | None = None
    ) -> Generator[Part, None, None]:
        """Replace `range_parts`, and count the calls."""
        self.opened += 1
        ends(ENDS)
        try:
            yield from self._parts(tables)
        finally:
            self.closed += 1


def numbered(tables: TablePatterns | None = None) -> Iterator[Part]:
    return (batch_of(number, "notes" if number % 3 else "orders") for number in range(PARTS))


def plan_of(sink: str, patterns: TablePatterns = ALL) -> Any:
    return SimpleNamespace(
        mark=SimpleNamespace(generation=sink),
        sources={"shop": SimpleNamespace(tables=patterns)},
        passed_over=frozenset(),
    )


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Decoders:
    counted = Decoders(numbered)
    monkeypatch.setattr(shared_ranges, "range_parts", counted.open)
    return counted


def reading(ranges: SharedRanges, plan: Any, seen: list[Any] | None = None) -> Iterator[Part]:
    return ranges.parts(plan, WORK, 0, (seen if seen is not None else []).append)


def numbers(parts: Iterator[Part]) -> list[int]:
    return [part.rows for part in parts if isinstance(part, Batch)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("bytes_max", [0, 10, 55, 1 << 20])
def test_every_sink_reads_every_part_once_and_in_order(decoders: Decoders, seed: int, bytes_max: int) -> None:
    choose = random.Random(seed)
    ranges = SharedRanges({"shop": ALL}, 3, bytes_max)
    readers: dict[str, Iterator[Part]] = {}
    received: dict[str, list[int]] = {name: [] for name in ("lake", "cache", "audit")}
    ended: dict[str, list[Any]] = {name: [] for name in received}
    waiting = set(received)
    while waiting:
        name = choose.choice(sorted(waiting))
        reader = readers.setdefault(name, reading(ranges, plan_of(name), ended[name]))
        for _ in range(choose.choice([1, 1, 5, 40])):
            part = next(reader, None)
            if part is None:
                waiting.discard(name)
                break
            assert isinstance(part, Batch)
            received[name].append(part.rows)
    assert received == {key: list(range(PARTS)) for key in received}
    assert ended == {key: [ENDS] for key in received}, "each sink can prove that its ranges meet"
    assert decoders.opened == decoders.closed, "no connection stays open"
    if bytes_max == 1 << 20:
        assert decoders.opened == 1, "the range is decoded once"
    assert ranges._bytes <= bytes_max


def test_sinks_in_threads_share_one_decoder(decoders: Decoders) -> None:
    ranges = SharedRanges({"shop": ALL}, 4)
    together = threading.Barrier(4)
    received: list[list[int]] = []

    def read(name: str) -> None:
        together.wait(WAIT_SECONDS_MAX)
        received.append(numbers(reading(ranges, plan_of(name))))

    threads = [threading.Thread(target=read, args=(f"sink{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS_MAX)
    assert received == [list(range(PARTS))] * 4
    assert decoders.opened == 1


def test_sink_receives_its_own_tables_of_a_shared_range(decoders: Decoders) -> None:
    ranges = SharedRanges({"shop": ALL}, 2)
    orders = NarrowedPatterns(ALL, TablePatterns("shop.orders"))
    assert numbers(reading(ranges, plan_of("cache", orders))) == list(range(0, PARTS, 3))
    assert numbers(reading(ranges, plan_of("lake"))) == list(range(PARTS))
    assert decoders.opened == 1


def test_abandoned_range_closes_its_decoder_and_is_decoded_again(decoders: Decoders) -> None:
    ranges = SharedRanges({"shop": ALL}, 2)
    reader: Any = reading(ranges, plan_of("lake"))
    next(reader)
    reader.close()
    assert (decoders.opened, decoders.closed) == (1, 1)
    assert numbers(reading(ranges, plan_of("lake"))) == list(range(PARTS))


def test_error_of_another_sinks_table_is_avoided_by_decoding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_orders(tables: TablePatterns | None) -> Iterator[Part]:
        yield batch_of(1)
        if tables is not None:
            raise SchemaMismatch("the rows of shop.orders do not fit")
        yield batch_of(2)

    monkeypatch.setattr(shared_ranges, "range_parts", Decoders(fail_at_orders).open)
    ranges = SharedRanges({"shop": ALL}, 2)
    notes = plan_of("cache", NarrowedPatterns(ALL, TablePatterns("shop.notes")))
    with pytest.raises(ConnectionLost, match="cannot be decoded for all sinks"):
        numbers(reading(ranges, notes))
    with pytest.raises(SchemaMismatch):
        numbers(reading(ranges, plan_of("lake")))
    assert numbers(reading(ranges, notes)) == [1, 2]


def test_lost_connection_reaches_every_sink_and_the_range_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = iter([True, False])

    def lose_once(tables: TablePatterns | None) -> Iterator[Part]:
        yield batch_of(1)
        if next(tries):
            raise ServerBusy("the server is busy")
        yield batch_of(2)

    decoders = Decoders(lose_once)
    monkeypatch.setattr(shared_ranges, "range_parts", decoders.open)
    ranges = SharedRanges({"shop": ALL}, 2)
    readers = [reading(ranges, plan_of(name)) for name in ("lake", "cache")]
    for reader in readers:
        next(reader)
    errors = []
    for reader in readers:
        with pytest.raises(ServerBusy) as busy:
            next(reader)
        errors.append(busy.value)
    assert errors[0] is not errors[1], "two threads do not raise one exception"
    for name in ("lake", "cache"):
        assert numbers(reading(ranges, plan_of(name))) == [1, 2]
    assert decoders.opened == 2


def test_unexpected_exception_of_a_decoder_is_no_end_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([True, False])

    def fail_once(tables: TablePatterns | None) -> Iterator[Part]:
        yield batch_of(1)
        if next(tries):
            raise MemoryError
        yield batch_of(2)

    decoders = Decoders(fail_once)
    monkeypatch.setattr(shared_ranges, "range_parts", decoders.open)
    ranges = SharedRanges({"shop": ALL}, 2)
    ends: list[Any] = []
    readers = [reading(ranges, plan_of(name), ends) for name in ("lake", "cache")]
    for reader in readers:
        next(reader)
    with pytest.raises(MemoryError):
        next(readers[0])
    with pytest.raises(ConnectionLost, match="ended in another sink: MemoryError"):
        next(readers[1])
    assert not ends, "neither sink commits the range"
    assert numbers(reading(ranges, plan_of("cache"))) == [1, 2]


def test_range_that_is_decoded_differently_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([[1, 2, 3], [8, 2, 3]])
    decoders = Decoders(lambda tables: (batch_of(number) for number in next(runs)))
    monkeypatch.setattr(shared_ranges, "range_parts", decoders.open)
    ranges = SharedRanges({"shop": ALL}, 2, bytes_max=10)
    slow = reading(ranges, plan_of("slow"))
    next(slow)
    assert numbers(reading(ranges, plan_of("fast"))) == [1, 2, 3]
    with pytest.raises(ConnectionLost, match="decoded differently"):
        list(slow)


# --- The ends of batches --------------------------------------------------------------------


def offset_of(number: int) -> Offset:
    return Offset(Position(0, "bin.000001", number), server_key="mysql:a")


@pytest.mark.parametrize("seed", range(12))
def test_sinks_read_everything_and_meet(seed: int) -> None:
    """Sinks plan at random moments while the log grows. The ranges of each sink are contiguous, and sinks at
    the same position read the same ranges.
    """
    choose = random.Random(seed)
    ends = SharedEnds()
    head = 100
    at = dict.fromkeys(("lake", "cache", "audit"), 4)
    read: dict[str, list[tuple[int, int]]] = {name: [] for name in at}

    def plan(name: str) -> None:
        begin = at[name]
        if begin == head:
            return
        stretch = ends.stretch_from(offset_of(begin))
        if stretch is None:
            end = min(head, begin + choose.choice([50, 1000]))
            stretch = ends.agree(Stretch(offset_of(begin), offset_of(end), offset_of(head)))
        end = stretch.end.position.offset
        assert begin < end <= head
        read[name].append((begin, end))
        at[name] = end

    for _ in range(150):
        head += choose.choice([0, 0, 7, 120])
        # One sink is slow.
        plan(choose.choice(["lake", "cache", "lake", "cache", "audit"]))
    for _ in range(200):
        for name in at:
            plan(name)
    assert set(at.values()) == {head}
    for name in each(at):
        begins, stops = zip(*read[name], strict=True)
        assert begins == (4, *stops[:-1])
    head += 60
    for name in each(at):
        plan(name)
        head += 10
    assert len({stretches[-1] for stretches in read.values()}) == 1, "sinks that stand together read the same"


def test_offsets_of_two_servers_are_never_shared() -> None:
    ends = SharedEnds()
    elsewhere = Offset(Position(0, "bin.000001", 4), server_key="mysql:b")
    ends.agree(Stretch(offset_of(4), offset_of(500), offset_of(500)))
    assert ends.stretch_from(elsewhere) is None
    end = Offset(Position(0, "bin.000001", 900), server_key="mysql:b")
    assert ends.agree(Stretch(elsewhere, end, end)).end == end


# --- Whole runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_max", [0, shared_ranges.SHARED_BYTES_MAX])
def test_log_is_decoded_once_for_sinks_that_stand_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    opened: list[str] = []
    range_parts = shared_ranges.range_parts

    def count(plan: Any, work: RangeWork, *more: Any) -> Any:
        opened.append(str(work.byte_range))
        return range_parts(plan, work, *more)

    monkeypatch.setattr(shared_ranges, "range_parts", count)
    monkeypatch.setattr(sink_runs_module, "SharedRanges", partial(SharedRanges, bytes_max=bytes_max))
    names = ("lake", "cache", "audit")
    settings = notes_pipeline(
        tmp_path,
        sinks={name: feed_of(tmp_path, name) for name in names},
    )
    run_sinks_here(settings)
    for name in each(names):
        assert ids_in(tmp_path, name) == list(NOTE_IDS)
    first, second = sorted(set(opened))
    if bytes_max:
        # The definition of the table was not expected, so the first batch of each sink runs again.
        assert opened.count(first) <= 2
        assert opened.count(second) == 1


@pytest.mark.parametrize("shared_ends", [SharedEnds(), None], ids=["shared", "alone"])
def test_schema_history_of_shared_ranges_covers_the_tables_of_all_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_ends: SharedEnds | None
) -> None:
    covered: list[TablePatterns] = []
    monkeypatch.setattr(TrackedSchemas, "open", lambda settings, start: covered.append(settings.tables))
    sinks = {"lake": feed_of(tmp_path, "lake"), "audit": feed_of(tmp_path, "audit", tables="shop.others")}
    audit = notes_pipeline(tmp_path, sinks=sinks).of_sink("audit")
    log = SourceLog(audit.sources[0], audit, 2, shared_ends)
    assert log.histories([WORK]) == [None]
    log.close()
    assert [patterns.matches("shop", "notes") for patterns in covered] == [shared_ends is not None]
