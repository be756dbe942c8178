# SPDX-License-Identifier: Apache-2.0
"""Artifacts of Maven's central repository for tests and benchmarks, fetched once into a shared cache.

folder = artifacts("zookeeper-3.9.3", ["org.apache.zookeeper:zookeeper:3.9.3"])
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.servers.errors import PartMissing
from tools.servers.packages import cache_directory, locked

FETCH_SECONDS_MAX = 600.0

_PROJECT = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock</groupId>
  <artifactId>parts-for-tests</artifactId>
  <version>1</version>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
_FIELDS = ("groupId", "artifactId", "version", "type")


def artifacts(name: str, coordinates: Sequence[str]) -> Path:
    """Return a cache folder with artifacts and all their dependencies, which are fetched if they are missing.

    Each coordinate is "group:artifact:version", optionally followed by ":zip". `name` is the folder's name
    and must change whenever the coordinates change. Raises PartMissing.
    """

    def fetch(folder: Path) -> None:
        (folder / "pom.xml").write_text(_project(coordinates))
        copy_dependencies(folder, folder / "built")

    return cached(name, fetch)


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, which is built if it is missing.

    `build` receives an empty folder, and puts the files to keep into the subfolder `built`. Other processes
    wait until it returns. Errors from `build` propagate.
    """
    folder = cache_directory() / name
    with locked(name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache_directory()) as unfinished:
                build(Path(unfinished))
                (Path(unfinished) / "built").rename(folder)
    return folder


def copy_dependencies(project: Path, into: Path) -> None:
    """Copy the dependencies of a folder's pom.xml. Raises PartMissing."""
    words = ["mvn", "--quiet", "--batch-mode", "dependency:copy-dependencies", f"-DoutputDirectory={into}"]
    for needed in ("java", "mvn"):
        program(needed)
    run(words, project)


def program(name: str, *folders: str) -> str:
    """Return the path of a program, also searching further folders. Raises PartMissing."""
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))
    if path is None:
        raise PartMissing(f"there is no {name}: apt-get install golang-go maven default-jdk-headless")
    return path


def run(words: Sequence[str], folder: Path) -> None:
    """Run a program that fetches or builds something, in a folder. Raises PartMissing."""
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired as problem:
        raise PartMissing(f"{words[0]} did not end within {FETCH_SECONDS_MAX:g} s") from problem
    if done.returncode != 0:
        raise PartMissing(f"{' '.join(words[:4])} failed: {(done.stdout + done.stderr)[-2000:]}")


def _project(coordinates: Sequence[str]) -> str:
    lines = []
    for coordinate in coordinates:
        fields = zip(_FIELDS, coordinate.split(":"), strict=False)
        inner = "".join(f"<{field}>{value}</{field}>" for field, value in fields)
        lines.append(f"    <dependency>{inner}</dependency>")
    return _PROJECT.format(dependencies="\n".join(lines))
