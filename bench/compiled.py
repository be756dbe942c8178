# SPDX-License-Identifier: Apache-2.0
"""Programs of other languages, built once for each text of theirs and kept in the cache."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.corpora.corpus import cache_directory

_BUILD_SECONDS_MAX = 600.0


class ToolMissing(RuntimeError):
    """A compiler or a registry that a program needs is not at hand; the message says what to install."""


def built(name: str, sources: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """Return the folder of a program that `build` made of sources, which it finds copied into the folder.

    It is made again when a source changes. Raises ToolMissing.
    """
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    folder = cache_directory() / f"{name}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            for source in sources:
                shutil.copy(source, part)
            build(part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def tool(program: str, package: str, *folders: str) -> str:
    """Return where a program is. Raises ToolMissing."""
    found = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    if found is None:
        raise ToolMissing(f"there is no {program}: apt-get install {package}")
    return found


def run(words: Sequence[str], folder: Path) -> str:
    """Run a tool in a folder and return what it printed. Raises ToolMissing where it fails."""
    done = subprocess.run(
        words,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS_MAX,
        check=False,
    )
    if done.returncode:
        raise ToolMissing(f"{' '.join(words[:3])} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def build_c(source: str) -> Callable[[Path], None]:
    """Return how a C program of one file is built: the program has the file's name without its end."""

    def build(folder: Path) -> None:
        compiler = tool("cc", "gcc")
        run([compiler, "-O2", "-Wall", "-Werror", "-o", source.removesuffix(".c"), source], folder)

    return build


def build_java(source: str) -> Callable[[Path], None]:
    """Return how a Java program of one file is built, beside what `pom.xml` names as its dependencies."""

    def build(folder: Path) -> None:
        maven = tool("mvn", "maven")
        compiler = tool("javac", "default-jdk-headless")
        words = [maven, "--quiet", "--batch-mode", "dependency:copy-dependencies", "-DoutputDirectory=."]
        run(words, folder)
        run([compiler, "-cp", "./*", "-d", ".", source], folder)

    return build


def java_words(folder: Path, main: str, *options: str) -> list[str]:
    """Return the command of a Java program that `build_java` made."""
    return [tool("java", "default-jdk-headless"), *options, "-cp", f"{folder}/*{os.pathsep}{folder}", main]
