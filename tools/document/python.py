# SPDX-License-Identifier: Apache-2.0
"""The page of the Python interface: signatures and docstrings of everything public."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

from tools.document.markdown import document

_HEAD = (
    "The names that `import *` of these modules brings, and those that publish metrics. Errors have"
    " [a page of their own](errors.md).\nOther names may change with any version."
)
# The public names of a module: its `__all__`, or those listed here.
_MODULES: dict[str, tuple[str, ...] | None] = {
    "penstock": None,
    "penstock.client": None,
    "penstock.spark": None,
    "penstock.telemetry.pipelines": ("PipelineMeter",),
    "penstock.telemetry.publish": ("publish_metrics",),
}


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for name, listed in _MODULES.items():
        module = import_module(name)
        parts.append(f"## {name}")
        for public in sorted(listed or module.__all__):
            parts += _described(public, getattr(module, public))
    return document("The Python interface", "src/penstock", *parts)


def _described(name: str, value: Any) -> Iterator[str]:
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    if is_error or not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    yield f"### {name}"
    yield f"`{name}{_signature(value)}`"
    yield _docstring(value)
    if inspect.isclass(value):
        yield from _members(value)


def _members(owner: type) -> Iterator[str]:
    """Yield the public methods and properties that a class defines or inherits from a class of Penstock."""
    for name, member in inspect.getmembers(owner):
        method = _function_of(inspect.getattr_static(owner, name))
        if name.startswith("_") or method is None or not method.__module__.startswith("penstock."):
            continue
        is_property = isinstance(inspect.getattr_static(owner, name), property)
        yield f"**`{owner.__name__}.{name}{'' if is_property else _signature(method)}`**"
        yield _docstring(member if inspect.isfunction(member) else method)


def _function_of(attribute: Any) -> Callable[..., Any] | None:
    if isinstance(attribute, property):
        return attribute.fget
    function = getattr(attribute, "__func__", attribute)
    return function if inspect.isfunction(function) else None


def _signature(value: Any) -> str:
    """Return the parameters as written in the source, so that they are the same under every version of
    Python.
    """
    if inspect.isclass(value) and not is_dataclass(value):
        ours = [owner for owner in value.__mro__ if owner.__module__.startswith("penstock.")]
        value = next((owner for owner in ours if "__init__" in vars(owner)), value)
    node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    if isinstance(node, ast.ClassDef):
        inits = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not inits:
            return _fields(node)
        arguments, returns = inits[0].args, None
    else:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), "the rest has no parameters"
        arguments, returns = node.args, node.returns
    for group in (arguments.posonlyargs, arguments.args):
        if group and group[0].arg in ("self", "cls"):
            del group[0]
    text = f"({ast.unparse(arguments)})"
    return text if returns is None else f"{text} -> {ast.unparse(returns).strip(chr(39))}"


def _fields(node: ast.ClassDef) -> str:
    """Return the fields of a dataclass as the parameters of its call."""
    fields = [
        ast.unparse(part).replace(" = ", "=")
        for part in node.body
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_")
    ]
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    return f"({', '.join(fields)})" if is_dataclass else ""


def _docstring(value: Any) -> str:
    return inspect.getdoc(value) or ""
