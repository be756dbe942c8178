# SPDX-License-Identifier: Apache-2.0
from datetime import timedelta
from pathlib import Path

import pytest

from penstock._native import Decoder
from tests.support.binlog.block_cutting import SMALL_LOGS
from tests.support.binlog.decoding import Decoded, decode, drive
from tests.support.suite.nonempty import each

FILE = "binlog.000001"
MICROSECOND = timedelta(microseconds=1)


@pytest.mark.parametrize("log", SMALL_LOGS, ids=lambda path: path.stem)
def test_commit_time_is_that_of_the_last_whole_transaction(log: Path) -> None:
    content = log.read_bytes()
    decoded = decode(content, FILE, emit="transactions")
    batches = [batch for batches in decoded.batches.values() for batch in batches]
    transactions = [row for batch in batches for row in batch.to_pylist()]
    decoder = Decoder(instance="test", file=FILE)
    assert decoder.commit_time_us == 0
    start = 0
    for transaction in each(transactions, least=2):
        for _ in drive(decoder, content[start : transaction["end_offset"]], Decoded(), {}):
            pass
        start = transaction["end_offset"]
        committed = transaction["commit_timestamp"]
        epoch = committed.replace(year=1970, month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
        assert decoder.commit_time_us == (committed - epoch) // MICROSECOND
