# SPDX-License-Identifier: Apache-2.0
"""One transaction of any length is decoded in bounded memory: 2 GB of data with at most 512 MB more than the
interpreter itself uses.

`PENSTOCK_LONG=1` decodes the 2 GB. Otherwise the test decodes a twentieth of the data within a quarter of the
memory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.binlog.events import TRANSACTION_PAYLOAD, codes
from tests.support.suite.fixture_types import StartServer
from tools.servers import Server

LONG = bool(os.environ.get("PENSTOCK_LONG"))
TRANSACTION_BYTES = (2000 if LONG else 100) * 1_000_000
MEMORY_BYTES_MAX = (512 if LONG else 128) << 20
ROW_BYTES = 20_000
# The server fills the whole redo log before reusing space in it, so the test uses this much disk space.
REDO_CAPACITY = "2G" if LONG else "256M"

# Reads a log in a separate process and reports how much memory the read needs beyond the interpreter and
# Arrow.
READER = """
import json, resource, sys
import penstock, pyarrow
def resident(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
start = resident()
rows = total = 0
for batch in penstock.read_binlog(sys.argv[1], sys.argv[2]):
    total += batch.to_arrow().column("text").nbytes
    rows += batch.rows
print(json.dumps({"rows": rows, "bytes": total, "growth": resident() - start}))
"""


def write_transaction(server: Server, compressed: bool) -> int:
    """Write one transaction of about TRANSACTION_BYTES; return its number of rows."""
    rows = 512
    # 10,000 digits: they compress by half, and repeat only beyond the server's compression window.
    digits = ", ".join(["HEX(RANDOM_BYTES(500))"] * 10)
    numbers = f"JSON_TABLE('[{','.join('1' * rows)}]', '$[*]' COLUMNS (n INT PATH '$'))"
    with server.connect(database="d") as connection, connection.cursor() as cursor:
        if compressed:
            cursor.execute("SET SESSION binlog_transaction_compression = ON")
        cursor.execute("BEGIN")
        text = f"CONCAT({digits}, REPEAT('x', 10000))"
        cursor.execute(f"INSERT INTO t (text) SELECT {text} FROM {numbers} AS numbers")
        while rows * ROW_BYTES < TRANSACTION_BYTES:
            cursor.execute(f"INSERT INTO t (text) SELECT text FROM t ORDER BY id LIMIT {min(rows, 4096)}")
            rows += cursor.rowcount
        cursor.execute("COMMIT")
    return rows


@pytest.mark.deep(keep=("plain",))
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "compressed"])
def test_one_large_transaction_is_decoded_in_bounded_memory(
    compressed: bool, start_server: StartServer
) -> None:
    server = start_server("mysql", innodb_redo_log_capacity=REDO_CAPACITY, max_binlog_cache_size="8G")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id BIGINT AUTO_INCREMENT PRIMARY KEY, text LONGTEXT)")
    server.sql("FLUSH BINARY LOGS")
    path = server.binlog_files()[-1]
    rows = write_transaction(server, compressed)
    server.sql("FLUSH BINARY LOGS")
    if compressed:
        assert TRANSACTION_PAYLOAD in codes(path.read_bytes())
        assert path.stat().st_size > TRANSACTION_BYTES // 5
    else:
        assert path.stat().st_size > TRANSACTION_BYTES
    usage = read_apart(path)
    assert usage["rows"] == rows
    assert usage["bytes"] > rows * ROW_BYTES
    assert usage["growth"] < MEMORY_BYTES_MAX, usage


def read_apart(path: Path) -> dict[str, int]:
    """Read a log in a separate process and return its measurements."""
    command = [sys.executable, "-c", READER, str(path), "d.t"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    usage: dict[str, int] = json.loads(done.stdout)
    return usage
