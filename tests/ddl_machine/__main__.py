# SPDX-License-Identifier: Apache-2.0
"""Run the DDL machine on a separate server: `python -m tests.ddl_machine FLAVOR SEED STATEMENTS
[METADATA]`.
"""

import sys

from tests.ddl_machine.comparing import compare
from tests.ddl_machine.recording import Run
from tools.servers import Server


def main(flavor: str, seed: int, statements: int, metadata: str) -> int:
    """Run, compare and print; return 1 if anything differs."""
    with Server(flavor, {"binlog-row-metadata": metadata}) as server:
        databases = ("machine", "other db")
        for database in databases:
            server.sql(f"CREATE DATABASE `{database}`")
        recording = Run(server, seed, databases).record(statements)
        outcome = compare(recording, [str(path) for path in server.binlog_files()])
    print(dict(recording.counts), dict(outcome.counts))
    for text in outcome.doubts:
        print("doubt", text)
    for text in outcome.differences:
        print("DIFFERENCE", text)
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
