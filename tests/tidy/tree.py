# SPDX-License-Identifier: Apache-2.0
"""The project's own files and their definitions, for the tests in this folder."""

import ast
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

ROOT = Path(__file__).resolve().parents[2]

# Generated or downloaded files, to which no rule applies.
_NOT_OURS = {"target", "build", "dist", "spark-warehouse", "metastore_db", "derby.log", "__pycache__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Node = TypeVar("_Node", bound=ast.AST)


class RustFunction(NamedTuple):
    """A function in a Rust file, with the numbers of its first and last line."""

    name: str
    first: int
    last: int


def files(*suffixes: str, below: str = "") -> list[Path]:
    """Return the project's files with these suffixes, sorted; without suffixes all."""
    return sorted(path for path in _files_below(ROOT / below) if not suffixes or path.suffix in suffixes)


def name_of(path: Path) -> str:
    """Return a path relative to the repository."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def python_tree(path: Path) -> ast.Module:
    """Return a Python file's syntax tree."""
    return ast.parse(path.read_text(), str(path))


def python_nodes(path: Path, kind: type[_Node]) -> list[_Node]:
    """Return the nodes of one type in a Python file."""
    return cast("list[_Node]", _nodes_by_type(path).get(kind, []))


def python_functions(path: Path) -> list[Function]:
    """Return every function of a Python file, including nested functions."""
    return [*python_nodes(path, ast.FunctionDef), *python_nodes(path, ast.AsyncFunctionDef)]


@functools.cache
def python_symbols(path: Path) -> frozenset[str]:
    """Return the definitions of a Python file: `name`, and `Class.name` for members."""
    return frozenset(_symbols_of(python_tree(path).body, ""))


@functools.cache
def rust_code(path: Path) -> str:
    """Return a Rust file with comments and literals blanked out; line breaks are kept."""
    return _RUST_OPAQUE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), path.read_text())


@functools.cache
def rust_functions(path: Path) -> tuple[RustFunction, ...]:
    """Return every function of a Rust file that has a body."""
    code = rust_code(path)
    functions = []
    for match in re.finditer(r"\bfn\s+(\w+)", code):
        end = _end_of_body(code, match.end())
        if end is not None:
            first = code.count("\n", 0, match.start()) + 1
            functions.append(RustFunction(match[1], first, code.count("\n", 0, end) + 1))
    return tuple(functions)


@functools.cache
def rust_symbols(path: Path) -> frozenset[str]:
    """Return the names that a Rust file defines, including fields and variants."""
    code = rust_code(path)
    items = r"\b(?:fn|struct|enum|trait|const|static|mod|type|union)\s+(\w+)|macro_rules!\s*(\w+)"
    names = {first or second for first, second in re.findall(items, code)}
    return frozenset(names | set(re.findall(r"^\s+(?:pub\S*\s+)?(\w+)\s*[:,({]", code, re.MULTILINE)))


_RUST_OPAQUE = re.compile(
    r"""//[^\n]*
      | /\*.*?\*/
      | b?r(?P<hashes>\#*)".*?"(?P=hashes)
      | b?"(?:\\.|[^"\\])*"
      | b?'(?:\\[^\n]|[^'\\\n])[^'\n]{0,8}?'(?!\w)
    """,
    re.VERBOSE | re.DOTALL,
)


@functools.cache
def _nodes_by_type(path: Path) -> dict[type[ast.AST], list[ast.AST]]:
    """Return every node of a Python file. Rules ask for few types, and walking all trees takes seconds."""
    nodes: dict[type[ast.AST], list[ast.AST]] = {}
    for node in ast.walk(python_tree(path)):
        nodes.setdefault(type(node), []).append(node)
    # Freeze the nodes, because the garbage collector would otherwise walk millions of them repeatedly.
    gc.freeze()
    return nodes


@functools.cache
def _files_below(folder: Path) -> tuple[Path, ...]:
    return tuple(_walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in _NOT_OURS or (path.name.startswith(".") and path.name not in (".ci", ".gitignore")):
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.suffix not in (".so", ".pyc"):
            yield path


def _symbols_of(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from _symbols_of(node.body, f"{prefix}{name}.")
            case ast.Assign(targets=targets):
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
            case ast.If(body=inner) | ast.Try(body=inner):
                yield from _symbols_of(inner, prefix)


def _end_of_body(code: str, start: int) -> int | None:
    """Return the end of a function's braces; None for a declaration without a body."""
    depth = 0
    round_depth = 0
    for index in range(start, len(code)):
        match code[index]:
            case "(" | "[":
                round_depth += 1
            case ")" | "]":
                round_depth -= 1
            case ";" if depth == 0 and round_depth == 0:
                return None
            case "{" if round_depth == 0 or depth:
                depth += 1
            case "}" if depth:
                depth -= 1
                if depth == 0:
                    return index
    raise AssertionError("a function's braces do not close")
