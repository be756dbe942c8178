# SPDX-License-Identifier: Apache-2.0
"""Print the requirements of `pyproject.toml`, one per line: for building, running, and the given extras.

    tools/requirements.py docs
    tools/requirements.py --all-but package

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


def extras_but(left_out: list[str]) -> list[str]:
    """Return every extra except the excluded ones."""
    return [
        extra
        for extra in tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
        if extra not in left_out
    ]


if __name__ == "__main__":
    is_rest, names = sys.argv[1:2] == ["--all-but"], [name for name in sys.argv[1:] if name != "--all-but"]
    print("\n".join(requirements(extras_but(names) if is_rest else names)))
