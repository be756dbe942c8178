# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.package`: build the wheel into dist/ and prove it where there is no Rust.

A fresh virtual environment, on a PATH without cargo and rustc, gets the wheel and nothing else. There
it decodes a log that a real server wrote, by itself and in Spark's own worker process.
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

# What a wheel must bring besides the modules themselves.
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
    """The wheel does not hold what it must, or does not do what it must."""


def main() -> int:
    """Build, look inside, prove; return the exit status."""
    try:
        wheel = build()
        look_inside(wheel)
        with tempfile.TemporaryDirectory(prefix="penstock-package-") as folder:
            prove(wheel, Path(folder))
    except (PackageInvalid, PartMissing, subprocess.CalledProcessError) as problem:
        print(problem, file=sys.stderr)
        return 1
    print(f"{wheel.relative_to(ROOT)} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return 0


def build() -> Path:
    """Return the one wheel in dist/, just built."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run(["maturin", "build", "--release", "--locked", "--strip", "--out", str(DIST), "--quiet"], cwd=ROOT)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def look_inside(wheel: Path) -> None:
    """Raise PackageInvalid where the wheel lacks a part, or fits one Python or one Linux alone."""
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise PackageInvalid(f"{wheel.name} lacks {', '.join(missing)}")
    if "-cp311-abi3-" not in wheel.name or (sys.platform == "linux" and "-manylinux" not in wheel.name):
        raise PackageInvalid(f"{wheel.name} is not for every Python from 3.11 on and every Linux of its age")


def prove(wheel: Path, folder: Path) -> None:
    """Install the wheel where there is no Rust, and decode a server's log with it."""
    venv.create(folder / "fresh", with_pip=True)
    python = str(folder / "fresh" / "bin" / "python")
    surroundings = _without_rust(folder)
    _run([python, "-m", "pip", "install", "--quiet", f"{wheel}[spark]"], cwd=folder, env=surroundings)
    log = _log_of_a_shop(folder)
    _run([python, "-c", DECODE, str(log)], cwd=folder, env=surroundings)
    _run([python, "-c", SPARK, str(log)], cwd=folder, env=surroundings)
    command = [str(Path(python).with_name("penstock")), "inspect", str(log), "--limit", "1"]
    _run(command, cwd=folder, env=surroundings)


def _log_of_a_shop(folder: Path) -> Path:
    """Return a binlog file in which a real server inserted, updated and deleted."""
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
    """Return an environment whose PATH has Java and the system's programs, but no cargo and no rustc."""
    java = shutil.which("java")
    if java is None:
        raise PackageInvalid("no java on PATH, and Spark needs it")
    programs = folder / "programs"
    programs.mkdir()
    (programs / "java").symlink_to(java)
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(("cargo", "rust", "java")):
            (programs / program.name).symlink_to(program)
    kept = ("HOME", "JAVA_HOME", "LANG", "TMPDIR")
    wanted = {name: value for name, value in os.environ.items() if name in kept or name.startswith("PIP_")}
    return wanted | {"PATH": str(programs), "SPARK_LOCAL_IP": "127.0.0.1"}


def _run(words: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise PackageInvalid(
            f"{' '.join(words[:4])} ... ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )


if __name__ == "__main__":
    sys.exit(main())
