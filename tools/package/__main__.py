# SPDX-License-Identifier: Apache-2.0
"""Build the source distribution and the wheels into dist/, and check that they work; see `main`."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.package.built import DIST, TARGETS, PackageInvalid, Target, build, build_source, check_contents
from tools.package.emulated import check_emulated
from tools.package.installed import check_installed
from tools.package.macos import check_library
from tools.servers import PartMissing


def main(words: list[str] | None = None) -> int:
    """Build every target whose parts this machine has; return the exit status.

    The wheel of this machine must be built. This wheel is tested in an environment without Rust. The wheel of
    the other Linux target is tested under emulation. For the macOS wheel, only the header of the library is
    checked. The output lists each wheel that was not built or not tested, with the reason.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.package", description=__doc__)
    parser.add_argument("--only", choices=sorted(TARGETS), help="build the wheel of one target")
    only = parser.parse_args(words).only
    targets = [target for name, target in TARGETS.items() if only in (None, name)]
    try:
        source = build_source()
        print(f"{source.name}: {_megabytes(source)}")
        for target in targets:
            _build_and_prove(target)
    except (PackageInvalid, PartMissing, subprocess.CalledProcessError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def _build_and_prove(target: Target) -> None:
    """Build a wheel and prove it. Raises PartMissing if the wheel of this machine cannot be built."""
    try:
        wheel = build(target)
    except PartMissing as problem:
        if target.runs_here:
            raise
        print(f"{target.triple}: not built: {problem}")
        return
    check_contents(wheel, target)
    print(f"{wheel.name}: {_megabytes(wheel)}")
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-package-") as folder:
            if target.runs_here:
                proof = check_installed(wheel, Path(folder))
            elif target.machine is None:
                proof = check_library(wheel)
            else:
                proof = check_emulated(wheel, target.machine, Path(folder))
    except PartMissing as problem:
        if target.runs_here:
            raise
        proof = f"not tried: {problem}"
    print(f"  {proof}")


def _megabytes(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.1f} MB in {DIST.name}/"


if __name__ == "__main__":
    sys.exit(main())
