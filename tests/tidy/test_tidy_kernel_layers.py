# SPDX-License-Identifier: Apache-2.0
"""The kernel's modules form layers, its files import each other without circles, and matches over types are
exhaustive.
"""

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT, files, name_of, rust_code

KERNEL = ROOT / "native/kernel/src"

# The layers from the bottom to the top. A module imports only modules of lower layers, and none of the same
# layer.
LAYERS = (
    {"error", "limits", "checksum"},
    {"cursor", "gtid", "charset", "shard"},
    {"column"},
    {"event"},
    {"frame", "write"},
    {"emit"},
    {"stream", "blocks", "objects", "resultset", "slots", "sql", "partition", "row_hash", "bson", "tidb"},
    {"grpc"},
)

Module = tuple[str, ...]
Graph = dict[Module, set[Module]]


def test_every_module_of_the_kernel_has_a_layer() -> None:
    modules = {module[0] for module in modules_below(KERNEL) if module}
    assert modules == set().union(*LAYERS)


def test_modules_of_the_kernel_import_lower_layers_only() -> None:
    assert not upward_imports(imports_below(KERNEL))


def test_files_of_the_kernel_import_each_other_in_no_circle() -> None:
    assert not circle(imports_below(KERNEL))


def test_dialects_import_nothing_of_each_other() -> None:
    folder = KERNEL / "emit/dialect"
    dialects = {("emit", "dialect", path.name) for path in folder.iterdir() if path.is_dir()}
    assert len(dialects) == 5
    wrong = [
        f"{'::'.join(module)} imports {'::'.join(target)}"
        for module, targets in imports_below(KERNEL).items()
        for target in targets
        if {module[:3], target[:3]} <= dialects and module[:3] != target[:3]
    ]
    assert not wrong, wrong


def test_matches_over_column_types_have_no_catch_all_arm() -> None:
    # This file matches pairs of a type and an Arrow column, and its catch-all arms are errors for the
    # remaining pairs.
    pairs = KERNEL / "column/sent.rs"
    wrong = [
        f"{name_of(path)}: {arm}"
        for folder in ("column", "emit")
        for path in files(".rs", below=f"native/kernel/src/{folder}")
        if path != pairs
        for arm in catch_all_arms(without_tests(path))
    ]
    assert not wrong, wrong


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    write_modules(tmp_path, {"column/mod.rs": "use crate::emit::Batch;", "emit/mod.rs": "pub struct Batch;"})
    assert upward_imports(imports_below(tmp_path)) == ["column imports emit"]


def test_a_circle_is_found_through_names_handed_on(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        {
            "column/mod.rs": "mod kind;\nmod value;\npub use kind::Kind;\npub use value::{Value as Cell};",
            "column/kind.rs": "use super::Cell;\npub struct Kind;",
            "column/value.rs": "//! use super::kind;\npub struct Value(crate::column::Kind);",
        },
    )
    assert set(circle(imports_below(tmp_path))) == {"column::kind", "column::value"}


@pytest.mark.parametrize(
    ("arms", "found"),
    [
        ("Kind::Year => 1, _ => 2", ["_"]),
        ("(Typed::Date(_), true) => { 1 } (Typed::Year(_), _) if odd => 2, (_, _) => 3", ["(_, _)"]),
        ("Kind::Year => match code { 1 => 2, _ => 3 }, other => 4", ["other"]),
        ("Kind::Year => 1, kind @ (Kind::Date | Kind::Null) => 2", []),
        ("MessageKind::Insert => 1, _ => 2", []),
    ],
)
def test_a_catch_all_arm_is_found(arms: str, found: list[str]) -> None:
    assert list(catch_all_arms(f"fn f() {{ match kind {{ {arms} }} }}")) == found


# --- Imports --------------------------------------------------------------------------------


def upward_imports(graph: Graph) -> list[str]:
    """Return the imports between top modules that do not point to a lower layer."""
    layer = {module: number for number, modules in enumerate(LAYERS) for module in modules}
    pairs = {(module[0], target[0]) for module, targets in graph.items() for target in targets}
    return [
        f"{module} imports {target}"
        for module, target in sorted(pairs)
        if module != target and layer[module] <= layer[target]
    ]


def circle(graph: Graph) -> list[str]:
    """Return the files of one import cycle, or nothing if there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["::".join(module) for module in error.args[1]]
    return []


def modules_below(folder: Path) -> dict[Module, Path]:
    """Return the file of each module of a crate except its tests; the path of the crate itself is empty."""
    modules = {}
    for path in sorted(folder.rglob("*.rs")):
        names = path.relative_to(folder).with_suffix("").parts
        if names[-1] != "tests":
            modules[names[:-1] if names[-1] in ("mod", "lib") else names] = path
    return modules


def imports_below(folder: Path) -> Graph:
    """Return the imports between files of a crate; a re-exported name counts where it is defined."""
    crate = Crate(modules_below(folder))
    return {module: set(crate.imports(module)) for module in crate.modules if module}


class Crate:
    """The modules of a crate, and the names that they re-export."""

    def __init__(self, modules: dict[Module, Path]) -> None:
        self.modules = modules
        self.code = {module: without_tests(path) for module, path in modules.items()}
        self.handed_on = {module: dict(self._handed_on(module)) for module in modules}

    def imports(self, module: Module) -> Iterator[Module]:
        """Yield the other modules that a module names."""
        paths = [path for path, _ in uses(self.code[module])]
        places = {name: self._resolved(path, module) for path, name in uses(self.code[module])}
        body = re.sub(r"\buse\s[^;]+;", "", self.code[module])
        for path in re.findall(r"(?<![\w:])\w+(?:::\w+)+", body):
            first, _, rest = path.partition("::")
            place = places.get(first)
            paths.append(f"crate::{'::'.join(place)}::{rest}" if place in self.modules else path)
        for path in paths:
            place = self._resolved(path, module)
            owner = place and next(
                (place[:end] for end in range(len(place), 0, -1) if place[:end] in self.modules), None
            )
            if owner and owner != module:
                yield owner

    def _handed_on(self, module: Module) -> Iterator[tuple[str, Module]]:
        public = re.findall(r"\bpub(?:\([^)]*\))?\s+(use\s[^;]+;)", self.code[module])
        for path, name in uses("\n".join(public)):
            place = self._absolute(path, module)
            if place is not None:
                yield name, place

    def _absolute(self, path: str, module: Module) -> Module | None:
        """Return a path from the crate's root, or None if it is outside the crate."""
        names = path.split("::")
        if names[0] == "crate":
            return tuple(names[1:])
        if names[0] == "self":
            return (*module, *names[1:])
        if names[0] == "super":
            ups = next((number for number, name in enumerate(names) if name != "super"), len(names))
            return (*module[: len(module) - ups], *names[ups:])
        return (*module, *names) if (*module, names[0]) in self.modules else None

    def _resolved(self, path: str, module: Module) -> Module | None:
        """Return the target of a path, through the modules that re-export it."""
        place = self._absolute(path, module)
        for _ in range(8):
            if place is None:
                break
            end = next((end for end in range(len(place), -1, -1) if place[:end] in self.modules), 0)
            if place[end : end + 1] == () or place[end] not in self.handed_on.get(place[:end], {}):
                break
            place = (*self.handed_on[place[:end]][place[end]], *place[end + 1 :])
        return place


def uses(code: str) -> Iterator[tuple[str, str]]:
    """Yield each path that `use` names, and its local name."""
    for tree in re.findall(r"\buse\s+([^;]+);", code):
        for path in _paths_of(re.sub(r"\s+", " ", tree).strip()):
            path, _, alias = path.partition(" as ")
            path = path.removesuffix("::self")
            yield path, alias or path.rsplit("::", 1)[-1]


def _paths_of(tree: str) -> Iterator[str]:
    head, brace, rest = tree.partition("{")
    if not brace:
        yield tree.strip()
        return
    depth, part = 0, ""
    for letter in rest.rpartition("}")[0] + ",":
        if letter == "," and depth == 0:
            if part.strip():
                yield from _paths_of(head + part.strip())
            part = ""
            continue
        depth += (letter == "{") - (letter == "}")
        part += letter


def without_tests(path: Path) -> str:
    """Return a file's code without its test module, which is last."""
    return re.split(r"#\[cfg\(test\)\]\s*mod\s+\w+\s*\{", rust_code(path))[0]


def write_modules(folder: Path, modules: dict[str, str]) -> None:
    """Write the files of a crate."""
    for name, code in modules.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)


# --- Matches --------------------------------------------------------------------------------

_TYPE = re.compile(r"(?<!\w)(?:Kind|Typed)::\w")
_CATCH_ALL = re.compile(r"(?:[a-z_]\w*|\((?:\s*(?:[a-z_]\w*)\s*,?)+\))$")


def catch_all_arms(code: str) -> Iterator[str]:
    """Yield the catch-all patterns of matches that name column types."""
    for match in re.finditer(r"\bmatch\b[^{};]*\{", code):
        patterns = list(_patterns(code, match.end()))
        if any(_TYPE.search(pattern) for pattern in patterns):
            yield from (pattern for pattern in patterns if _CATCH_ALL.fullmatch(pattern))


def _patterns(code: str, at: int) -> Iterator[str]:
    """Yield the patterns of the arms of a match, whose body starts at `at`."""
    depth, pattern, in_pattern = 0, "", True
    while at < len(code):
        letter = code[at]
        if depth == 0 and letter == "}":
            return
        if in_pattern and depth == 0 and code.startswith("=>", at):
            yield pattern.strip()
            pattern, in_pattern = "", False
            at += 2
            continue
        depth += (letter in "([{") - (letter in ")]}")
        if in_pattern:
            pattern += letter
        elif depth == 0 and letter in ",}":
            in_pattern = True
            at += code.startswith(",", at + 1)
        at += 1
