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
HELP = (
    "from typer.testing import CliRunner\nfrom penstock.cli.app import make_app\n"
    "assert CliRunner().invoke(make_app(), {}).exit_code == 0"
)


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
        # It takes half a second to import.
        (HELP.format(["run", "--help"]), (*SERVERS, "pandas", "pyspark")),
        ("from penstock import Pipeline", (*SERVERS, *TERMINAL, *CLIENT, "pyspark")),
        # Executors need no other package than pyspark, pyarrow and those that the guide packs for them.
        (
            "import penstock.spark",
            (*SERVERS, *TERMINAL, "penstock.capture", "urllib3", "pydantic", "zstandard", "yaml"),
        ),
    ],
    ids=[
        "package",
        "subscriber",
        "subscriber of a server",
        "files",
        "help",
        "help of a verb",
        "pipeline",
        "spark",
    ],
)
def test_program_loads_only_the_modules_it_uses(program: str, absent: tuple[str, ...]) -> None:
    words = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules, sep='\\n', file=sys.stderr)"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    loaded = done.stderr.split()
    assert "penstock" in loaded
    assert not set(absent) & set(loaded)
