# SPDX-License-Identifier: Apache-2.0
"""A kept log retains prepared transactions until they are committed or rolled back."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock._native import BlockCutter
from penstock.binlog import read_binlog
from penstock.errors import PreparedMissing
from penstock.limits import PREPARED_HOLD_SECONDS_MAX, PREPARED_OLD_SECONDS
from penstock.logstore.holds import BrokenHold, Hold
from penstock.logstore.log import Log
from penstock.logstore.prepared import HOLD_NAME, PreparedFile, PreparedSurvey
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.source.log import LogSource
from penstock.source.source import SourceOptions
from tests.support.binlog.events import INCIDENT, Event, first_event_end
from tests.support.binlog.xa_log import Group, XaLog
from tests.support.logstore.folders import BLOCK_BYTES, open_log

XID = "X'78',X'',1"
SAMPLES = {"mysql-9.7-2": "mysql", "mariadb-10.11-2": "mariadb"}


class KeptXaLog:
    """A kept log of three files. A transaction is prepared in the first file, and committed in the last."""

    def __init__(self, log: Log, sample: str) -> None:
        self.log = log
        self.xa = XaLog(sample)
        self.flavor = SAMPLES[sample]
        self.now_us = 1_000_000_000
        self.survey = PreparedSurvey(log.disk, log.layout, lambda: self.now_us)
        self.retention = Retention(
            log.disk, log.layout, RetentionPolicy(age_seconds=None, bytes_max=0), clock=lambda: self.now_us
        )

    def add(self, number: int, *groups: Group, epoch: int = 0) -> None:
        """Append a file to the log; the first file of an epoch begins the epoch on a new server."""
        path = self.xa.write(self.log.folder.parent / f"mysql-bin.{number:06}", groups)
        data = path.read_bytes()
        path.unlink()
        first = first_event_end(data)
        head, source = data[:first], {"epoch": epoch, "flavor": self.flavor}
        if number == 1:
            self.log.begin_epoch(
                **source,
                server_key="ab"[epoch],
                server_id=1 + epoch,
                version="9",
                file=path.name,
                offset=first,
                gtid_set="",
            )
        cutter = BlockCutter(
            **source, file=path.name, offset=first, live=False, block_bytes=BLOCK_BYTES, head=head
        )
        self.log.begin_file(path.name, first, head[4:], cutter.gtid_set, **source, server_id=1 + epoch)
        cutter.feed(data[first:])
        start, end, boundary = cutter.data_start, cutter.data_end, cutter.boundary
        self.log.append(cutter.take_data(), start, end, boundary, cutter.take_records())
        self.log.sync()

    def upkeep(self) -> None:
        """Run one upkeep pass, with a retention that keeps only held segments."""
        self.survey.run(self.log)
        self.retention.run(self.log)

    @property
    def files(self) -> list[str]:
        """The files that the log still contains."""
        return [extent.file for extent in self.log.extents()]

    @property
    def prepared(self) -> PreparedFile:
        """The prepared transactions noted by the last survey."""
        prepared_file = PreparedFile.load(self.log.disk, self.log.layout)
        assert prepared_file is not None
        return prepared_file

    def held(self) -> list[Hold]:
        """The hold on prepared transactions."""
        return [hold for hold in self.retention.holds.all(self.now_us) if hold.name == HOLD_NAME]


@pytest.fixture(params=SAMPLES)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeptXaLog]:
    """A log with a prepared transaction and two further files."""
    with open_log(tmp_path / "log") as log:
        kept = KeptXaLog(log, request.param)
        kept.add(1, *kept.xa.before, kept.xa.prepare)
        kept.add(2, kept.xa.after[0])
        kept.add(3, *kept.xa.after[1:])
        yield kept


def test_prepared_transaction_is_kept_until_it_commits(kept: KeptXaLog) -> None:
    for _ in range(2):
        kept.upkeep()
        assert kept.files == [f"mysql-bin.{number:06}" for number in (1, 2, 3)]
    (transaction,) = kept.prepared.transactions
    assert transaction.xid == XID
    assert [status.position for status in kept.held()] == [transaction.position]
    kept.add(4, kept.xa.commit)
    committed = kept.log.extents()[-1].first
    batches = [
        pyarrow.record_batch(batch)
        for batch in read_binlog(kept.log.folder, start=str(committed), emit="envelope")
    ]
    assert sum(batch.num_rows for batch in batches) > 0
    kept.upkeep()
    assert (kept.prepared.transactions, kept.held()) == ((), [])
    assert kept.files == ["mysql-bin.000004"]
    with pytest.raises(PreparedMissing):
        list(read_binlog(kept.log.folder, start=str(committed), emit="envelope"))


def test_rows_prepared_before_a_failover_arrive_once_with_the_commit_on_the_new_server(
    kept: KeptXaLog,
) -> None:
    def read(start: str | None = None) -> list[dict[str, Any]]:
        return [
            row
            for batch in read_binlog(kept.log.folder, start=start, emit="envelope")
            for row in pyarrow.record_batch(batch).to_pylist()
        ]

    kept.add(1, epoch=1)
    kept.upkeep()
    (transaction,) = kept.prepared.transactions
    assert (transaction.xid, transaction.position.epoch) == (XID, 0)
    assert [hold.position for hold in kept.held()] == [transaction.position]
    before = read()
    # MariaDB's position contains only the newest transaction of each domain.
    kept.add(2, kept.xa.commit_numbered(99), epoch=1)
    committed = kept.log.extents()[-1]
    actual_rows = read(str(committed.first))
    [version] = {row["_commit_version"] for row in actual_rows}
    assert (
        committed.first.commit_version
        <= version
        < replace(committed.first, offset=committed.end).commit_version
    )
    assert read() == [*before, *actual_rows]
    kept.upkeep()
    assert (kept.prepared.transactions, kept.held()) == ((), [])


def test_commit_on_a_new_server_without_the_prepared_rows_is_refused_by_name(kept: KeptXaLog) -> None:
    kept.add(1, epoch=1)
    kept.retention.run(kept.log)
    assert {extent.first.epoch for extent in kept.log.extents()} == {1}
    kept.add(2, kept.xa.commit_numbered(99), epoch=1)
    with pytest.raises(PreparedMissing):
        list(read_binlog(kept.log.folder, emit="envelope"))


def test_rollback_discards_the_prepared_transaction(kept: KeptXaLog) -> None:
    kept.upkeep()
    kept.add(4, kept.xa.rollback())
    kept.upkeep()
    assert (kept.prepared.transactions, kept.held()) == ((), [])
    assert kept.files == ["mysql-bin.000004"]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"{}")])
def test_log_without_its_prepared_notes_is_surveyed_again(
    kept: KeptXaLog, damage: Callable[[Path], object]
) -> None:
    kept.upkeep()
    before = kept.prepared
    damage(kept.log.layout.prepared)
    kept.upkeep()
    assert kept.prepared == before
    assert kept.files[0] == "mysql-bin.000001"


def test_hold_keeps_prepared_transactions_at_its_position(kept: KeptXaLog) -> None:
    between = next(extent.first for extent in kept.log.extents() if extent.file == "mysql-bin.000002")
    kept.retention.holds.put(Hold("reader", between))
    kept.add(4, kept.xa.commit)
    kept.upkeep()
    assert kept.files[0] == "mysql-bin.000001", "the reader needs its rows when it comes to the commit"
    kept.retention.holds.remove("reader")
    kept.upkeep()
    assert kept.files == ["mysql-bin.000004"]


def test_transactions_prepared_after_a_broken_hold_are_held(kept: KeptXaLog) -> None:
    stuck = Hold("stuck", kept.log.extents()[0].first)
    kept.retention.holds.put(stuck)
    kept.survey.run(kept.log)
    assert kept.held() == [], "the reader comes to it by itself"
    kept.log.broken_holds = (BrokenHold(stuck, "it is too far back"),)
    kept.survey.run(kept.log)
    assert [status.position for status in kept.held()] == [kept.prepared.transactions[0].position]


def test_abandoned_prepared_transaction_is_shown_and_finally_dropped(kept: KeptXaLog) -> None:
    kept.upkeep()
    assert kept.prepared.old(kept.now_us) == []
    kept.now_us += PREPARED_OLD_SECONDS * 1_000_000
    assert len(kept.prepared.old(kept.now_us)) == 1
    kept.now_us += PREPARED_HOLD_SECONDS_MAX * 1_000_000
    kept.upkeep()
    assert (kept.held(), kept.files) == ([], ["mysql-bin.000003"])


def test_interrupted_survey_resumes(kept: KeptXaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.logstore.prepared.PREPARED_SURVEY_BYTES", 1)
    ends = []
    for _ in range(4):
        kept.survey.run(kept.log)
        ends.append(kept.prepared.upto.file)
    assert ends == [f"mysql-bin.{number:06}" for number in (1, 2, 3, 3)]
    assert kept.prepared.upto == kept.log.visible


def test_unreadable_segment_is_skipped(kept: KeptXaLog) -> None:
    second = kept.log.segments[1]
    kept.log.layout.segment(second.hour, second.version).unlink()
    kept.survey.run(kept.log)
    assert kept.prepared.upto == kept.log.visible
    assert [transaction.file for transaction in kept.prepared.transactions] == ["mysql-bin.000001"]


@pytest.fixture
def noted(kept: KeptXaLog, monkeypatch: pytest.MonkeyPatch) -> KeptXaLog:
    """A log whose reader knows earlier prepared transactions only from the notes of the survey."""
    monkeypatch.setattr("penstock.source.prepared.PREPARED_SEARCH_BYTES_MAX", 1)
    kept.survey.run(kept.log)
    return kept


def test_prepared_notes_are_located_under_the_readers_epoch(noted: KeptXaLog) -> None:
    (transaction,) = noted.prepared.transactions
    options = SourceOptions.parse(str(noted.log.folder))
    for epochs in ((), ((3, "a"),)):
        source = LogSource(replace(options, epochs=epochs))
        prepared = source.find_prepared(XID, source.head())
        assert prepared is not None
        assert prepared.position == replace(transaction.position, epoch=3 if epochs else 0)
        assert source.extents(prepared.position)


def test_earlier_statement_does_not_commit_a_prepared_transaction(noted: KeptXaLog) -> None:
    """A transaction prepared later may have the same id."""
    (transaction,) = noted.prepared.transactions
    source = LogSource(SourceOptions.parse(str(noted.log.folder)))
    assert source.find_prepared(XID, transaction.position) is None
    assert source.find_prepared(XID, source.earliest()) is None


def test_prepared_transaction_is_not_committed_twice(kept: KeptXaLog) -> None:
    """The survey lags: a noted transaction may have been committed since."""
    kept.survey.run(kept.log)
    kept.add(4, kept.xa.commit)
    kept.add(5, kept.xa.commit)
    source = LogSource(SourceOptions.parse(str(kept.log.folder)))
    fourth, fifth = source.extents()[-2:]
    assert source.find_prepared(XID, fourth.first) is not None
    assert source.find_prepared(XID, fifth.first) is None


def test_survey_continues_after_an_incident(kept: KeptXaLog) -> None:
    incident = Event(0, INCIDENT, 1, 0, 0, b"\1\0\4lost")
    kept.add(4, kept.xa.rollback(), [incident], kept.xa.prepare)
    kept.survey.run(kept.log)
    assert [transaction.file for transaction in kept.prepared.transactions] == ["mysql-bin.000004"]
