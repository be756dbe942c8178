# SPDX-License-Identifier: Apache-2.0
"""`mysqlbinlog --read-from-remote-server --raw`: the server's own tool copies a live server's binlog file."""

import filecmp
import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.corpora.corpus import FILE_NAME
from tools.servers.packages import install

from .peer import Job, Tally

TITLE = "mysqlbinlog --raw"


def version() -> str:
    """Return the version of the tool, which is the server's."""
    return install("mysql").version


def receive_raw(job: Job) -> Tally:
    """Copy the file over TCP without TLS to a file; the copy must equal the original."""
    directory = Path(tempfile.mkdtemp(prefix="bench-raw-", dir=job.directory))
    argv = [
        *install("mysql").argv("mysqlbinlog"),
        "--no-defaults",
        "--read-from-remote-server",
        "--raw",
        "--protocol=TCP",
        "--host=127.0.0.1",
        f"--port={job.port}",
        "--user=root",
        "--ssl-mode=DISABLED",
        "--connection-server-id=4290",
        f"--result-file={directory}/",
        FILE_NAME,
    ]

    def verify() -> None:
        same = filecmp.cmp(directory / FILE_NAME, job.corpus.path, shallow=False)
        shutil.rmtree(directory)
        assert same, "the received file differs from the original"

    subprocess.run(argv, check=True)
    return Tally(job.corpus.rows, job.corpus.bytes, verify=verify)
