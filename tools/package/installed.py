# SPDX-License-Identifier: Apache-2.0
"""Checks the wheel for this machine's architecture, installed alone in an environment without Rust.

First the wheel is installed without extras and without Java, and the demo must run. Then it is installed with
Spark, and the tutorial is followed word by word.
"""

import os
import shutil
import time
import venv
from pathlib import Path

from tools.package.built import PackageInvalid, run
from tools.package.tutorial import follow

FIRST_RESULT_SECONDS_MAX = 20.0


def check_installed(wheel: Path, folder: Path) -> str:
    """Install the wheel in an environment without Rust, run the demo, and follow the tutorial.

    Returns a description of what was tested. Raises PackageInvalid, PartMissing.
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
    run([*install, f"{wheel}[spark]", "polars", "duckdb"], cwd=folder, env=environment)
    began = time.monotonic()
    follow(folder, environment | {"PATH": f"{Path(python).parent}:{environment['PATH']}"})
    return (
        f"installed without Rust: the demo without Java in {seconds:.1f} s, the tutorial in"
        f" {time.monotonic() - began:.0f} s"
    )


def _without_rust(folder: Path) -> dict[str, str]:
    """Return environment variables whose PATH contains Java and the system's programs, but not cargo and
    rustc.

    Raises PackageInvalid if Java is missing.
    """
    java = shutil.which("java")
    if java is None:
        raise PackageInvalid("no java on PATH, and Spark needs it")
    programs = folder / "programs"
    programs.mkdir()
    (programs / "java").symlink_to(java)
    for program in (*Path("/usr/bin").iterdir(), *Path("/usr/sbin").iterdir()):
        link = programs / program.name
        if not program.name.startswith(("cargo", "rust", "java")) and not link.is_symlink():
            link.symlink_to(program)
    kept_names = ("HOME", "JAVA_HOME", "LANG", "TMPDIR")
    environment = {
        name: value for name, value in os.environ.items() if name in kept_names or name.startswith("PIP_")
    }
    return environment | {"PATH": str(programs), "SPARK_LOCAL_IP": "127.0.0.1"}
