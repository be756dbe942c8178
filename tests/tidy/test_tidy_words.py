# SPDX-License-Identifier: Apache-2.0
"""Forbidden words: hollow names, and text that describes the making of the repository."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.tree import files, name_of, python_functions, python_nodes, python_tree, rust_code

# Words without meaning: those forbidden anywhere in a name, and those forbidden as a whole name.
HOLLOW_WORDS = {"manager", "handler", "helper", "helpers", "util", "utils"}
HOLLOW_NAMES = {*HOLLOW_WORDS, "common", "base", "info", "data", "impl", "misc"}

# This file contains the words that it searches for.
HERE = Path(__file__)

# Variables, parameters, attributes and functions of the product carry a noun instead of these words.
HOLLOW_VARIABLES = {"one", "found", "told", "made", "place", "standing", "manner", "mend"}
# Remove a file from this list when its last hollow variable is renamed; add no file.
FILES_WITH_HOLLOW_VARIABLES = {
    f"src/penstock/{name}"
    for name in (
        *("client/batch.py", "client/fake.py", "client/flow.py", "client/following.py"),
        *("client/intake.py", "commit_versions.py"),
        *("errors.py", "pipeline/settings.py", "pipeline/verify/comparison.py"),
        *("pipeline/verify/verify.py", "pipelines.py", "serve/canal/cursor.py", "sinks/sink.py"),
        *("source/kept_stream_log.py", "source/stream_log.py", "source/tracking.py"),
        "spark/verifying.py",
    )
}

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError|unimplemented!|todo!)(?!\w)")

# The repository describes the product, not its own history.
ABOUT_THE_MAKING = re.compile(
    r"/work/|\bissues? #?\d+\b|\bagents?\b|\bsub-?agents?\b|\bLLM\b|\bthis session\b|\bDESIGN\.md\b|"
    r"\bartifactory\b|\bprevious(?:ly)? (?:we|version of this)\b",
    re.IGNORECASE,
)


def test_names_are_not_hollow() -> None:
    hollow = [
        f"{name_of(path)}: {name}"
        for path in files(".py", ".rs")
        for name in names_defined(path)
        if is_hollow(name)
    ]
    assert not hollow, f"say what it is: {hollow}"


@pytest.mark.parametrize("name", ["EventHandler", "path_utils", "data", "Base", "helper"])
def test_hollow_name_is_detected(name: str) -> None:
    assert is_hollow(name)


@pytest.mark.parametrize(
    "name", ["database", "DataSource", "server_data_directory", "information", "basename"]
)
def test_specific_name_is_accepted(name: str) -> None:
    assert not is_hollow(name)


def test_no_file_gains_a_hollow_variable() -> None:
    hollow = {
        name_of(path)
        for path in files(".py", below="src/penstock")
        if HOLLOW_VARIABLES.intersection(name.strip("_").lower() for name in names_bound(python_tree(path)))
    }
    assert hollow == FILES_WITH_HOLLOW_VARIABLES


@pytest.mark.parametrize(
    "code", ["one = 1", "def f(told): pass", "def _made(): pass", "self.found = 1", "for place in x: pass"]
)
def test_hollow_variable_is_found(code: str) -> None:
    assert HOLLOW_VARIABLES.intersection(name.strip("_") for name in names_bound(ast.parse(code)))


def test_no_code_is_unfinished() -> None:
    lines = lines_with(UNFINISHED, files(".py", ".pyi", ".rs", ".sh", ".md", ".toml", ".c"))
    assert not lines, lines


def test_no_file_mentions_its_own_making() -> None:
    lines = lines_with(ABOUT_THE_MAKING, files())
    assert not lines, lines


def test_every_source_file_starts_with_its_purpose() -> None:
    silent = [
        name_of(path)
        for path in files(".py")
        # File names of tests, and names of tests, state what they check.
        if not path.name.startswith("test_") and ast.get_docstring(python_tree(path)) is None
    ]
    silent += [
        name_of(path) for path in files(".rs") if not path.read_text().startswith(("//!", "// Written by"))
    ]
    assert not silent, silent


def is_hollow(name: str) -> bool:
    """Return whether a name says nothing about its subject."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return name.lower().strip("_") in HOLLOW_NAMES or any(word.lower() in HOLLOW_WORDS for word in words)


def names_defined(path: Path) -> Iterator[str]:
    """Yield a file's own name and the names of its classes, functions, types and modules."""
    yield path.stem
    if path.suffix == ".py":
        yield from (node.name for node in python_functions(path))
        yield from (node.name for node in python_nodes(path, ast.ClassDef))
    else:
        yield from re.findall(r"\b(?:fn|struct|enum|trait|mod|type)\s+(\w+)", rust_code(path))


def names_bound(tree: ast.AST) -> Iterator[str]:
    """Yield the names that code binds: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def lines_with(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """Return the lines that match a pattern, each with its position."""
    matches = []
    for path in paths:
        if path == HERE:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                matches.append(f"{name_of(path)}:{number}: {line.strip()}")
    return matches
