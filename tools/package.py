# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.package`: build the wheel into dist/ and test it in an environment without Rust.

The wheel is installed alone into a fresh virtual environment, on a PATH without cargo and rustc. There it
decodes a log written by a real server, both directly and in a Spark worker.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from tools.servers import PartMissing, Server

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

# Files that a wheel must contain in addition to the modules.
NEEDED = (
    "penstock/_native.abi3.so",
    "penstock/_native.pyi",
    "penstock/py.typed",
    "pyspark_penstock/__init__.py",
)

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


class PackageInvalid(Exception):
    """The wheel is missing a part, or does not work."""


def main() -> int:
    """Build, inspect and test the wheel; return the exit status."""
    try:
        wheel = build()
        check_contents(wheel)
        with tempfile.TemporaryDirectory(prefix="penstock-package-") as folder:
            check_installed(wheel, Path(folder))
    except (PackageInvalid, PartMissing, subprocess.CalledProcessError) as problem:
        print(problem, file=sys.stderr)
        return 1
    print(f"{wheel.relative_to(ROOT)} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return 0


def build() -> Path:
    """Build the wheel; return its path in dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run(["maturin", "build", "--release", "--locked", "--strip", "--out", str(DIST), "--quiet"], cwd=ROOT)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Raise PackageInvalid if the wheel is missing a part, or is limited to one Python or Linux version."""
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise PackageInvalid(f"{wheel.name} lacks {', '.join(missing)}")
    if "-cp311-abi3-" not in wheel.name or (sys.platform == "linux" and "-manylinux" not in wheel.name):
        raise PackageInvalid(f"{wheel.name} is not for every Python from 3.11 on and every Linux of its age")


def check_installed(wheel: Path, folder: Path) -> None:
    """Install the wheel in an environment without Rust, and decode a server's log with it."""
    venv.create(folder / "fresh", with_pip=True)
    python = str(folder / "fresh" / "bin" / "python")
    environment = _without_rust(folder)
    _run([python, "-m", "pip", "install", "--quiet", f"{wheel}[spark]"], cwd=folder, env=environment)
    log = _log_of_a_shop(folder)
    _run([python, "-c", DECODE, str(log)], cwd=folder, env=environment)
    _run([python, "-c", SPARK, str(log)], cwd=folder, env=environment)
    command = [str(Path(python).with_name("penstock")), "inspect", str(log), "--limit", "1"]
    _run(command, cwd=folder, env=environment)


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


def _run(words: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise PackageInvalid(
            f"{' '.join(words[:4])} ... ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )


if __name__ == "__main__":
    sys.exit(main())
