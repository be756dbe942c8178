# SPDX-License-Identifier: Apache-2.0
"""`mysqlbinlog -vv --base64-output=decode-rows FILE`: the server's own tool printing every row as text."""

import subprocess

from tools.servers.packages import install

from .peer import Job, Tally

TITLE = "mysqlbinlog -vv"


def version() -> str:
    """Return the version of the tool, which is the server's."""
    return install("mysql").version


def decode_file(job: Job) -> Tally:
    """Print the whole file to /dev/null. The corpus's own counts come from the same output."""
    argv = [*install("mysql").argv("mysqlbinlog"), "-vv", "--base64-output=decode-rows", str(job.corpus.path)]
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
    return Tally(job.corpus.rows, job.corpus.bytes)
