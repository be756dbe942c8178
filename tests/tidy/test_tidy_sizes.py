# SPDX-License-Identifier: Apache-2.0
"""Files and functions stay small; no file is exempt."""

from tests.tidy.tree import ROOT, files, name_of, python_functions, rust_functions

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
MARKDOWN_LINES_MAX = {"README.md": 100, "ARCHITECTURE.md": 400}
FILE_BYTES_MAX = 400_000


def test_source_files_stay_under_six_hundred_lines() -> None:
    lines = {path: path.read_text().count("\n") for path in files(".py", ".pyi", ".rs", ".c", ".sh")}
    assert lines, "no source file was found"
    long = {name_of(path): count for path, count in lines.items() if count >= FILE_LINES_MAX}
    assert not long, f"split along a question: {long}"


def test_python_functions_stay_under_seventy_lines() -> None:
    functions = [(path, node) for path in files(".py") for node in python_functions(path)]
    assert functions, "no function was found"
    long = [
        f"{name_of(path)}::{node.name}: {node.end_lineno - node.lineno + 1}"
        for path, node in functions
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 >= FUNCTION_LINES_MAX
    ]
    assert not long, long


def test_rust_functions_stay_under_seventy_lines() -> None:
    functions = [(path, function) for path in files(".rs") for function in rust_functions(path)]
    assert len(functions) > 100, "the scan finds hardly any function"
    long = [
        f"{name_of(path)}::{function.name}: {function.last - function.first + 1}"
        for path, function in functions
        if function.last - function.first + 1 >= FUNCTION_LINES_MAX
    ]
    assert not long, long


def test_front_pages_stay_short() -> None:
    lines = {name: (ROOT / name).read_text().count("\n") for name in MARKDOWN_LINES_MAX}
    for name, lines_max in MARKDOWN_LINES_MAX.items():
        assert lines[name] <= lines_max, f"{name} passes {lines_max} lines"


def test_no_large_file_is_committed() -> None:
    large = {name_of(path): path.stat().st_size for path in files() if path.stat().st_size > FILE_BYTES_MAX}
    assert not large, large
