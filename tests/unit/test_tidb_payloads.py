# SPDX-License-Identifier: Apache-2.0
"""Payloads of TiDB's own pump client: their heads, how they are matched, and the events in which they are
stored.
"""

from pathlib import Path

import pytest

from penstock._native import (
    tidb_ddl,
    tidb_file_head,
    tidb_heads,
    tidb_matched,
    tidb_payload_events,
    tidb_payloads,
    tidb_prewrite_key,
    tidb_rotation,
)
from penstock.errors import ChecksumMismatch, EventMalformed
from tests.conftest import ROOT
from tests.support.binlog.events import MAGIC, ROTATE, events

SAMPLES = ROOT / "tests/samples/tidb"
PREWRITE, COMMIT = 0, 1
TIDB_PAYLOAD = 120
IGNORABLE = 0x80


def payload(name: str) -> bytes:
    """Return the bytes of a sample."""
    return Path(SAMPLES, f"{name}.bin").read_bytes()


def test_heads_are_those_of_the_pump_client() -> None:
    prewrite, commit = payload("prewrite_0"), payload("commit_0")
    start_ts = 470_639_205_350_899_712
    assert tidb_heads([prewrite, commit]) == [(PREWRITE, start_ts, 0, 0), (COMMIT, start_ts, start_ts + 1, 0)]
    assert tidb_prewrite_key(prewrite) == b"k0"
    assert tidb_prewrite_key(commit) == b""


def test_damaged_payload_is_named_by_its_index() -> None:
    prewrite = payload("prewrite_0")
    with pytest.raises(EventMalformed, match="TiDB payload 1: "):
        tidb_heads([prewrite, prewrite[:-9]])


def test_statement_of_a_ddl_comes_with_its_job_and_state() -> None:
    query, job_id, state = tidb_ddl(payload("payloads/01"))
    assert query.startswith("CREATE TABLE `test` (`id` INT PRIMARY KEY")
    assert (job_id, state) == (87, 5)
    assert tidb_ddl(payload("payloads/02")) == ("", 0, 0)


def test_commit_gets_the_rows_of_its_prewrite_alone() -> None:
    prewrite, commit = payload("prewrite_0"), payload("commit_0")
    matched = tidb_matched(prewrite, commit)
    assert tidb_heads([matched]) == tidb_heads([commit])
    # The matched payload has the client's own bytes, with the kind and the commit timestamp of the Commit.
    assert matched == commit[:12] + commit[12:22] + prewrite[14:]
    with pytest.raises(EventMalformed, match="does not belong to the Commit"):
        tidb_matched(payload("prewrite_1"), commit)


def test_payloads_are_kept_as_received() -> None:
    received = [path.read_bytes() for path in sorted((SAMPLES / "payloads").glob("*.bin"))]
    head = tidb_file_head(server_id=9, time_s=77)
    kept = tidb_payload_events(received, len(head), server_id=9, time_s=77)
    assert tidb_payloads(kept) == received
    rotation = tidb_rotation("shop-pump.000002", len(head) + len(kept), server_id=9, time_s=77)
    first, previous, *middle, last = events(head + kept + rotation)
    assert [first.code, previous.code, last.code] == [15, 35, ROTATE]
    assert {(event.code, event.flags, event.timestamp) for event in middle} == {(TIDB_PAYLOAD, IGNORABLE, 77)}
    assert last.end_position == len(head + kept + rotation)
    assert head.startswith(MAGIC)


def test_flipped_bit_in_a_kept_payload_is_detected() -> None:
    kept = bytearray(tidb_payload_events([payload("prewrite_0")], 4, server_id=9, time_s=77))
    kept[40] ^= 1
    with pytest.raises(ChecksumMismatch):
        tidb_payloads(kept)
