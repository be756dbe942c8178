# SPDX-License-Identifier: Apache-2.0
"""Files and functions stay small: above a hint, a warning asks to split them along a question. Twice the
hint is an error.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

from tests.tidy.tree import ROOT, files, name_of, python_functions, rust_functions

FILE_LINES_HINT = 600
FUNCTION_LINES_HINT = 70
MARKDOWN_LINES_MAX = {"README.md": 100, "ARCHITECTURE.md": 400}
FILE_BYTES_MAX = 400_000


def test_source_files_have_a_bounded_length() -> None:
    check(
        {name_of(path): lines_of(path) for path in files(".py", ".pyi", ".rs", ".c", ".sh")}, FILE_LINES_HINT
    )


def test_python_functions_have_a_bounded_length() -> None:
    functions = [(path, node) for path in files(".py") for node in python_functions(path)]
    lines = {
        f"{name_of(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path, node in functions
        if node.end_lineno is not None
    }
    check(lines, FUNCTION_LINES_HINT)


def test_rust_functions_have_a_bounded_length() -> None:
    functions = [(path, function) for path in files(".rs") for function in rust_functions(path)]
    lines = {
        f"{name_of(path)}:{function.first} {function.name}": function.last - function.first + 1
        for path, function in functions
    }
    check(lines, FUNCTION_LINES_HINT)


def check(lines: Mapping[str, int], hint: int) -> None:
    """Warn about everything as long as the hint or longer, and fail for anything twice as long as the
    hint.
    """
    assert len(lines) > 100, "the scan finds hardly any source"
    long = {name: count for name, count in lines.items() if count >= hint}
    if long:
        warnings.warn(f"hint: split along a question: {long}", stacklevel=2)
    assert not {name: count for name, count in long.items() if count >= 2 * hint}


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def test_front_pages_stay_short() -> None:
    lines = {name: (ROOT / name).read_text().count("\n") for name in MARKDOWN_LINES_MAX}
    for name, lines_max in MARKDOWN_LINES_MAX.items():
        assert lines[name] <= lines_max, f"{name} passes {lines_max} lines"


def test_no_large_file_is_committed() -> None:
    large = {name_of(path): path.stat().st_size for path in files() if path.stat().st_size > FILE_BYTES_MAX}
    assert not large, large
