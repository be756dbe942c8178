# SPDX-License-Identifier: Apache-2.0
"""Programs in other languages, built once for each version of their source and cached."""

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
    """A compiler or registry that a program needs is not available; the message names the package to
    install.
    """


def built(name: str, sources: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """Return the folder of a program that `build` builds from sources. The sources are copied into the
    folder.

    The program is built again when a source changes. Raises ToolMissing.
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
    """Return the path of a program. Raises ToolMissing."""
    path = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    if path is None:
        raise ToolMissing(f"there is no {program}: apt-get install {package}")
    return path


def run(words: Sequence[str], folder: Path) -> str:
    """Run a tool in a folder and return its output. Raises ToolMissing if it fails."""
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
    """Return a function that builds a single-file C program, named after the file without its suffix."""

    def build(folder: Path) -> None:
        compiler = tool("cc", "gcc")
        run([compiler, "-O2", "-Wall", "-Werror", "-o", source.removesuffix(".c"), source], folder)

    return build


def build_java(source: str) -> Callable[[Path], None]:
    """Return a function that builds a single-file Java program with the dependencies of `pom.xml`."""

    def build(folder: Path) -> None:
        maven = tool("mvn", "maven")
        compiler = tool("javac", "default-jdk-headless")
        words = [maven, "--quiet", "--batch-mode", "dependency:copy-dependencies", "-DoutputDirectory=."]
        run(words, folder)
        run([compiler, "-cp", "./*", "-d", ".", source], folder)

    return build


def java_words(folder: Path, main: str, *options: str) -> list[str]:
    """Return the command of a Java program built by `build_java`."""
    return [tool("java", "default-jdk-headless"), *options, "-cp", f"{folder}/*{os.pathsep}{folder}", main]
