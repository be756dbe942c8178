# SPDX-License-Identifier: Apache-2.0
"""Spark reads through `penstock` on a standalone cluster whose workers' Python does not have the package
installed.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.spark.cluster import environment, run_program, standalone_cluster
from tests.support.spark.session import head_of, session_settings
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# The imports of executors, besides pyspark and pyarrow: the package and its own requirements.
PACKED = ("penstock", "pyspark_penstock", "pymysql", "structlog", "sqlglot", "typing_extensions")


def pack(archive: Path) -> Path:
    """Write a zip file with the imports of executors, in the layout of `pip install --target`."""
    with zipfile.ZipFile(archive, "w") as packed:
        for name in PACKED:
            spec = importlib.util.find_spec(name)
            assert spec is not None, f"{name} is a requirement"
            assert spec.origin is not None, f"{name} is a package or a module"
            origin = Path(spec.origin)
            if origin.name != "__init__.py":
                packed.write(origin, origin.name)
                continue
            for file in origin.parent.rglob("*"):
                if file.is_file() and file.suffix in (".py", ".so"):
                    packed.write(file, file.relative_to(origin.parent.parent))
    return archive


def bare_python(directory: Path) -> str:
    """Create a Python with only pyarrow; pyspark comes with Spark itself."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    spec = importlib.util.find_spec("pyarrow")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    packages = next((directory / "lib").glob("python3*")) / "site-packages"
    for part in (installed, installed.parent / "pyarrow.libs"):
        if part.exists():
            shutil.copytree(part, packages / part.name, ignore=shutil.ignore_patterns("tests", "include"))
    return str(directory / "bin" / "python")


@pytest.mark.deep(
    guard="tests/integration/test_spark_batch.py::test_files_and_their_server_return_the_same_typed_rows"
)
@pytest.mark.slow
def test_two_workers_whose_python_has_only_pyarrow_read_with_a_packed_archive(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    start, database = head_of(mysql_server), fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY)")
    for number in range(4):
        # Each row is in a separate file, so that as many ranges can be read concurrently.
        mysql_server.sql(f"INSERT INTO {database}.t VALUES ({number}); FLUSH BINARY LOGS")
    python = bare_python(tmp_path / "python")
    output = subprocess.run(
        [python, "-c", "import penstock"], capture_output=True, check=False, cwd=tmp_path, env={}
    )
    assert output.returncode != 0, "the workers' Python must not have the package"
    archive = pack(tmp_path / "penstock_packed.zip")
    settings = session_settings() | {
        "spark.archives": f"{archive}#penstock_packed",
        "spark.executorEnv.PYTHONPATH": "penstock_packed",
        "spark.executor.memory": "600m",
        "spark.cores.max": "2",
    }
    env = environment(python)
    with standalone_cluster(tmp_path, 2, python) as master:
        order = {
            "master": master,
            "settings": settings,
            "source": mysql_server.url(),
            "database": database,
            "start": start,
            "checkpoint": str(tmp_path / "checkpoint"),
            "out": str(tmp_path / "out"),
        }
        seen = json.loads(run_program("reads", json.dumps(order), env))
    expected = [[number, "insert"] for number in range(4)]
    assert seen == {"batch": expected, "envelope": expected, "stream": expected}
