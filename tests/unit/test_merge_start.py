# SPDX-License-Identifier: Apache-2.0
"""Where a merge begins in the log of a member."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.capture.run import Capture
from penstock.errors import ServerBusy
from penstock.gtid_sets import NO_GTIDS
from penstock.limits import MIB
from penstock.logstore.memory_log import MemoryLog
from penstock.merge.member import start_of_member
from penstock.mysql.start import StartAt
from tests.support.binlog.forged_log import log_head
from tests.support.logstore.source import SETTINGS

FILE = "mysql-bin.000001"


@pytest.mark.parametrize("start", [StartAt(), StartAt(earliest=True), StartAt(time_us=1)], ids=str)
def test_merge_waits_for_a_member_whose_log_has_only_begun(start: StartAt) -> None:
    """The member's epoch, and the head of its first file, are stored before any transaction is visible."""
    settings = SETTINGS.model_copy(update={"mode": "memory", "memory_bytes": MIB, "segment_bytes": MIB})
    head = log_head(1)
    common: dict[str, Any] = {"epoch": 0, "server_id": 1, "flavor": "mysql"}
    with MemoryLog.open_memory(settings, instance="db1") as log:
        capture = cast(Capture, SimpleNamespace(name="db1", log=lambda: log))
        with pytest.raises(ServerBusy, match="db1 has nothing in its log yet"):
            start_of_member(capture, start)
        log.begin_epoch(
            **common, server_key="mysql:1", version="9.7.4", file=FILE, offset=len(head), gtid_set=NO_GTIDS
        )
        log.begin_file(FILE, len(head), head[4:], NO_GTIDS, **common)
        assert log.epoch is not None
        assert log.visible is None
        with pytest.raises(ServerBusy, match="db1 has nothing in its log yet"):
            start_of_member(capture, start)
