# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks need from Maven's central repository, fetched once into the cache that the
database servers share.

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
    """Return a folder of the cache with artifacts and all they need, fetched where it is missing.

    Each is "group:artifact:version", or with ":zip" behind it. `name` is the folder's, and changes with the
    coordinates. Raises PartMissing.
    """

    def fetch(folder: Path) -> None:
        (folder / "pom.xml").write_text(_project(coordinates))
        copy_dependencies(folder, folder / "built")

    return cached(name, fetch)


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, built where it is missing: `build` gets an empty folder, and leaves what
    is to be kept in its `built`. Other processes wait meanwhile. Raises what `build` raises."""
    folder = cache_directory() / name
    with locked(name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache_directory()) as unfinished:
                build(Path(unfinished))
                (Path(unfinished) / "built").rename(folder)
    return folder


def copy_dependencies(project: Path, into: Path) -> None:
    """Copy what the pom.xml of a folder depends on. Raises PartMissing."""
    words = ["mvn", "--quiet", "--batch-mode", "dependency:copy-dependencies", f"-DoutputDirectory={into}"]
    for needed in ("java", "mvn"):
        program(needed)
    run(words, project)


def program(name: str, *folders: str) -> str:
    """Return the path of a program, looked for in further folders too. Raises PartMissing."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))
    if found is None:
        raise PartMissing(f"there is no {name}: apt-get install golang-go maven default-jdk-headless")
    return found


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
    for one in coordinates:
        fields = zip(_FIELDS, one.split(":"), strict=False)
        inner = "".join(f"<{field}>{value}</{field}>" for field, value in fields)
        lines.append(f"    <dependency>{inner}</dependency>")
    return _PROJECT.format(dependencies="\n".join(lines))
