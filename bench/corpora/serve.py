# SPDX-License-Identifier: Apache-2.0
"""Serve a corpus to replicas: a fresh server whose data directory gets the finished file by hard link.

The server reads the file's headers at its start to learn which GTIDs it has, and then streams it as if it had
written it, so a stream of 1 GB is ready in seconds. It has the corpus's tables too, empty, for clients that
look at definitions.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.servers import Server
from tools.servers.packages import install
from tools.servers.template import copy, template

from .corpus import FILE_NAME, SERVER_OPTIONS, Corpus, cache_directory, workload
from .workload import DATABASE


@contextmanager
def serve(made: Corpus) -> Iterator[Server]:
    """Run a server that has `made` as its oldest binlog file, under the name the file already has."""
    directory = Path(tempfile.mkdtemp(prefix=".serve-", dir=cache_directory()))
    try:
        logs = directory / "data"
        copy(template(install("mysql")), logs)
        os.link(made.path, logs / FILE_NAME)
        (logs / "binlog.index").write_text(f"./{FILE_NAME}\n")
        options = SERVER_OPTIONS | {"innodb-buffer-pool-size": "128M", "innodb-redo-log-capacity": "64M"}
        with Server("mysql", options, directory=directory) as server:
            with server.connect() as connection, connection.cursor() as cursor:
                for statement in (
                    "SET SESSION sql_log_bin = 0",
                    f"CREATE DATABASE {DATABASE}",
                    *workload(made.name).definitions,
                ):
                    cursor.execute(statement)
            try:
                yield server
            finally:
                # Nothing of it is kept, and in order it would wait for replicas that have left.
                server.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
