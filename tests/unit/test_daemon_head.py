# SPDX-License-Identifier: Apache-2.0
"""A pipeline in one process at the head of a daemon's log, over real sockets and without a server."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import pacing
from penstock.engine.run import PipelineRun
from penstock.engine.source_log import SourceLog
from penstock.errors import ServerChanged
from penstock.gtid_sets import LoggedSet
from penstock.local.driver import LocalDriver
from penstock.local.reused_resources import ReusedResources
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.pipeline.settings import PipelineSettings, StepSettings, pipeline_of_values
from penstock.pipeline.state import PipelineState
from penstock.serve.http.answers import StreamedAnswer
from penstock.source.daemon import DaemonSource
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from penstock.source.followed_bytes import ArrivedBytes
from penstock.source.source import SourceOptions
from tests.support.daemon.served_log import INSTANCE, ServedLog, serving
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import Captured, open_log
from tests.support.pipeline.local_runs import notes_pipeline, run_here
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

# This time is longer than a test may wait.
NEVER_SECONDS = 10 * WAIT_SECONDS_MAX


class _Reached(Exception):
    """Raised once the log meets the condition."""


def capture_until(log: Log, is_there: Callable[[Position], bool]) -> None:
    """Capture until the log's end meets a condition."""

    def stop_there(captured: Captured, count: int) -> None:
        if captured.log.visible is not None and is_there(captured.log.visible):
            raise _Reached

    with pytest.raises(_Reached):
        Captured(log, each=stop_there).run()


@pytest.fixture
def daemon() -> Iterator[ServedLog]:
    """Serve a log that ends after the first CREATE TABLE of its server."""
    with open_log(SimulatedDisk()) as log:
        capture_until(log, lambda position: position.offset > 200)
        with serving(log) as served:
            yield served


def grow(daemon: ServedLog) -> Position:
    """Capture at least one more transaction, as the daemon does, and return the new end of the log."""
    head = daemon.log.head()
    capture_until(daemon.log, lambda position: position != head)
    daemon.served.arrivals.arrived(INSTANCE)
    return daemon.log.head()


def url_of(daemon: ServedLog) -> str:
    return f"penstock://127.0.0.1:{daemon.port()}/{INSTANCE}"


def pipeline(daemon: ServedLog, folder: Path, **more: Any) -> PipelineSettings:
    values = {
        "name": "head",
        "source": {"url": url_of(daemon), "start": "earliest"},
        "load": "none",
        "sink": {"files": {"path": str(folder / "feed")}},
    }
    return pipeline_of_values(values | more, folder)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the requests of this process to daemons, by call."""
    counts: Counter[str] = Counter()
    send = DaemonClient._request

    def count(client: DaemonClient, method: str, call: str, **arguments: Any) -> Any:
        counts[call.partition("?")[0]] += 1
        return send(client, method, call, **arguments)

    get_directly = DaemonClient._get_directly

    def count_direct(client: DaemonClient, call: str, *arguments: Any) -> Any:
        response = get_directly(client, call, *arguments)
        counts[call] += response is not None
        return response

    monkeypatch.setattr(DaemonClient, "_request", count)
    monkeypatch.setattr(DaemonClient, "_get_directly", count_direct)
    return counts


def test_run_applies_a_change_when_the_daemon_reports_it(
    daemon: ServedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_POLL_SECONDS", NEVER_SECONDS)
    ends: list[str] = []
    run = PipelineRun(
        pipeline(daemon, tmp_path, batch={"interval": 0}),
        LocalDriver(2),
        report=lambda report: ends.append(report["positions"][INSTANCE].partition(" ")[0]),
    )
    thread = threading.Thread(target=run.run)
    thread.start()
    try:
        wait_until(lambda: ends == [str(daemon.log.head())])
        head = grow(daemon)
        wait_until(lambda: ends[1:] == [str(head)])
    finally:
        run.stop()
        daemon.in_loop(daemon.served.arrivals.close)
        thread.join(WAIT_SECONDS_MAX)
    assert not thread.is_alive()


def test_run_waits_for_the_first_bytes_of_a_daemon(tmp_path: Path) -> None:
    """Daemon and pipeline may start at the same time."""
    reports: list[Any] = []
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        run = PipelineRun(
            pipeline(served, tmp_path, batch={"interval": 0}), LocalDriver(2), report=reports.append
        )
        thread = threading.Thread(target=run.run)
        thread.start()
        try:
            wait_until(lambda: any(report["state"] == "retrying" for report in reports))
            assert reports[-1]["error"] == "ServerBusy"
            capture_until(log, lambda position: position.offset > 200)
            wait_until(lambda: str(log.head()) in str(reports[-1].get("positions")))
        finally:
            run.stop()
            served.in_loop(served.served.arrivals.close)
            thread.join(WAIT_SECONDS_MAX)
    assert not thread.is_alive()


def test_batch_at_the_head_costs_one_request(
    daemon: ServedLog, tmp_path: Path, requests: Counter[str]
) -> None:
    counted: list[dict[str, int]] = []

    def note(report: Any) -> None:
        counted.append({call: count for call, count in requests.items() if call != "position"})
        requests.clear()
        if len(counted) < 3:
            grow(daemon)
        else:
            run.stop()

    run = PipelineRun(pipeline(daemon, tmp_path, batch={"interval": 0}), LocalDriver(2), report=note)
    run.run()
    # The second batch ran twice, because it was the first batch that wrote to the table.
    assert counted[2] == {"bytes": 1}


def test_bytes_after_the_head_are_waited_for_and_end_with_a_transaction(daemon: ServedLog) -> None:
    address = DaemonAddress.parse(url_of(daemon))
    with closing(DaemonClient(address, address.base_urls[0])) as client:
        begin = daemon.log.head()
        key = daemon.log.epochs.epochs[0].server_key

        def behind(seconds: float, bytes_max: int = 1 << 20) -> ArrivedBytes | None:
            return client.bytes_behind(0, begin.file, begin.offset, key, seconds, bytes_max)

        assert behind(0.0) == ArrivedBytes(b"", begin.offset, begin, LoggedSet(""))
        arrivals: list[ArrivedBytes | None] = []
        while not arrivals or not (arrivals[-1] and arrivals[-1].content):
            thread = threading.Thread(target=lambda: arrivals.append(behind(1.0)))
            thread.start()
            if daemon.log.head() == begin:
                grow(daemon)
            thread.join(WAIT_SECONDS_MAX)
        head = daemon.log.head()
        content = b"".join(client.stream(0, begin.file, begin.offset, head.offset, key))
        assert arrivals[-1] == ArrivedBytes(content, head.offset, head, daemon.log.gtid_set(head))
        assert behind(0.0, bytes_max=len(content) - 1) is None
        # An unread answer does not disturb the next answer.
        assert behind(0.0) == arrivals[-1]


def test_small_pieces_of_a_range_are_sent_together(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[int] = []
    send = StreamedAnswer.__call__

    async def count(answer: StreamedAnswer, scope: Any, receive: Any, send_message: Any) -> None:
        async def note(message: Any) -> None:
            if message["type"] == "http.response.body":
                bodies.append(len(message["body"]))
            await send_message(message)

        await send(answer, scope, receive, note)

    monkeypatch.setattr(StreamedAnswer, "__call__", count)
    Captured(daemon.log).run()
    options = SourceOptions.parse(url_of(daemon))
    assert options.daemon is not None
    client = DaemonClient(options.daemon, options.daemon.base_urls[0])
    first = daemon.log.extents()[0]
    content = b"".join(client.stream(first.epoch, first.file, first.start, first.end))
    client.close()
    pieces = [bytes(piece) for piece in daemon.log.read(first.epoch, first.file, first.start, first.end)]
    assert len(pieces) > 1
    assert content == b"".join(pieces)
    assert bodies == [len(content)]


def test_listing_answers_as_the_single_questions_do(daemon: ServedLog) -> None:
    source = DaemonSource(SourceOptions.parse(url_of(daemon)))

    def answers() -> Any:
        return source.epochs(), source.head(), source.gtid_set(source.head()), source.extents()

    with source.listed():
        listed = answers()
        grow(daemon)
        assert answers() == listed, "all answers are of one time"
    assert answers() != listed
    with source.listed():
        at_once = answers()
    assert at_once == answers()
    source.close()


def test_daemon_without_listings_is_asked_each_question(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = DaemonClient.ask
    monkeypatch.setattr(
        DaemonClient,
        "ask",
        lambda client, call, **query: {
            name: value
            for name, value in ask(client, call, **query).items()
            if call != "head" or name == "position"
        },
    )
    source = DaemonSource(SourceOptions.parse(url_of(daemon)))
    with source.listed():
        assert source.head() == daemon.log.head()
    source.close()


def test_bytes_of_another_server_are_refused(daemon: ServedLog) -> None:
    options = SourceOptions.parse(url_of(daemon))
    assert options.daemon is not None
    client = DaemonClient(options.daemon, options.daemon.base_urls[0])
    (epoch,) = daemon.log.epochs.epochs
    first = daemon.log.earliest()
    assert first is not None
    stretch = 0, first.file, first.offset, first.offset + 100
    assert b"".join(client.stream(*stretch, epoch.server_key))
    with pytest.raises(ServerChanged, match="not of mysql:another"):
        list(client.stream(*stretch, "mysql:another"))
    client.close()


@pytest.mark.parametrize(
    ("sink", "batch", "seconds"),
    [
        ({"redis": {"key": "{id}"}}, {}, 0.0),
        # Commits to a table of files become slower with each commit.
        ({"files": {"path": "feed"}}, {}, 1.0),
        ({"redis": {"key": "{id}"}}, {"interval": 3}, 3.0),
    ],
)
def test_interval_depends_on_what_a_batch_costs(
    daemon: ServedLog, tmp_path: Path, sink: Any, batch: Any, seconds: float
) -> None:
    settings = pipeline(daemon, tmp_path, sink=sink, batch=batch)
    paced = pacing.Pacing(settings, settings.make_sink(), LocalDriver(2), threading.Event())
    assert paced._interval == seconds


class _Pauses(threading.Event):
    """A stop event that records the duration of each wait, and ends the wait at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


def test_pauses_grow_while_only_other_tables_change(daemon: ServedLog, tmp_path: Path) -> None:
    settings, pauses = pipeline(daemon, tmp_path, sink={"redis": {"key": "{id}"}}), _Pauses()
    paced = pacing.Pacing(settings, settings.make_sink(), LocalDriver(2), pauses)
    for rows in (0, 0, 0, 0, 0, 0, 7, 0):
        paced.wait_after_batch(time.monotonic(), rows)
    assert pauses.seconds == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.05]


def test_growth_that_planning_does_not_see_is_not_asked_for_again(
    daemon: ServedLog, tmp_path: Path, requests: Counter[str]
) -> None:
    """The daemon that reports growth may be ahead of the daemon that answers planning requests."""
    settings, pauses = pipeline(daemon, tmp_path), _Pauses()
    log = SourceLog(settings.sources[0], settings, 1)
    begin = log.first()
    paced = pacing.Pacing(settings, settings.make_sink(), LocalDriver(2), pauses)
    with closing(log):
        assert log.next(log.resume(begin), None)
        grow(daemon)
        requests.clear()
        for _ in range(3):
            paced.wait_for_changes([log])
        assert (requests["head"], len(pauses.seconds)) == (1, 2)
        assert log.next(log.resume(begin), None)
        assert log.wait(0.01), "the daemon is asked again once the end is another"


def test_tasks_of_successive_batches_reuse_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = StepSettings.make

    def count(settings: StepSettings) -> Any:
        if threading.current_thread().name.startswith("task-"):
            made.append(settings)
        return make(settings)

    monkeypatch.setattr(StepSettings, "make", count)
    steps = [{"filter": "id >= 0"}]
    sink = {"files": {"path": str(tmp_path / "feed")}}
    assert run_here(notes_pipeline(tmp_path, sink, steps=steps), LocalDriver(1)).number == 2
    assert len(made) == 1


def test_resource_that_met_an_error_is_closed_and_not_reused() -> None:
    class Connection:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    resources = ReusedResources()
    first, second = (resources.take("target", Connection) for _ in range(2))
    assert first is not second, "a resource has one user at a time"
    resources.give_back("target", first, is_intact=False)
    resources.give_back("target", second, is_intact=True)
    assert (first.is_closed, second.is_closed) == (True, False)
    assert resources.take("another target", Connection) is not second
    assert resources.take("target", Connection) is second
    resources.give_back("target", second, is_intact=True)
    resources.close()
    assert second.is_closed
    assert resources.take("target", Connection) is not second


def test_progress_of_quick_batches_is_recorded_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[int, bool]] = []
    show = PipelineState.show

    def note(state: PipelineState, progress: Any) -> None:
        recorded.append((progress.get("batch", 0), progress["ended"]))
        show(state, progress)

    monkeypatch.setattr(PipelineState, "show", note)
    monkeypatch.setattr("penstock.engine.progress._PAUSE_SECONDS", NEVER_SECONDS)
    sink = {"files": {"path": str(tmp_path / "feed")}}
    run_here(notes_pipeline(tmp_path, sink, batch={"interval": 0, "rows": 10}))
    *earlier, (last, has_ended) = recorded
    assert earlier == [(0, False), (1, False)]
    assert (last > 4, has_ended) == (True, True)
