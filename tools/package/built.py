# SPDX-License-Identifier: Apache-2.0
"""The builds: a source distribution, and a wheel for each target, cross-compiled with zig's C compiler.

zig brings the headers and libraries of every target, and links against an old version of glibc. A target also
needs Rust's standard library, which rustup installs. zig has no macOS frameworks. One dependency links to a
framework, for which a stub is written into a folder that stands in for the SDK.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tools.servers import PartMissing

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
BUILD = ROOT / "build" / "package"

LIBRARY = "penstock/_native.abi3.so"
# Files that a wheel must contain in addition to the modules.
_IN_WHEEL = (
    LIBRARY,
    "penstock/_native.pyi",
    "penstock/console/static/console.css",
    "penstock/console/static/console.js",
    "penstock/console/templates/base.html",
    "penstock/console/words.zh.toml",
    "penstock/py.typed",
    "penstock/sample/mysql-bin.000001",
    "penstock/sample/rows.json.gz",
    "pyspark_penstock/__init__.py",
)
# Third-party files that the console serves: each file with its checksum and license.
_VENDOR = "penstock/console/static/vendor"
# Arrow's crates link this framework to determine the local time zone, which Penstock does not use. Symbols of
# Python are looked up at run time.
_FRAMEWORK = "System/Library/Frameworks/CoreFoundation.framework"
_FRAMEWORK_STUB = f"""\
--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '/{_FRAMEWORK}/Versions/A/CoreFoundation'
exports:
  - targets: [ arm64-macos ]
    symbols: [ _CFRelease ]
...
"""
# Files without which the source distribution cannot be built.
_IN_SOURCE = ("Cargo.lock", "Cargo.toml", "LICENSE", "pyproject.toml", "native/bridge/Cargo.toml")


class PackageInvalid(Exception):
    """A distribution is missing a part, or does not work."""


@dataclass(frozen=True)
class Target:
    """A platform: its name in Rust, the tag of its wheels, and for Linux its machine type."""

    triple: str
    tag: str
    machine: str | None

    @property
    def runs_here(self) -> bool:
        """Whether this machine can run the target's code."""
        return sys.platform == "linux" and self.machine == platform.machine()


TARGETS = {
    "linux-x86_64": Target("x86_64-unknown-linux-gnu", "manylinux_2_17_x86_64", "x86_64"),
    "linux-aarch64": Target("aarch64-unknown-linux-gnu", "manylinux_2_17_aarch64", "aarch64"),
    "macos-arm64": Target("aarch64-apple-darwin", "macosx_11_0_arm64", None),
}


def build_source() -> Path:
    """Build the source distribution into an empty dist/; return its path. Raises PackageInvalid."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(["maturin", "sdist", "--out", str(DIST)], cwd=ROOT)
    (source,) = DIST.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in _IN_SOURCE if name not in names]
    if missing:
        raise PackageInvalid(f"{source.name} lacks {', '.join(missing)}")
    return source


def build(target: Target) -> Path:
    """Build a target's wheel from the source distribution; return its path in dist/.

    Raises PartMissing if the machine cannot build it, PackageInvalid if the build fails.
    """
    if find_spec("ziglang") is None:
        raise PartMissing("ziglang is missing: pip install ziglang")
    _install_standard_library(target)
    (source,) = DIST.glob("*.tar.gz")
    folder = BUILD / "source"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    before = set(DIST.glob("*.whl"))
    words = ["maturin", "build", "--release", "--locked", "--strip", "--zig", "--quiet"]
    words += ["--target", target.triple, "--target-dir", str(BUILD / "target"), "--out", str(DIST)]
    run(words, cwd=unpacked, env=_environment(target))
    (wheel,) = set(DIST.glob("*.whl")) - before
    return wheel


def _environment(target: Target) -> dict[str, str] | None:
    """Return an environment with a stand-in for the macOS SDK if a build needs it, else None."""
    if target.machine is not None or sys.platform == "darwin" or "SDKROOT" in os.environ:
        return None
    sdk = BUILD / "macos"
    stub = sdk / _FRAMEWORK / "CoreFoundation.tbd"
    stub.parent.mkdir(parents=True, exist_ok=True)
    stub.write_text(_FRAMEWORK_STUB)
    return dict(os.environ) | {"SDKROOT": str(sdk)}


def check_contents(wheel: Path, target: Target) -> None:
    """Raise PackageInvalid if the wheel is missing a part, or runs on fewer systems than it should."""
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in _IN_WHEEL if name not in names]
    if missing:
        raise PackageInvalid(f"{wheel.name} lacks {', '.join(missing)}")
    _check_vendored(wheel, names)
    if "-cp311-abi3-" not in wheel.name or target.tag not in wheel.name:
        raise PackageInvalid(f"{wheel.name} is not for every Python from 3.11 on and {target.tag}")


def _check_vendored(wheel: Path, names: set[str]) -> None:
    """Raise PackageInvalid unless the wheel has each vendored file as published, and its license."""
    with zipfile.ZipFile(wheel) as archive:
        if f"{_VENDOR}/VENDOR.toml" not in names:
            raise PackageInvalid(f"{wheel.name} lacks {_VENDOR}/VENDOR.toml")
        entries = tomllib.loads(archive.read(f"{_VENDOR}/VENDOR.toml").decode())["file"]
        listed = {entry[field] for entry in entries for field in ("path", "license_file")}
        packed = {name.removeprefix(f"{_VENDOR}/") for name in names if name.startswith(f"{_VENDOR}/")}
        if packed != listed | {"VENDOR.toml"}:
            differing = ", ".join(sorted(packed ^ (listed | {"VENDOR.toml"})))
            raise PackageInvalid(f"{wheel.name} and its VENDOR.toml differ in {differing}")
        for entry in entries:
            checksum = hashlib.sha256(archive.read(f"{_VENDOR}/{entry['path']}")).hexdigest()
            if checksum != entry["sha256"]:
                raise PackageInvalid(f"{_VENDOR}/{entry['path']} of {wheel.name} is not as published")


def run(words: list[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a program; return its output. Raises PackageInvalid with the output if it fails."""
    done = subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise PackageInvalid(
            f"{' '.join(words[:4])} ... ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def _install_standard_library(target: Target) -> None:
    if shutil.which("rustup") is None:
        if target.runs_here:
            return
        raise PartMissing("without rustup, Rust has the standard library of this machine only")
    words = ["rustup", "target", "add", target.triple]
    done = subprocess.run(words, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    if done.returncode != 0:
        raise PartMissing(f"Rust's standard library: {done.stderr.strip().splitlines()[-1]}")
