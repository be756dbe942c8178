# SPDX-License-Identifier: Apache-2.0
"""If an optional package is missing, the error names the package and the command that installs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.sinks.sink import kinds
from tests.support.suite.patience import WAIT_SECONDS_MAX

# The packages that sinks import. The tests run as if these packages were not installed.
PACKAGES = """
clickhouse_connect confluent_kafka deltalake duckdb elastic_transport pika psycopg pyiceberg pymongo
pyspark redis
""".split()
WITHOUT_PACKAGE = ("drainer", "files", "http", "mysql", "rocketmq", "sqlite", "stdout")
# The settings that a sink requires.
SETTINGS = {kind: {"path": "/nowhere/target"} for kind in ("delta", "duckdb", "iceberg")} | {
    "kafka": {"servers": "127.0.0.1:9", "format": "json"},
    "postgres": {"url": "postgresql://127.0.0.1:9/shop"},
}
CHECK_SINKS = """
import json, sys
sys.modules |= dict.fromkeys(sys.argv[2:])
from penstock.errors import DependencyMissing
from penstock.sinks.sink import make_sink, settings_of
hints = {}
for kind, settings in json.loads(sys.argv[1]).items():
    try:
        (finding,) = make_sink(kind, settings_of(kind)(**settings)).check()
        hints[kind] = finding.mend
    except DependencyMissing as problem:
        hints[kind] = problem.hint
print(json.dumps(hints))
"""


def run_python(*words: str) -> Any:
    """Return the JSON that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_missing_pyspark_error_names_the_install_command() -> None:
    hint = run_python(
        "import json, sys; sys.modules['pyspark'] = None\n"
        "from penstock.errors import DependencyMissing\n"
        "try:\n    import penstock.spark\n"
        "except DependencyMissing as problem:\n    print(json.dumps(problem.hint))\n"
    )
    assert hint == "pip install 'penstock[spark]'"


def test_every_sink_without_its_package_names_the_install_command(tmp_path: Path) -> None:
    values = SETTINGS | {"spark": {"staging": str(tmp_path)}}
    settings = {kind: values.get(kind, {}) for kind in kinds() if kind not in WITHOUT_PACKAGE}
    hints = run_python(CHECK_SINKS, json.dumps(settings), *PACKAGES)
    assert hints == {kind: f"Run: pip install 'penstock[{kind}]'" for kind in settings}
