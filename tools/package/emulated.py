# SPDX-License-Identifier: Apache-2.0
"""Checks a wheel for another machine architecture: a Python for that architecture imports the wheel and runs
the demo under qemu.

The Python and its libraries are Debian packages, unpacked into a folder. apt-get uses a separate state, so
that the system's packages and sources do not change.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.package.built import run
from tools.servers import PartMissing

DEBIAN_ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
_PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
_PROGRAM = "import sys; sys.argv = ['penstock', 'demo']; from penstock.cli.app import main; main()"


def check_emulated(wheel: Path, machine: str, folder: Path) -> str:
    """Install the wheel on an emulated machine, and run the demo there. Return a description of what was
    tested.

    Raises PartMissing if qemu or apt-get is missing, PackageInvalid if the wheel does not work.
    """
    qemu = next(filter(None, map(shutil.which, (f"qemu-{machine}-static", f"qemu-{machine}"))), None)
    if qemu is None:
        raise PartMissing(f"there is no qemu-{machine}: apt-get install qemu-user-static")
    root = _debian(DEBIAN_ARCHITECTURES[machine], folder)
    (python,) = root.glob("usr/bin/python3.[0-9]*[0-9]")
    site = folder / "site"
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), "--only-binary=:all:"]
    words += ["--implementation", "cp", "--python-version", python.name.removeprefix("python")]
    for manylinux in ("2_28", "2_17", "2014"):
        words += ["--platform", f"manylinux{'_' if '_' in manylinux else ''}{manylinux}_{machine}"]
    run([*words, str(wheel)], cwd=folder)
    environment = {"PYTHONHOME": str(root / "usr"), "PYTHONPATH": str(site), "HOME": str(folder)}
    began = time.monotonic()
    run([qemu, "-L", str(root), str(python), "-c", _PROGRAM], cwd=folder, env=environment)
    return f"{python.name} of {machine} under qemu: the demo in {time.monotonic() - began:.1f} s"


def _debian(architecture: str, folder: Path) -> Path:
    """Return a folder with Debian's Python and all of its dependencies. Raises PartMissing."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise PartMissing("there is no apt-get, which fetches a Python of the other machine")
    state, cache, root = folder / "state", folder / "cache", folder / "root"
    for directory in (state / "lists/partial", cache / "archives/partial", root):
        directory.mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "Dir::State": state,
        "Dir::State::status": folder / "status",
        "Dir::Cache": cache,
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        # The user that apt switches to cannot write into a private folder.
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    for words in (["update"], ["install", "-y", "--no-install-recommends", "--download-only", *_PACKAGES]):
        done = subprocess.run(
            [*apt, *words], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}
        )
        if done.returncode != 0:
            raise PartMissing(f"apt-get {words[0]}: {done.stderr.strip()[-300:]}")
    for package in sorted((cache / "archives").glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(root)], cwd=folder)
    return root
