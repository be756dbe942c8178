# SPDX-License-Identifier: Apache-2.0
"""A coordination store that is restored from a backup issues fencing tokens as the runbook describes."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.coordinate.lease import Lease
from penstock.coordinate.store import open_store
from penstock.errors import LeaseLost
from penstock.fleet.records import CaptureRecord, capture_path, lease_path
from penstock.fleet.tenure import FencedRecord


def take_lease(url: str, state: str) -> int:
    """Capture under a lease, record a state, and leave as a killed process would; return the token."""
    with closing(open_store(url)) as store:
        lease = Lease.acquire(store, store.session(), lease_path("shop"), "a")
        assert lease is not None
        fenced = FencedRecord(store, "shop", lease)
        fenced.write(replace(fenced.record, state=state))
        return lease.token


def test_restored_sqlite_store_gives_tokens_above_all_that_its_records_have(tmp_path: Path) -> None:
    file, backup = tmp_path / "coordination.db", tmp_path / "backup.db"
    url = f"sqlite://{file}"
    before = [take_lease(url, f"before {number}") for number in range(3)]
    with closing(sqlite3.connect(file)) as live, closing(sqlite3.connect(backup)) as copy:
        live.backup(copy)
    take_lease(url, "after the backup")
    for suffix in ("", "-wal", "-shm"):
        Path(f"{file}{suffix}").unlink(missing_ok=True)
    backup.rename(file)
    with closing(open_store(url)) as store:
        record = CaptureRecord.of("shop", store.get(capture_path("shop")))
        assert record is not None
        assert (record.state, record.token) == ("before 2", before[-1])
    assert take_lease(url, "restored") > max(before)


def test_records_copied_into_a_new_store_refuse_its_tokens(tmp_path: Path) -> None:
    """The runbook forbids copying records, because the new store numbers its changes from the beginning."""
    first = f"sqlite://{tmp_path}/first.db"
    for number in range(5):
        take_lease(first, f"before {number}")
    with closing(open_store(first)) as store:
        kept = store.get(capture_path("shop"))
        assert kept is not None
    other = f"sqlite://{tmp_path}/other.db"
    with closing(open_store(other)) as store:
        store.put(capture_path("shop"), kept.value)
    with pytest.raises(LeaseLost):
        take_lease(other, "copied")
