# SPDX-License-Identifier: Apache-2.0
"""A daemon's log is cut only at the transaction boundaries that the daemon reports."""

from typing import Any

import pytest

from penstock.commit_versions import epoch_base
from penstock.errors import PositionPurged
from penstock.limits import RANGE_BYTES_MIN
from penstock.model import Position
from penstock.source.daemon import DaemonSource
from penstock.source.daemon_client import DaemonClient
from penstock.source.source import SourceOptions

FILE = "mysql-bin.000001"
END = 8 * RANGE_BYTES_MIN
EXTENTS = {"extents": [{"epoch": 1, "file": FILE, "start": 157, "end": END}]}
EPOCHS = {"epochs": [{"epoch": 0, "server_key": "mysql:0"}, {"epoch": 1, "server_key": "mysql:1"}]}


def source_of(monkeypatch: pytest.MonkeyPatch, *, tells_boundaries: bool) -> DaemonSource:
    """Return a daemon that numbers this source's epoch 3 as 1, with a transaction every 1000 bytes."""

    def ask(client: DaemonClient, call: str, **query: Any) -> dict[str, Any]:
        if call != "locate":
            return {"extents": EXTENTS, "epochs": EPOCHS, "gtid_set": {"gtid_set": ""}}[call]
        position = Position.parse(query["position"])
        assert position.epoch == 1
        boundary = Position(1, FILE, 157 + (position.offset - 157) // 1000 * 1000)
        return {"position": str(position)} | ({"boundary": str(boundary)} if tells_boundaries else {})

    monkeypatch.setattr(DaemonClient, "ask", ask)
    options = SourceOptions.parse("penstock://127.0.0.1:1/shop")
    source = DaemonSource(SourceOptions(daemon=options.daemon, instance="shop", epochs=((3, "mysql:1"),)))
    assert source.shift == epoch_base(3) - epoch_base(1)
    return source


def test_plan_is_cut_at_transaction_boundaries_reported_by_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranges = source_of(monkeypatch, tells_boundaries=True).split(ranges_min=4)
    assert len(ranges) == 4
    assert all(range_.aligned and (range_.start - 157) % 1000 == 0 for range_ in ranges)
    assert [range_.stop for range_ in ranges] == [*(range_.start for range_ in ranges[1:]), END]
    assert [range_.is_cut for range_ in ranges] == [True, True, True, False]


def test_files_of_a_0_1_0_daemon_are_read_in_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(monkeypatch, tells_boundaries=False)
    (whole,) = source.split(ranges_min=4)
    assert (whole.start, whole.stop, whole.aligned, whole.is_cut) == (157, END, True, False)
    assert source.boundary_before(Position(3, FILE, 5000)) == 157
    with pytest.raises(PositionPurged):
        source.boundary_before(Position(3, FILE, 100))
