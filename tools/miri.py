# SPDX-License-Identifier: Apache-2.0
"""Run miri over the unit tests of the kernel's files with `unsafe` code: `python -m tools.miri`.

Miri interprets the tests and reports undefined behavior. It is slow, so it runs only the tests of these
files. It cannot call Python, so the `unsafe` code of the bridge is left to `tests/fuzz/attack.py`. The
nightly toolchain and its component `miri` are installed with rustup if they are missing.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "native" / "kernel" / "src"
_TOOLCHAIN = "nightly"
_COMPONENTS = ("miri", "rust-src")


def main() -> int:
    """Run the tests; return the exit status of the first command that fails."""
    filters = [filter_of(path) for path in unsafe_files(SOURCES)]
    if not filters:
        print("no file of the kernel has unsafe code", file=sys.stderr)
        return 1
    install = ["rustup", "toolchain", "install", _TOOLCHAIN, "--profile", "minimal", "--no-self-update"]
    test = ["cargo", f"+{_TOOLCHAIN}", "miri", "test", "--locked", "--package", "penstock-kernel", "--lib"]
    if not is_installed():
        print(f"installing {', '.join(_COMPONENTS)} of Rust's {_TOOLCHAIN} toolchain", file=sys.stderr)
        installed = subprocess.run([*install, "--component", ",".join(_COMPONENTS)], check=False)
        if installed.returncode:
            return installed.returncode
    return subprocess.run([*test, "--", *filters], cwd=ROOT, check=False).returncode


def is_installed() -> bool:
    """Return whether miri can run without a download."""
    command = ["rustup", "component", "list", "--installed", "--toolchain", _TOOLCHAIN]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return listed.returncode == 0 and all(component in listed.stdout for component in _COMPONENTS)


def unsafe_files(folder: Path) -> list[Path]:
    """Return the Rust files below a folder that contain `unsafe` blocks, functions or implementations."""
    has_unsafe = re.compile(r"^(?!\s*//).*\bunsafe\b", re.MULTILINE)
    return [path for path in sorted(folder.rglob("*.rs")) if has_unsafe.search(path.read_text())]


def filter_of(path: Path) -> str:
    """Return the prefix of the names of a kernel file's unit tests."""
    module = path.relative_to(SOURCES).with_suffix("")
    return "::".join((*module.parts, ""))


if __name__ == "__main__":
    sys.exit(main())
