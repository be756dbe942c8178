# SPDX-License-Identifier: Apache-2.0
"""Print what `pyproject.toml` requires, a line each: to build, to run, and for the extras named as arguments.

So the dependencies can be installed before the extension is compiled.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Return the requirements of the build, the package and some extras, sorted and each once."""
    declared = tomllib.loads(PYPROJECT.read_text())
    project = declared["project"]
    wanted = [*declared["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return sorted(set(wanted))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
