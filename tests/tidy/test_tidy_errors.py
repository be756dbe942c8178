# SPDX-License-Identifier: Apache-2.0
"""The error tree: documented completely, raised with all fields, and never swallowed."""

import ast
import inspect
import re

from penstock import _native, errors
from tests.tidy.tree import files, name_of, python_nodes

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
WHO_ACTS = {"PenstockError", "OperatorError", "TransientError", "StreamError"}


def test_error_tree_in_the_docs_equals_the_code() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert ["PenstockError", *drawn] == [kind.__name__ for kind in in_order(errors.PenstockError)]


def test_kernel_raises_only_errors_of_the_tree() -> None:
    assert set(_native.error_kinds()) <= {kind.__name__ for kind in CLASSES}


def test_every_error_is_raised_somewhere() -> None:
    texts = [path.read_text() for path in files(".py", below="src") if path.name != "errors.py"]
    rust = [path.read_text() for path in files(".rs", below="native") if path.name != "error.rs"]
    idle = [
        kind.__name__
        for kind in CLASSES
        if kind.__name__ not in WHO_ACTS
        and not any(re.search(rf"\b{kind.__name__}\b", text) for text in texts)
        and not any(f"ErrorKind::{kind.__name__}" in text for text in rust)
    ]
    assert not idle, idle


def test_every_error_has_a_test() -> None:
    texts = [path.read_text() for path in files(".py", below="tests") if "tidy" not in path.parts]
    untested = [
        kind.__name__
        for kind in CLASSES
        if kind.__name__ not in WHO_ACTS
        and not any(re.search(rf"\b{kind.__name__}\b", text) for text in texts)
    ]
    assert not untested, untested


def test_users_see_only_errors_of_the_tree() -> None:
    builtin = {"Exception", "RuntimeError", "BaseException", "IOError", "OSError"}
    wrong = []
    for path in files(".py", below="src"):
        for node in python_nodes(path, ast.Raise):
            if isinstance(node.exc, ast.Call):
                raised = node.exc.func
                if isinstance(raised, ast.Name) and raised.id in builtin:
                    wrong.append(f"{name_of(path)}:{node.lineno}: {raised.id}")
    assert not wrong, wrong


def test_no_error_is_swallowed() -> None:
    wrong = []
    for path in files(".py", below="src"):
        for node in python_nodes(path, ast.ExceptHandler):
            catches_all = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if catches_all and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                wrong.append(f"{name_of(path)}:{node.lineno}")
    assert not wrong, wrong


def in_order(kind: type[errors.PenstockError]) -> list[type[errors.PenstockError]]:
    """Return a class and its subclasses in file order."""
    return [kind, *(below for child in kind.__subclasses__() for below in in_order(child))]
