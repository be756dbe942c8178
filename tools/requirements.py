# SPDX-License-Identifier: Apache-2.0
"""Print the requirements of `pyproject.toml`, one per line: for building, running, and the given extras.

This allows installing the dependencies before the extension is compiled.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Return the requirements of the build, the package and the extras, sorted and without duplicates."""
    declared = tomllib.loads(PYPROJECT.read_text())
    project = declared["project"]
    required = [*declared["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        required += project["optional-dependencies"][extra]
    return sorted(set(required))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
