# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.sample_log`: write the log that `penstock demo` reads, and the rows to compare with.

A real server writes the log. The rows are what the server's SELECT returns after the last transaction.
"""

import datetime
import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from demo.shop import DATABASE, TABLES, Shop, create
from tools.servers import Server

SAMPLE = Path(__file__).resolve().parents[1] / "src/penstock/sample"
TRANSACTIONS = 400


def main() -> int:
    """Write the log and its rows into the package; return the exit status."""
    with Server("mysql", options={"binlog-row-metadata": "FULL"}) as server:
        create(server.sql)
        with server.connect() as connection:
            shop = Shop(connection)
            for number in range(TRANSACTIONS):
                if number == TRANSACTIONS // 2:
                    shop.add_column()
                shop.trade()
            rows = {f"{DATABASE}.{table}": _rows(connection, table) for table in TABLES}
        server.stop()
        (log,) = [file for file in server.binlog_files() if file.stat().st_size > 10_000]
        SAMPLE.mkdir(exist_ok=True)
        shutil.copyfile(log, SAMPLE / "mysql-bin.000001")
        version = server.version
    document = {"server": f"MySQL {version}", "keys": TABLES, "tables": rows}
    # The archive has a fixed time and no file name, so that the same rows produce the same file.
    with open(SAMPLE / "rows.json.gz", "wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as packed:
        packed.write(json.dumps(document, ensure_ascii=False).encode())
    for file in sorted(SAMPLE.iterdir()):
        print(f"{file.name}: {file.stat().st_size:,} bytes")
    return 0


def _rows(connection: Any, table: str) -> list[dict[str, str | None]]:
    with connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(f"SELECT * FROM {DATABASE}.{table}")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, map(_text, row), strict=True)) for row in cursor.fetchall()]


def _text(value: Any) -> str | None:
    """Return a value as text; bytes as hexadecimal digits."""
    match value:
        case None:
            return None
        case bytes():
            return value.hex()
        case datetime.date():
            return value.isoformat()
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
