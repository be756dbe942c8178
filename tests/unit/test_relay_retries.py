# SPDX-License-Identifier: Apache-2.0
"""What a relay writes after a write whose outcome it does not know."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from penstock.client import ChangeBatch, Subscriber
from penstock.client.flow import Place
from penstock.errors import ConnectionLost
from penstock.model import Position
from penstock.pipeline.relay import Relay
from penstock.pipeline.settings import pipeline_of_values
from penstock.sinks.files.sink import FilesSink
from tests.support.pipeline.changes_made import changes_of, insert, target_of

ORDERS = target_of({"id": "bigint"})


def batch_of(number: int, *ids: int, token: int = 1) -> ChangeBatch:
    rows = changes_of(ORDERS, *(insert(id_, id=id_) for id_ in ids)).rows
    position = Place(Position(0, "binlog.000001", 4 + max(ids)))
    return ChangeBatch(str(ORDERS.name), rows, position, lambda: None, token=token, number=number)


@pytest.mark.parametrize(
    ("waiting", "later"),
    [
        # The shard came back to us, and its batches are cut anew.
        (0, [batch_of(0, 1, 2, token=2)]),
        # The batch is tried again while another has arrived.
        (1, [batch_of(0, 1), batch_of(1, 2)]),
    ],
)
def test_changes_after_a_lost_write_are_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: int, later: list[ChangeBatch]
) -> None:
    """The sink has the first write, and knows its number."""
    relay = Relay(
        pipeline_of_values(
            {
                "name": "shop",
                "source": {"url": "penstock://127.0.0.1:1/shop", "start": "earliest"},
                "load": "none",
                "sink": {"files": {"path": str(tmp_path / "feed")}},
            },
            tmp_path,
        )
    )
    monkeypatch.setattr("penstock.pipeline.relay._BUFFERED_SECONDS_MAX", 60.0)
    (line,) = relay._lines
    line._definitions._known[(str(ORDERS.name), 0)] = ORDERS
    commit = FilesSink.commit

    def commit_and_lose(*of: Any) -> None:
        commit(*of)
        raise ConnectionLost("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(FilesSink, "commit", commit_and_lose)
        with pytest.raises(ConnectionLost):
            line._handle_batch(batch_of(0, 1))
    # More has arrived each time that a batch is given out, but for the last.
    left = [waiting] * (len(later) - 1) + [0]
    monkeypatch.setattr(Subscriber, "waiting", property(lambda _: left[0]))
    for batch in later:
        line._handle_batch(batch)
        left.pop(0)
    actual_rows = [
        row
        for file in sorted((tmp_path / "feed").rglob("*.parquet"))
        for row in parquet.read_table(file).column("id").to_pylist()
    ]
    assert set(actual_rows) == {1, 2}
