# SPDX-License-Identifier: Apache-2.0
"""The stub describes the compiled module exactly."""

import os
import subprocess
import sys
from pathlib import Path

from tests.tidy.tree import ROOT


def test_stub_equals_the_compiled_module(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    # The modules used in the stub's types are checked with the rest of the tree.
    config.write_text("[mypy]\nfollow_imports = skip\n")
    words = [
        sys.executable,
        "-m",
        "mypy.stubtest",
        "penstock._native",
        "--mypy-config-file",
        str(config),
    ]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
