# SPDX-License-Identifier: Apache-2.0
"""Locates the assertions of the tests, and determines whether every run of a test reaches them.

Calls are resolved within `tests`. A plain name resolves to the local or imported function with that name, and
a method call resolves to every method with that name. If a call cannot be resolved, the module assumes that
there is no defect, so a rule built on it reports only certain defects.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import ROOT, Function, files, python_functions, python_nodes, python_tree

TESTS = ROOT / "tests"
# The guard of a loop over a computed collection.
GUARD = "each"

_RAISING = {"raises", "warns", "fail", "deprecated_call"}
_CHECKING_PREFIXES = ("assert_", "check_", "expect")
# Waiting for a state is a step of a test, not its check.
_WAITING_PREFIXES = ("wait_", "until_", "caught_up")
# The result of these calls is as long as their arguments.
_KEEPS_LENGTH = {
    *("enumerate", "reversed", "sorted", "list", "tuple", "set", "frozenset", "dict", "iter", "zip", "map"),
    *("product", "chain", "permutations", "combinations", "pairwise", "cycle", "repeat", "count", "deepcopy"),
}
_KEEPS_LENGTH_AS_METHOD = {"items", "values", "keys", "split", "splitlines", "copy", "encode"}

_Scope = dict[str, ast.expr]
_COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions_of_tests() -> Iterator[tuple[Path, Function]]:
    """Yield every test function."""
    for path in files(".py", below="tests"):
        if path.name.startswith("test_"):
            yield from ((path, node) for node in python_functions(path) if node.name.startswith("test_"))


def checks_something(path: Path, function: Function) -> bool:
    """Return whether a test checks anything, directly or in functions that it calls."""
    return _checks(path, function, frozenset())


def checks_only_in_loops(path: Path, function: Function) -> bool:
    """Return whether every check of a test is inside a loop over a computed collection.

    Such a test passes without a check if the collection is empty. A loop over `each(...)` fails if it is
    empty, so its checks count as reached. So do the checks in loops over literals and parameters.
    """
    places = list(_check_places(path, function))
    return bool(places) and not any(is_reached for is_reached in places)


def always_holds(condition: ast.expr) -> bool:
    """Return whether a condition always holds, for any behaviour of the program."""
    match condition:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return any(not isinstance(element, ast.Starred) for element in items)
        case ast.GeneratorExp() | ast.Lambda():
            return True
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(map(always_holds, values))
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is() | ast.LtE() | ast.GtE()], comparators=[right]):
            calls = any(isinstance(node, (ast.Call, ast.Await)) for node in ast.walk(left))
            return not calls and ast.dump(left) == ast.dump(right)
    return False


def swallows_assertions(node: ast.AST) -> bool:
    """Return whether a handler or a `suppress` drops a failed assertion instead of propagating it."""
    match node:
        case ast.ExceptHandler(type=kind, name=name, body=body):
            inside = [inner for statement in body for inner in ast.walk(statement)]
            handed_on = any(isinstance(inner, ast.Name) and inner.id == name for inner in inside)
            raises = any(isinstance(inner, ast.Raise) for inner in inside)
            return _catches_assertions(kind) and not handed_on and not raises
        case ast.Call(args=kinds) if _name_called(node) == "suppress":
            return any(map(_catches_assertions, kinds))
    return False


def _catches_assertions(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(
        kind is None
        or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException", "AssertionError"))
        for kind in kinds
    )


# --- Checks ---------------------------------------------------------------------------------


# The functions that are known to check something.
_checking: set[tuple[Path, Function]] = set()


def _checks(path: Path, function: Function, seen: frozenset[tuple[Path, str]]) -> bool:
    key = path, function.name
    if key in seen:
        return False
    if (path, function) in _checking or _checks_unknown(path, function, seen | {key}):
        _checking.add((path, function))
        return True
    return False


def _checks_unknown(path: Path, function: Function, seen: frozenset[tuple[Path, str]]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Call):
            name = _name_called(node)
            if name in _RAISING or name.startswith(_CHECKING_PREFIXES):
                return True
        # A function that is passed as an argument is called by its receiver.
        if isinstance(node, (ast.Name, ast.Attribute)):
            for home, target in _targets(path, node):
                if _checks(home, target, seen):
                    return True
    return False


@functools.cache
def _is_checker(path: Path, function: Function) -> bool:
    """Return whether a function returns nothing and has an assertion, and does not just wait."""
    returns = function.returns
    returns_nothing = isinstance(returns, ast.Constant) and returns.value is None
    if not returns_nothing or function.name.startswith(_WAITING_PREFIXES):
        return False
    return any(isinstance(node, ast.Assert) for node in ast.walk(function))


def _check_places(path: Path, function: Function) -> Iterator[bool]:
    """Yield for each check of a function whether it is reached even if collections are empty."""
    scope = _literals_of(path) | _assigned(function.body)
    bound = _parameters(function)
    nested = {
        node.name: node
        for node in ast.walk(function)
        if isinstance(node, _FUNCTIONS) and node is not function
    }
    yield from _Walk(path, scope, bound, nested).places(function.body, True)


class _Walk:
    """Visits a test's statements and tracks which loops are certain to run."""

    def __init__(self, path: Path, scope: _Scope, bound: set[str], nested: dict[str, Function]) -> None:
        self._path = path
        self._scope = scope
        self._bound = bound
        self._nested = nested

    def places(self, body: list[ast.stmt], is_reached: bool) -> Iterator[bool]:
        for statement in body:
            yield from self._statement(statement, is_reached)

    def _statement(self, statement: ast.stmt, is_reached: bool) -> Iterator[bool]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return
            case ast.Assert(test=condition):
                yield is_reached and not self._is_vacuous(condition)
                yield from self._calls(statement, is_reached)
            case ast.For(iter=collection, target=target, body=body, orelse=orelse):
                yield from self._calls(collection, is_reached)
                runs = self.is_never_empty(collection)
                if runs:
                    self._bound |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
                yield from self.places(body, is_reached and runs)
                yield from self.places(orelse, is_reached)
            case ast.Expr(value=ast.Call(func=ast.Name() as name)):
                yield from self._calls(statement, is_reached)
                if any(_is_checker(home, target) for home, target in _targets(self._path, name)):
                    yield is_reached
            case _:
                yield from self._compound(statement, is_reached)

    def _compound(self, statement: ast.stmt, is_reached: bool) -> Iterator[bool]:
        for _, value in ast.iter_fields(statement):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.stmt):
                    yield from self._statement(part, is_reached)
                elif isinstance(part, (ast.ExceptHandler, ast.match_case)):
                    yield from self.places(part.body, is_reached)
                elif isinstance(part, ast.AST):
                    yield from self._calls(part, is_reached)

    def _calls(self, part: ast.AST, is_reached: bool) -> Iterator[bool]:
        """Yield the checks among the calls of an expression; a call in a comprehension counts only if its
        collection is never empty.
        """
        for node, runs in self._reached_nodes(part):
            if isinstance(node, ast.Call) and self._is_check(node):
                yield is_reached and runs
            elif isinstance(node, ast.Name) and node.id in self._nested:
                inner = self._nested.pop(node.id)
                yield from self.places(inner.body, is_reached and runs)

    def _reached_nodes(self, part: ast.AST, runs: bool = True) -> Iterator[tuple[ast.AST, bool]]:
        yield part, runs
        if isinstance(part, _COMPREHENSIONS):
            runs = runs and all(
                self.is_never_empty(generator.iter) and not generator.ifs for generator in part.generators
            )
        for child in ast.iter_child_nodes(part):
            yield from self._reached_nodes(child, runs)

    def _is_check(self, call: ast.Call) -> bool:
        name = _name_called(call)
        return name in _RAISING or name.startswith(_CHECKING_PREFIXES)

    def _is_vacuous(self, condition: ast.expr) -> bool:
        """Return whether a condition holds for an empty computed collection."""
        match condition:
            case ast.Call(func=ast.Name(id="all"), args=[comprehension]):
                return self._may_be_empty(comprehension)
            case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Name(id="any"), args=[comprehension])):
                return self._may_be_empty(comprehension)
            case ast.BoolOp(op=ast.And(), values=values):
                return all(self._is_vacuous(value) for value in values)
        return False

    def _may_be_empty(self, comprehension: ast.expr) -> bool:
        if isinstance(comprehension, _COMPREHENSIONS):
            return not all(self.is_never_empty(generator.iter) for generator in comprehension.generators)
        return not self.is_never_empty(comprehension)

    # --- Collections ------------------------------------------------------------------------

    def is_never_empty(self, collection: ast.expr) -> bool:
        """Return whether a collection is a literal in the test, or is guarded by `each`."""
        match collection:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return any(
                    not isinstance(element, ast.Starred) or self.is_never_empty(element.value)
                    for element in items
                )
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return any(key is not None or self.is_never_empty(value) for key, value in pairs)
            case ast.Constant(value=value):
                return bool(value)
            case ast.JoinedStr():
                return True
            case ast.Name(id=name):
                return self._is_name_never_empty(name)
            case ast.Attribute(attr=name):
                return name.isupper()
            case ast.BinOp(left=left, right=right):
                return self.is_never_empty(left) or self.is_never_empty(right)
            case ast.IfExp(body=one, orelse=other):
                return self.is_never_empty(one) and self.is_never_empty(other)
            case ast.Subscript(value=inner):
                return self.is_never_empty(inner)
            case ast.Call():
                return self._is_call_never_empty(collection)
        if isinstance(collection, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            return all(
                self.is_never_empty(generator.iter) and not generator.ifs
                for generator in collection.generators
            )
        return False

    def _is_name_never_empty(self, name: str) -> bool:
        if name in self._bound or name in _classes_of(self._path):
            return True
        value = self._scope.get(name)
        if value is not None:
            without = {key: other for key, other in self._scope.items() if key != name}
            return _Walk(self._path, without, self._bound, {}).is_never_empty(value)
        # A name in capitals that is imported is a constant of the product.
        return name.isupper() and name in _imported(self._path)

    def _is_call_never_empty(self, call: ast.Call) -> bool:
        name = _name_called(call)
        if name == GUARD:
            return True
        if name == "range":
            return all(self._is_known_number(argument) for argument in call.args)
        if isinstance(call.func, ast.Attribute) and name in _KEEPS_LENGTH_AS_METHOD:
            return self.is_never_empty(call.func.value)
        if name in _KEEPS_LENGTH:
            collections = call.args[1:] if name == "map" else call.args
            if any(keyword.arg == "strict" for keyword in call.keywords):
                return any(self.is_never_empty(argument) for argument in collections)
            return all(self.is_never_empty(argument) for argument in collections)
        return False

    def _is_known_number(self, number: ast.expr) -> bool:
        match number:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name.isupper() or name in self._bound or self._is_known_number_of(name)
            case ast.BinOp(left=left, right=right):
                return self._is_known_number(left) and self._is_known_number(right)
            case ast.UnaryOp(operand=operand):
                return self._is_known_number(operand)
            case ast.IfExp(body=one, orelse=other):
                return self._is_known_number(one) and self._is_known_number(other)
            case ast.Call(func=ast.Name(id="len"), args=[collection]):
                return self.is_never_empty(collection)
        return False

    def _is_known_number_of(self, name: str) -> bool:
        value = self._scope.get(name)
        if value is None:
            return False
        without = {key: other for key, other in self._scope.items() if key != name}
        return _Walk(self._path, without, self._bound, {})._is_known_number(value)


# --- Names ----------------------------------------------------------------------------------


def _name_called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _parameters(function: Function) -> set[str]:
    """Return the parameters that `parametrize` and `given` pass to a test."""
    names: set[str] = set()
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and _name_called(decorator) == "parametrize" and decorator.args:
            match decorator.args[0]:
                case ast.Constant(value=str(text)):
                    names |= {name.strip() for name in text.split(",")}
                case ast.Tuple(elts=items) | ast.List(elts=items):
                    names |= {str(element.value) for element in items if isinstance(element, ast.Constant)}
        if isinstance(decorator, ast.Call) and _name_called(decorator) == "given":
            # The strategies of `given` choose the sizes of collections.
            names |= {argument.arg for argument in function.args.args}
    return names


def _assigned(body: list[ast.stmt]) -> _Scope:
    """Return the values of names that these statements assign exactly once."""
    values: _Scope = {}
    changed: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name() as value):
                    # A name unpacked from a parameter counts as a parameter.
                    values |= {part.id: value for part in names if isinstance(part, ast.Name)}
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if name in values:
                        changed.add(name)
                    values[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    if name in values:
                        changed.add(name)
                    values[name] = value
    return {name: value for name, value in values.items() if name not in changed}


@functools.cache
def _literals_of(path: Path) -> _Scope:
    """Return the literal values of a module's names, including those imported from `tests`."""
    scope = _assigned(
        [node for node in python_tree(path).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    )
    for name, (home, original) in _imported(path).items():
        if home is not None and home != path:
            value = _literals_of(home).get(original)
            if value is not None:
                scope.setdefault(name, value)
    return scope


@functools.cache
def _imported(path: Path) -> dict[str, tuple[Path | None, str]]:
    """Return the imported names: the file in `tests` that defines each, and its name there."""
    names: dict[str, tuple[Path | None, str]] = {}
    for node in python_nodes(path, ast.ImportFrom):
        home = ROOT / f"{(node.module or '').replace('.', '/')}.py"
        is_ours = home.is_relative_to(TESTS) and home.exists()
        for alias in node.names:
            names[alias.asname or alias.name] = (home if is_ours else None, alias.name)
    return names


@functools.cache
def _classes_of(path: Path) -> frozenset[str]:
    """Return the names of classes, including enums: loops over a class iterate over its members."""
    own = {node.name for node in python_tree(path).body if isinstance(node, ast.ClassDef)}
    return frozenset(own | {name for name in _imported(path) if name[:1].isupper() and not name.isupper()})


@functools.cache
def _functions_of(path: Path) -> dict[str, Function]:
    return {node.name: node for node in python_tree(path).body if isinstance(node, _FUNCTIONS)}


@functools.cache
def _methods() -> dict[str, list[tuple[Path, Function]]]:
    """Return the methods of all classes in `tests`, by name."""
    methods: dict[str, list[tuple[Path, Function]]] = {}
    for path in files(".py", below="tests"):
        for node in python_nodes(path, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, _FUNCTIONS):
                    methods.setdefault(inner.name, []).append((path, inner))
    return methods


def _targets(path: Path, name: ast.Name | ast.Attribute) -> list[tuple[Path, Function]]:
    """Return the functions that a name may refer to."""
    if isinstance(name, ast.Attribute):
        return _methods().get(name.attr, [])
    function = _functions_of(path).get(name.id)
    if function is not None:
        return [(path, function)]
    home, original = _imported(path).get(name.id, (None, ""))
    if home is None:
        return _methods().get("__init__", []) if name.id in _classes_of(path) else []
    function = _functions_of(home).get(original)
    return [] if function is None else [(home, function)]
