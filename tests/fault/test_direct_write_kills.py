# SPDX-License-Identifier: Apache-2.0
"""A capture that writes past the page cache is killed, and its log has every synced byte and no other."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.logstore.log import Log
from tests.support.logstore.large_pieces import FILE, SETTINGS, START, pieces

_ROUNDS = 4


@pytest.mark.parametrize("number", range(_ROUNDS))
def test_killed_direct_writes_lose_no_synced_byte(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "log"
    command = [sys.executable, "-m", "tests.support.logstore.large_pieces", str(folder)]
    syncs = random.Random(number).randrange(1, 6)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        durable = direct = 0
        for _ in range(syncs):
            durable, direct = (int(field) for field in process.stdout.readline().split())
        # The process is now between two writes, or inside any of them.
        process.kill()
    assert direct > (durable - START) // 2
    with Log.open(folder, SETTINGS) as log:
        assert log.visible is not None
        end = log.visible.offset
        assert end >= durable
        content = b"".join(log.read(0, FILE, START, end))
    expected = b""
    for piece in pieces():
        if len(expected) >= len(content):
            break
        expected += piece
    assert len(content) == end - START
    assert expected.startswith(content)
