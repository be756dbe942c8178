# SPDX-License-Identifier: Apache-2.0
"""Named consumers hold the log at their checkpoints, in every protocol."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.shared.asked_daemon import AskedDaemon
from penstock.client import Subscriber, intake
from penstock.coordinate.backends.memory import MemoryStore
from penstock.engine import source_log
from penstock.engine.source_log import SourceLog
from penstock.logstore.holds import Hold, Holds, consumer_hold_name
from penstock.logstore.log import Log
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position
from penstock.pipeline.settings import load_pipeline
from penstock.serve import consumers as consumers_module
from penstock.serve.http import changes as changes_module
from penstock.settings.daemon import LogSettings
from penstock.source.offsets import Offset
from tests.support.canal.client import CanalClient
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving
from tests.support.logstore.source import Captured
from tests.support.ptubes.client import PtubesClient
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

LISTEN = {"canal": "127.0.0.1:0", "ptubes": "127.0.0.1:0"}
TABLES = ["fuzzed.t", "fuzzed.u", "fuzzed.wide"]


@pytest.fixture
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture
def daemon(log: Log, request: pytest.FixtureRequest) -> Iterator[ServedLog]:
    with serving(log, LISTEN, store=MemoryStore(request.node.name)) as daemon:
        yield daemon


def holds(daemon: ServedLog) -> dict[str, Position]:
    """Write the daemon's holds, and return them by consumer."""
    daemon.in_loop(daemon.served.consumers.write)
    kept = Holds(daemon.log.disk, daemon.log.layout).all()
    return {hold.name.removeprefix("penstock.consumer."): hold.position for hold in kept}


def places(log: Log) -> list[Position]:
    """Return the starts of the source's files in the log, and the end of the log."""
    return [*(extent.first for extent in log.extents()), log.head()]


def consume(
    daemon: ServedLog,
    consumer: str,
    consumed: Position,
    shards: list[int] | None = None,
    token: str | None = None,
) -> None:
    """Request changes as a subscriber of two shards that has consumed up to a position."""
    asked: dict[str, Any] = {"subscriber": consumer, "start": "latest", "wait_seconds": 0}
    if shards is not None:
        asked["shards"] = {"count": 2, "of": shards}
    path = f"/v1/instances/{INSTANCE}/changes"
    assert daemon.ask("POST", path, asked, token=token, Penstock_Consumed=str(consumed)).status == 200


def test_subscriber_holds_the_log_at_its_consumed_position(daemon: ServedLog) -> None:
    first, second, *_ = places(daemon.log)
    consume(daemon, "cache/host-1", first)
    assert holds(daemon) == {"cache": first}
    consume(daemon, "cache/host-2", second)
    assert holds(daemon) == {"cache": second}
    # An operator may also move the checkpoint back.
    consume(daemon, "cache/host-2", first)
    assert holds(daemon) == {"cache": first}
    assert daemon.ask("DELETE", f"/v1/instances/{INSTANCE}/holds/{consumer_hold_name('cache')}").status == 200
    assert holds(daemon) == {}


def test_deleted_consumer_releases_the_log_at_once(daemon: ServedLog) -> None:
    asked = AskedDaemon.find(INSTANCE, f"http://127.0.0.1:{daemon.port()}", None)
    first, second, *_ = places(daemon.log)
    consume(daemon, "cache", first)
    assert holds(daemon) == {"cache": first}
    # This position was not written yet, and must not be written later.
    consume(daemon, "cache", second)
    try:
        assert asked.release_consumer("cache")
        assert not asked.release_consumer("cache")
    finally:
        asked.close()
    assert holds(daemon) == {}


def test_hold_is_at_the_lowest_position_of_all_shards(daemon: ServedLog) -> None:
    first, second, third, *_ = places(daemon.log)
    consume(daemon, "cache/a", second, [0])
    consume(daemon, "cache/b", first, [1])
    assert holds(daemon) == {"cache": first}
    # Another member now owns the shard.
    consume(daemon, "cache/a", third, [0, 1])
    assert holds(daemon) == {"cache": third}


def test_hold_survives_a_restart_until_every_shard_has_reported_its_position(log: Log) -> None:
    first, second, third, *_ = places(log)
    with serving(log) as daemon:
        consume(daemon, "cache/a", first, [0, 1])
    # The daemon writes the hold when it stops.
    with serving(log) as daemon:
        assert holds(daemon) == {"cache": first}
        consume(daemon, "cache/a", third, [0])
        assert holds(daemon) == {"cache": first}
        consume(daemon, "cache/b", second, [1])
        assert holds(daemon) == {"cache": second}


def test_response_to_a_named_consumer_ends_in_time_so_that_its_next_request_reports_its_checkpoint(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "CONSUMER_RESPONSE_SECONDS", 0.0)
    path = f"/v1/instances/{INSTANCE}/changes"
    asked = {"start": "earliest", "wait_seconds": WAIT_SECONDS_MAX / 4, "credit_bytes": 1 << 30}
    assert b'"why":"time"' in daemon.ask("POST", path, {**asked, "subscriber": "cache/host-1"}).body
    # This response has no changes, so it lasts for the requested time.
    waiting = {**asked, "start": "latest", "wait_seconds": 0.1, "subscriber": "cache/host-1"}
    assert b'"why":"wait"' in daemon.ask("POST", path, waiting).body


def test_subscriber_without_a_name_or_a_checkpoint_holds_nothing(daemon: ServedLog) -> None:
    consume(daemon, "", places(daemon.log)[0])
    asked = {"subscriber": "tail/host", "start": "earliest", "wait_seconds": 0}
    assert daemon.ask("POST", f"/v1/instances/{INSTANCE}/changes", asked).status == 200
    assert holds(daemon) == {}


def test_consumer_does_not_move_the_hold_of_another_account(log: Log) -> None:
    first, second, *_ = places(log)
    access = [{"name": name, "token": name} for name in ("orders", "search")]
    with serving(log, access=access) as daemon:
        consume(daemon, "cache", first, token="orders")
        assert holds(daemon) == {"cache": first}
        consume(daemon, "cache", second, token="search")
        assert holds(daemon) == {"cache": first}
        consume(daemon, "cache", second, token="orders")
        assert holds(daemon) == {"cache": second}


def test_account_with_many_consumers_takes_no_memory_for_all_of_them(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers_module, "HOLDS_PER_ACCOUNT_MAX", 3)
    first, *_ = places(log)
    access = [{"name": name, "token": name} for name in ("orders", "search")]
    with serving(log, access=access) as daemon:
        for number in range(5):
            consume(daemon, f"cache-{number}", first, token="orders")
        consume(daemon, "other", first, token="search")
        assert set(holds(daemon)) == {"cache-0", "cache-1", "cache-2", "other"}
        assert len(daemon.served.consumers._known) == 4
        consume(daemon, "cache-3", first, token="orders")
        path = f"/v1/instances/{INSTANCE}/holds/{consumer_hold_name('cache-1')}"
        assert daemon.ask("DELETE", path, token="orders").status == 200
        assert "cache-1" not in holds(daemon)
        consume(daemon, "cache-4", first, token="orders")
        assert set(holds(daemon)) == {"cache-0", "cache-2", "cache-4", "other"}


def test_real_subscriber_holds_the_log_at_its_stored_checkpoint(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A long poll lasts for the maximum silence, minus a margin.
    monkeypatch.setattr(intake, "SILENCE_SECONDS_MAX", intake._MARGIN_SECONDS + 0.1)
    url = f"penstock://127.0.0.1:{daemon.port()}/{INSTANCE}"
    head = daemon.log.head()
    tables = [*TABLES]
    with Subscriber(
        url, name="copy", tables=tables, begin="earliest", coordination="memory://copy"
    ) as subscriber:
        reading = threading.Thread(target=lambda: [None for _ in subscriber], daemon=True)
        reading.start()
        # When a long poll ends, the next request carries the checkpoint.
        wait_until(lambda: holds(daemon).get("copy") == head)
    reading.join(WAIT_SECONDS_MAX)


def test_canal_client_holds_the_log_at_its_acknowledged_position(daemon: ServedLog) -> None:
    first, *_, head = places(daemon.log)
    with CanalClient(daemon.port("canal"), INSTANCE).log_in().subscribe() as client:
        batch_id, _ = client.get(1)
        assert holds(daemon).get("canal-1001", first) == first
        client.ack(batch_id)
        while (batch := client.get())[0] != -1:
            client.ack(batch[0])

        def holds_the_head() -> bool:
            client.get()
            return holds(daemon).get("canal-1001") == head

        wait_until(holds_the_head)
        client.unsubscribe()
    assert holds(daemon) == {}


def test_ptubes_client_holds_the_log_before_its_last_responses(daemon: ServedLog) -> None:
    first, *_ = places(daemon.log)
    with PtubesClient(daemon.port("ptubes"), TABLES, task="cache") as client:
        client.subscribe()
        client.fetch()
        assert holds(daemon) == {"ptubes-cache": first}

        def holds_the_head() -> bool:
            client.fetch()
            return holds(daemon)["ptubes-cache"] == daemon.log.head()

        wait_until(holds_the_head)


def test_pipeline_holds_the_log_of_a_daemon_at_its_batches(
    daemon: ServedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lake.yaml"
    url = f"penstock://127.0.0.1:{daemon.port()}/{INSTANCE}"
    file.write_text(f"load: none\nsink: stdout\nsource: {{url: '{url}', name: shop}}\n")
    settings = load_pipeline(file)
    log = SourceLog(settings.sources[0], settings, 1)
    first, second, *_ = places(daemon.log)
    start = Offset(first, "", "mysql:0")
    log.hold(start)
    assert holds(daemon) == {"pipeline.lake.shop": first}
    # The hold does not move with every batch.
    log.hold(replace(start, position=second))
    assert holds(daemon) == {"pipeline.lake.shop": first}
    monkeypatch.setattr(source_log, "PIPELINE_HOLD_PAUSE_SECONDS", 0.0)
    log = SourceLog(settings.sources[0], settings, 1)
    log.hold(replace(start, position=second))
    assert holds(daemon) == {"pipeline.lake.shop": second}
    # If a position is missing from the log, the pipeline only logs that, and the hold stays.
    log.hold(Offset(replace(daemon.log.head(), offset=1 << 30), "", "mariadb:1"))
    assert holds(daemon) == {"pipeline.lake.shop": second}
    log.close()


def test_hold_of_a_consumer_that_never_returns_expires(log: Log) -> None:
    first, *_ = places(log)
    with serving(log, hold_seconds=7200.0) as daemon:
        begun_us = time.time_ns() // 1000
        consume(daemon, "cache", first)
        holds(daemon)
        (kept,) = Holds(log.disk, log.layout).all()
        assert kept == Hold(consumer_hold_name("cache"), first, kept.expires_us, "everything")
        assert 0 <= (kept.expires_us or 0) - begun_us - 7200_000_000 < WAIT_SECONDS_MAX * 1_000_000


def test_disabled_holds_never_hold_the_log(log: Log) -> None:
    with serving(log, hold_seconds=None) as daemon:
        consume(daemon, "cache", places(log)[0])
        assert holds(daemon) == {}


def test_consumer_does_not_hold_a_memory_log() -> None:
    with MemoryLog.open_memory(LogSettings(), instance=INSTANCE) as log:
        Captured(log).run()
        with serving(log) as daemon:
            consume(daemon, "cache", places(log)[0])
            daemon.in_loop(daemon.served.consumers.write)
            assert log.holds() == []


@pytest.mark.parametrize(
    ("consumer", "name"),
    [("orders-cache", "orders-cache"), ("a.b", "a.2e.b"), ("a/ä", "a.2f..e4."), ("x" * 200, "x" * 40)],
)
def test_hold_names_its_owner(consumer: str, name: str) -> None:
    hold_name = consumer_hold_name(consumer).removeprefix("penstock.consumer.")
    assert hold_name.startswith(name)
    assert len(consumer_hold_name(consumer)) <= 128
    assert consumer_hold_name(consumer + "y") != consumer_hold_name(consumer)
