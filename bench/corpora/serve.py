# SPDX-License-Identifier: Apache-2.0
"""Serves a corpus to replicas, from a new server whose data directory contains a hard link to the finished
file.

At startup the server reads the file's headers to obtain the GTIDs. It then streams the file as if it had
written it, so a stream of 1 GB is ready within seconds. The server also has the tables of the corpus, without
rows, for clients that read table definitions.
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
def serve(binlog: Corpus) -> Iterator[Server]:
    """Run a server with the corpus as its oldest binlog file, under the file's own name."""
    directory = Path(tempfile.mkdtemp(prefix=".serve-", dir=cache_directory()))
    try:
        logs = directory / "data"
        copy(template(install("mysql")), logs)
        os.link(binlog.path, logs / FILE_NAME)
        (logs / "binlog.index").write_text(f"./{FILE_NAME}\n")
        options = SERVER_OPTIONS | {"innodb-buffer-pool-size": "128M", "innodb-redo-log-capacity": "64M"}
        with Server("mysql", options, directory=directory) as server:
            with server.connect() as connection, connection.cursor() as cursor:
                for statement in (
                    "SET SESSION sql_log_bin = 0",
                    f"CREATE DATABASE {DATABASE}",
                    *workload(binlog.name).definitions,
                ):
                    cursor.execute(statement)
            try:
                yield server
            finally:
                # The server's data is not needed, and in an orderly shutdown the server would wait for
                # disconnected replicas.
                server.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
