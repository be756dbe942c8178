# SPDX-License-Identifier: Apache-2.0
"""The proof of this machine's wheel: installed alone, in an environment without Rust.

First without extras and without Java, where the demo must run. Then with Spark: the log of a real server is
decoded directly and in a Spark worker.
"""

import os
import shutil
import time
import venv
from pathlib import Path

from tools.package.built import PackageInvalid, run
from tools.servers import Server

FIRST_RESULT_SECONDS_MAX = 20.0

DECODE = """
import sys, penstock
kinds = [row["_change_type"] for batch in penstock.read_binlog(sys.argv[1], tables="shop.orders")
         for row in batch.to_arrow().to_pylist()]
assert kinds == ["insert", "insert", "update_preimage", "update_postimage", "delete"], kinds
"""

SPARK = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
count = spark.read.format("penstock").option("tables", "shop.orders").load(sys.argv[1]).count()
spark.stop()
assert count == 5, count
"""


def check_installed(wheel: Path, folder: Path) -> str:
    """Install the wheel in an environment without Rust, run the demo, and decode a server's log with it.

    Returns what was proved. Raises PackageInvalid.
    """
    venv.create(folder / "fresh", with_pip=True)
    python = str(folder / "fresh" / "bin" / "python")
    environment = _without_rust(folder)
    install = [python, "-m", "pip", "install", "--quiet"]
    run([*install, str(wheel)], cwd=folder, env=environment)
    began = time.monotonic()
    without_java = environment | {"PATH": str(folder / "no programs"), "JAVA_HOME": ""}
    run([str(Path(python).with_name("penstock")), "demo"], cwd=folder, env=without_java)
    seconds = time.monotonic() - began
    if seconds > FIRST_RESULT_SECONDS_MAX:
        raise PackageInvalid(f"penstock demo took {seconds:.0f} s")
    run([*install, f"{wheel}[spark]"], cwd=folder, env=environment)
    log = _log_of_a_shop(folder)
    run([python, "-c", DECODE, str(log)], cwd=folder, env=environment)
    run([python, "-c", SPARK, str(log)], cwd=folder, env=environment)
    command = [str(Path(python).with_name("penstock")), "inspect", str(log), "--limit", "1"]
    run(command, cwd=folder, env=environment)
    return f"installed without Rust: the demo without Java in {seconds:.1f} s, and a server's log in Spark"


def _log_of_a_shop(folder: Path) -> Path:
    """Return a binlog file with an insert, an update and a delete on a real server."""
    with Server("host") as server:
        server.sql("CREATE DATABASE shop")
        server.sql("CREATE TABLE shop.orders (id INT PRIMARY KEY, status VARCHAR(9) CHARACTER SET utf8mb4)")
        server.sql("INSERT INTO shop.orders VALUES (1, 'new'), (2, 'new')")
        server.sql("UPDATE shop.orders SET status = 'paid' WHERE id = 1")
        server.sql("DELETE FROM shop.orders WHERE id = 2")
        server.stop()
        written = server.binlog_files()[0]
        return Path(shutil.copy(written, folder / written.name))


def _without_rust(folder: Path) -> dict[str, str]:
    """Return an environment whose PATH has Java and the system's programs, but not cargo and rustc."""
    java = shutil.which("java")
    if java is None:
        raise PackageInvalid("no java on PATH, and Spark needs it")
    programs = folder / "programs"
    programs.mkdir()
    (programs / "java").symlink_to(java)
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(("cargo", "rust", "java")):
            (programs / program.name).symlink_to(program)
    kept_names = ("HOME", "JAVA_HOME", "LANG", "TMPDIR")
    environment = {
        name: value for name, value in os.environ.items() if name in kept_names or name.startswith("PIP_")
    }
    return environment | {"PATH": str(programs), "SPARK_LOCAL_IP": "127.0.0.1"}
