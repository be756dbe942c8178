# SPDX-License-Identifier: Apache-2.0
"""The modules loaded by each entry point: a program without a server loads no server code or MySQL client."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

LOG = ROOT / "native/kernel/tests/logs/mysql-9.7-1.binlog"
SERVERS = ("starlette", "uvicorn", "penstock.serve", "penstock.daemon")
TERMINAL = ("typer", "penstock.cli")
CLIENT = ("pymysql", "penstock.mysql")
COLUMNAR = ("pyarrow", "numpy", "pandas")
WORK = ("penstock.engine", "penstock.pipeline", "penstock.logstore", "penstock.source.source")
HELP = (
    "from typer.testing import CliRunner\nfrom penstock.cli.app import make_app\n"
    "assert CliRunner().invoke(make_app(), {}).exit_code == 0"
)
# One process prints the help of every verb.
HELP_OF_EVERY_VERB = """
import pkgutil
import penstock.cli
from typer.testing import CliRunner
from penstock.cli.app import make_app
for verb in pkgutil.iter_modules(penstock.cli.__path__):
    if not verb.ispkg and verb.name != "app":
        answer = CliRunner().invoke(make_app(), [verb.name.replace("_", "-"), "--help"])
        assert answer.exit_code == 0, (verb.name, answer.output)
"""
# The search itself happens in the daemon.
HISTORY_OF_A_DAEMON = """
from typer.testing import CliRunner
from penstock.cli.app import make_app
from penstock.source.daemon_client import DaemonClient
change = {"kind": "change", "change": "insert", "time_us": 1, "position": "binlog.000001:4", "gtid": None,
    "server_id": 1, "thread_id": None, "before": None, "after": {"id": "7"}}
DaemonClient.lines = lambda *_: iter([change])
answer = CliRunner().invoke(make_app(), ["history", "shop.orders", "7", "--instance", "shop"])
assert answer.exit_code == 0 and "binlog.000001:4" in answer.output, answer.output
"""


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import penstock", (*SERVERS, *TERMINAL, *CLIENT, "pyarrow", "pydantic")),
        ("from penstock.client import Subscriber", (*SERVERS, *TERMINAL, *CLIENT, "penstock.capture")),
        (
            "from penstock.client import Subscriber; Subscriber('mysql://root@127.0.0.1:1', name='cache')",
            (*SERVERS, *TERMINAL, *CLIENT, "penstock.capture"),
        ),
        (
            f"import penstock; list(penstock.read_binlog({str(LOG)!r}))",
            (*SERVERS, *TERMINAL, *CLIENT, "penstock.capture", "urllib3"),
        ),
        (HELP.format(["--help"]), (*SERVERS, *CLIENT, *COLUMNAR, "pydantic", "penstock.cli.run")),
        (
            HELP_OF_EVERY_VERB,
            (*SERVERS, *CLIENT, *COLUMNAR, *WORK, "urllib3", "yaml", "pyspark", "penstock.settings.daemon"),
        ),
        (
            HISTORY_OF_A_DAEMON,
            (*SERVERS, *CLIENT, *COLUMNAR, *WORK, "penstock.source.row_history", "sqlglot"),
        ),
        ("from penstock import Pipeline", (*SERVERS, *TERMINAL, *CLIENT, "pyspark")),
        (
            "import penstock.local.driver, penstock.engine.sink_runs",
            (*SERVERS, *TERMINAL, "pyspark", "urllib3"),
        ),
        # Executors need no packages other than pyspark, pyarrow and those that the guide packs for them.
        # They, and planning on the driver, need a client of database servers only for reading from a server.
        (
            "import penstock.spark.partition, penstock.spark.batch, penstock.spark.source",
            (*SERVERS, *TERMINAL, *CLIENT, "penstock.capture", "urllib3", "pydantic", "zstandard", "yaml"),
        ),
    ],
    ids=[
        "package",
        "subscriber",
        "subscriber of a server",
        "files",
        "help",
        "help of every verb",
        "history of a daemon",
        "pipeline",
        "local pipeline",
        "spark",
    ],
)
def test_program_loads_only_the_modules_it_uses(program: str, absent: tuple[str, ...]) -> None:
    words = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules, sep='\\n', file=sys.stderr)"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    loaded = done.stderr.split()
    assert "penstock" in loaded
    assert not set(absent) & set(loaded)
