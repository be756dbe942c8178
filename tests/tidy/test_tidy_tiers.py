# SPDX-License-Identifier: Apache-2.0
"""Every deep test names an everyday test of the same capability as its guard; a long test guards no other."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Deep:
    """One use of the deep marker: on a test, or on a whole module if `test` is None."""

    file: str
    test: str | None
    guard: str | None
    keep: tuple[str, ...]


def deep_markers() -> Iterator[Deep]:
    """Yield every use of `pytest.mark.deep` in the tests."""
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = [call for decorator in node.decorator_list for call in ast.walk(decorator)]
                name: str | None = node.name
            elif isinstance(node, ast.Assign):
                calls, name = list(ast.walk(node.value)), None
            else:
                continue
            for call in calls:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.deep":
                    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                    yield Deep(file, name, arguments.get("guard"), tuple(arguments.get("keep", ())))


def is_long(tree: ast.Module, test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a test is long in all of its cases, by itself or with its module."""
    of_module = [
        part
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for part in ast.walk(node.value)
    ]
    return "pytest.mark.long" in map(ast.unparse, [*test.decorator_list, *of_module])


DEEP = list(deep_markers())


def test_scan_collects_the_deep_tests() -> None:
    assert len(DEEP) > 30


@pytest.mark.parametrize("deep", DEEP, ids=lambda deep: f"{Path(deep.file).stem}-{deep.test}")
def test_deep_test_is_guarded_by_an_everyday_test(deep: Deep) -> None:
    assert deep.guard or deep.keep, "name the everyday test of the same capability: guard=, or cases to keep="
    if deep.guard is None:
        return
    file, _, test = deep.guard.partition("::")
    path = ROOT / file
    assert path.is_file(), f"{deep.guard}: no such file"
    tree = ast.parse(path.read_text())
    named = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == test.partition("[")[0]
    ]
    assert named, f"{deep.guard}: no such test"
    assert not is_long(tree, named[0]), f"{deep.guard} is long itself"
    guards = [other for other in DEEP if other.file == file and other.test in (None, test.partition("[")[0])]
    assert all(guard.keep for guard in guards), f"{deep.guard} is deep itself"


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
