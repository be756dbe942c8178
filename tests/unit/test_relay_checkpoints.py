# SPDX-License-Identifier: Apache-2.0
"""A run continues where `penstock relay` of version 0.1 stopped."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import CoordinationStore, open_store
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import LeaseLost, OptionInvalid
from penstock.model import Position
from penstock.pipeline.relay_checkpoints import relay_offsets
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.source.offsets import Offset
from tests.support.daemon.served_log import INSTANCE, captured_log, serving
from tests.support.pipeline.local_runs import run_here

SAMPLE = Path(__file__).parents[1] / "samples/0.1/coordination/running.db"
HERE = Checkpoint("1/mysql-bin.000003:198", "u:1-30", "mysql:u", fingerprint="f")


def settings_of(folder: Path, **more: Any) -> PipelineSettings:
    values = {
        "name": "cache",
        "state": f"sqlite://{folder}/store.db",
        "source": {"url": f"penstock://127.0.0.1:1/{INSTANCE}", "tables": ["shop.orders"]},
        "load": "none",
        "sink": {"files": {"path": str(folder / "feed")}},
    }
    return pipeline_of_values(values | more, folder)


def relayed(store: CoordinationStore, name: str = "cache", checkpoint: Checkpoint = HERE) -> Subscription:
    """Create what `penstock relay` leaves in the store."""
    registry = Subscriptions(store)
    subscription = registry.create(Subscription(INSTANCE, name, ("shop.orders",)))
    return registry.reset(INSTANCE, name, checkpoint) or subscription


def test_checkpoint_of_a_relay_is_an_offset(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with closing(open_store(settings.state)) as store:
        assert relay_offsets(settings, store) == {}
        relayed(store)
        offset = Offset(Position(1, "mysql-bin.000003", 198), "u:1-30", "mysql:u", fingerprint="f")  # type: ignore[arg-type]
        assert relay_offsets(settings, store) == {INSTANCE: offset}
        assert relay_offsets(settings_of(tmp_path, load="full"), store) == {}, "a relay loaded nothing"
        assert relay_offsets(settings_of(tmp_path, name="another"), store) == {}


def test_relay_of_several_sources_has_a_subscription_for_each(tmp_path: Path) -> None:
    urls = [f"penstock://127.0.0.1:{port}/{INSTANCE}" for port in (1, 2)]
    sources = [
        {"url": url, "name": name, "tables": ["shop.orders"]}
        for url, name in zip(urls, ("east", "west"), strict=True)
    ]
    values = {
        "name": "cache",
        "state": f"sqlite://{tmp_path}/store.db",
        "sources": sources,
        "load": "none",
        "sink": {"files": {"path": str(tmp_path / "feed")}},
    }
    settings = pipeline_of_values(values, tmp_path)
    with closing(open_store(settings.state)) as store:
        relayed(store, "cache.west")
        assert relay_offsets(settings, store).keys() == {"west"}


def test_run_waits_for_the_end_of_a_relay(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with closing(open_store(settings.state)) as store:
        subscription = relayed(store)
        with closing(store.session(10.0)) as session:
            assert Lease.acquire(store, session, subscription.lease_path(0), "old:1")
            with pytest.raises(LeaseLost, match="Stop the relay"):
                relay_offsets(settings, store)


def test_subscription_that_is_no_relay_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copy(SAMPLE, tmp_path / "store.db")
    settings = settings_of(tmp_path)
    with (
        closing(open_store(settings.state)) as store,
        pytest.raises(OptionInvalid, match=r"in 2 shards.*penstock subscriptions delete cache"),
    ):
        relay_offsets(settings, store)


def test_first_run_begins_at_the_checkpoint_and_a_reset_forgets_it(tmp_path: Path) -> None:
    with captured_log() as log, serving(log) as daemon:
        (first, *_), head = log.extents(), log.head()
        settings = settings_of(
            tmp_path,
            source={"url": f"penstock://127.0.0.1:{daemon.port()}/{INSTANCE}", "tables": ["shop.orders"]},
        )
        key = log.epochs.epochs[0].server_key
        with closing(open_store(settings.state)) as store:
            relayed(store, checkpoint=Checkpoint(str(first.last), str(log.gtid_set(first.last)), key))
        reports: list[Any] = []
        run_here(settings, report=reports.append)
        checkpoint = run_here(settings)
        assert Offset.from_json(checkpoint.offsets[INSTANCE]).position == head
        assert reports, "the log goes on after the checkpoint; by itself a run begins at its end"
