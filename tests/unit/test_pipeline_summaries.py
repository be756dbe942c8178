# SPDX-License-Identifier: Apache-2.0
"""The status of many pipelines, from one reading of their store."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from penstock.coordinate.lease import Lease
from penstock.coordinate.store import CoordinationStore, Record, open_store, path_of
from penstock.coordinate.zookeeper_nodes import NodeStat, read_below, record_of, sealed
from penstock.errors import SchemaInvalid
from penstock.model import TableName
from penstock.pipeline import summary
from penstock.pipeline.shards import Shard
from penstock.pipeline.state import Checkpoint, PipelineState, TableLoad
from penstock.pipeline.summary import name_state, summarize_pipeline, summarize_pipelines
from tests.support.suite.nonempty import each

SHOP = {"shop": {"epoch": 1, "file": "mysql-bin.000001", "offset": 4}}


def write_pipeline(state: PipelineState) -> None:
    """Write what a runner of a pipeline writes, with values that need several records."""
    loads = {"shop/shop.orders": TableLoad(10, 3, 1000)}
    state.write_first(Checkpoint("generation", 7, SHOP, loads, planned=True))
    state.show({"pipeline": state.name, "state": "running", "lag_seconds": 1.5, "rejected": 2})
    state.request_resnapshot("shop", TableName("shop", "orders"))
    for name in ("batch", "tables", "loads"):
        state.put_large(name, {"tables": {}, "targets": [], "of any size": name})


class CountedStore:
    """A store that counts its requests."""

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store
        self.url = store.url
        self.asked: Counter[str] = Counter()

    def read_below(self, path: str, wanted: Callable[[str], bool]) -> Mapping[str, Record | None]:
        """Count a request for all records below a path."""
        self.asked["read_below"] += 1
        return self._store.read_below(path, wanted)


def test_all_pipelines_are_summarized_from_one_reading_of_their_store(tmp_path: Path) -> None:
    with closing(open_store(f"sqlite:///{tmp_path}/state.db")) as store:
        session = store.session()
        for name in ("one", "tables", "a/b"):
            write_pipeline(PipelineState(store, name))
        PipelineState(store, "one").pause("a change of the target")
        for sink in ("lake", "batch"):
            write_pipeline(PipelineState(store, "two", sink))
        PipelineState(store, "four").shards.write_count(2)
        PipelineState(store, "four").shards.set_barrier(SHOP)
        for shard in Shard.all_of(2):
            write_pipeline(PipelineState(store, "four", shard=shard))
        Lease.acquire(store, session, path_of("pipelines", "a/b", "lease"), "here:1")
        write_pipeline(reset := PipelineState(store, "reset"))
        reset.reset()
        counted = CountedStore(store)
        summaries = summarize_pipelines(counted)  # type: ignore[arg-type]
        assert counted.asked == {"read_below": 1}, "one operation, however many pipelines"
        names = PipelineState.names(store)
        assert names == ["a/b", "four", "one", "reset", "tables", "two"]
        for name, summary in zip(each(names), summaries, strict=True):
            assert summary == summarize_pipeline(PipelineState(store, name)), name


def test_ensemble_without_requests_for_many_nodes_is_asked_for_each() -> None:
    nodes = {"/shop": (b"", ["b", "a"]), "/shop/a": (sealed(b"1")[0], []), "/shop/b": (sealed(b"2")[0], [])}

    def fetch(path: str) -> tuple[bytes, NodeStat] | None:
        if path == "/shop/b":
            # The record was deleted after it was listed.
            return None
        content, names = nodes[path]
        return content, NodeStat(1, 1, 0, 0, 0, 0, 0, 0, len(content), len(names), 1)

    records = read_below(
        ["/shop"],
        lambda path: True,
        lambda paths, *, children: [None] * len(paths),
        fetch,
        lambda path: nodes[path][1],
    )
    node = fetch("/shop/a")
    assert node is not None
    assert records == {"/shop/a": record_of(*node)}


def test_progress_is_decoded_once_to_name_the_state_of_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests have written the same progress.
    summary._is_readable.cache_clear()
    decode, decoded = Checkpoint.decode, []
    monkeypatch.setattr(Checkpoint, "decode", lambda value: decoded.append(value) or decode(value))
    with closing(open_store(f"sqlite:///{tmp_path}/state.db")) as store:
        state = PipelineState(store, "named")
        assert name_state(state) == "never ran"
        write_pipeline(state)
        decoded.clear()
        assert [name_state(state) for _ in range(3)] == ["stopped"] * 3
        assert len(decoded) == 1
        state.write_first(Checkpoint("another generation"))
        assert [name_state(state) for _ in range(3)] == ["stopped"] * 3
        assert len(decoded) == 2
        store.put(path_of("pipelines", "named", "standing"), b"damaged")
        for _ in range(2):
            with pytest.raises(SchemaInvalid):
                name_state(state)
