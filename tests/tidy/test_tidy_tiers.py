# SPDX-License-Identifier: Apache-2.0
"""Every deep test names an everyday test of the same capability as its guard; a long test guards no other
test.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT, files, name_of, python_functions, python_nodes, python_tree


@dataclass(frozen=True)
class Deep:
    """One use of the marker `deep`: on a test, or on a whole module if `test` is None."""

    file: str
    test: str | None
    guard: str | None
    keep: tuple[str, ...]


def deep_markers() -> Iterator[Deep]:
    """Yield every use of `pytest.mark.deep` in the tests."""
    for path in files(".py", below="tests"):
        if not path.name.startswith("test_"):
            continue
        marked: list[tuple[str | None, list[ast.expr]]] = [
            *((node.name, node.decorator_list) for node in python_functions(path)),
            *((None, [node.value]) for node in python_nodes(path, ast.Assign)),
        ]
        for test, expressions in marked:
            for call in (part for expression in expressions for part in ast.walk(expression)):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.deep":
                    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                    yield Deep(name_of(path), test, arguments.get("guard"), tuple(arguments.get("keep", ())))


def is_long(tree: ast.Module, test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a test is long in all of its cases, by itself or with its module."""
    of_module = [
        part
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for part in ast.walk(node.value)
    ]
    return "pytest.mark.long" in map(ast.unparse, [*test.decorator_list, *of_module])


def problem_of(deep: Deep, others: list[Deep]) -> str | None:
    """Return why a deep test is not guarded by an everyday test, None if it is."""
    if deep.guard is None:
        return None if deep.keep else "name the everyday test of the same capability: guard=, or keep="
    file, _, test = deep.guard.partition("::")
    path, name = ROOT / file, test.partition("[")[0]
    if not path.is_file():
        return f"{deep.guard}: no such file"
    tree = python_tree(path)
    named = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if not named:
        return f"{deep.guard}: no such test"
    if is_long(tree, named[0]):
        return f"{deep.guard} is long itself"
    guards = [other for other in others if other.file == file and other.test in (None, name)]
    return None if all(guard.keep for guard in guards) else f"{deep.guard} is deep itself"


def test_every_deep_test_is_guarded_by_an_everyday_test() -> None:
    markers = list(deep_markers())
    assert len(markers) > 30, "the scan finds hardly any deep test"
    problems = {f"{deep.file}::{deep.test}": problem_of(deep, markers) for deep in markers}
    assert not {test: problem for test, problem in problems.items() if problem}


def test_deep_test_without_an_everyday_guard_is_found() -> None:
    here = name_of(Path(__file__))
    guard = f"{here}::{test_deep_test_without_an_everyday_guard_is_found.__name__}"
    for deep, others, problem in [
        (Deep(here, "test_a", guard, ()), [], None),
        (Deep(here, "test_a", None, ("mysql",)), [], None),
        (Deep(here, "test_a", None, ()), [], "name the everyday test"),
        (Deep(here, "test_a", "tests/test_none.py::test_b", ()), [], "no such file"),
        (Deep(here, "test_a", f"{here}::test_none", ()), [], "no such test"),
        (Deep(here, "test_a", guard, ()), [Deep(here, None, "tests/x.py::test_c", ())], "is deep itself"),
    ]:
        assert (problem or "None") in str(problem_of(deep, others))


@pytest.mark.parametrize(
    ("code", "long"),
    [
        ("@pytest.mark.long\ndef test_a(): ...", True),
        ("pytestmark = [pytest.mark.timing, pytest.mark.long]\ndef test_a(): ...", True),
        (
            "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.long)])\ndef test_a(n): ...",
            False,
        ),
        ("def test_a(): ...\n@pytest.mark.long\ndef test_b(): ...", False),
    ],
    ids=["marked", "module", "one case", "another test"],
)
def test_scan_measures_long_tests(code: str, long: bool) -> None:
    tree = ast.parse(code)
    test = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert is_long(tree, test) is long
