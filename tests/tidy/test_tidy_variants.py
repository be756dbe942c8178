# SPDX-License-Identifier: Apache-2.0
"""Each variant is one file that is discovered by name; a missing registration or interface is an error."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from bench.__main__ import case_names
from bench.peers import peer
from penstock.cli.app import make_app
from tests.tidy.tree import ROOT, files, name_of, rust_code, rust_symbols

CLI = ROOT / "src/penstock/cli"


def test_every_rust_file_belongs_to_its_crate() -> None:
    roots = {ROOT / "native/kernel/src/lib.rs", ROOT / "native/bridge/src/lib.rs"}
    dead = [
        name_of(path) for path in files(".rs", below="native") if path not in roots and not is_declared(path)
    ]
    assert not dead, dead


def test_every_verb_is_a_file_with_a_run_function() -> None:
    verbs = {path.stem for path in CLI.glob("*.py")} - {"__init__", "app"}
    commands = get_command(make_app()).commands  # type: ignore[attr-defined]
    assert {name.replace("-", "_") for name in commands} == verbs
    for verb in sorted(verbs):
        module = import_module(f"penstock.cli.{verb}")
        runs = module.VERBS.values() if hasattr(module, "VERBS") else [module.run]
        assert all(inspect.getdoc(run) for run in runs), verb


def test_every_listed_command_exists() -> None:
    groups = {
        name: set(command.commands)
        for name, command in get_command(make_app()).commands.items()  # type: ignore[attr-defined]
        if hasattr(command, "commands")
    }
    named = re.compile(rf"\bpenstock ({'|'.join(groups)}) ([a-z]+(?:-[a-z]+)*)")
    missing = [
        f"{name_of(path)}: {match[0]}"
        for path in files(".py", ".rs", ".md")
        for match in named.finditer(path.read_text())
        if match[2] not in groups[match[1]]
    ]
    assert not missing, missing


@pytest.mark.parametrize("name", case_names())
def test_every_benchmark_case_has_a_title_and_runs(name: str) -> None:
    case = import_module(f"bench.cases.{name}")
    assert case.TITLE
    assert list(inspect.signature(case.run).parameters) == ["options"]


@pytest.mark.parametrize("name", peer.names())
def test_every_peer_has_a_title_a_version_and_a_verb(name: str) -> None:
    module = peer.peer(name)
    assert module.TITLE
    assert callable(module.version)
    assert any(hasattr(module, verb) for verb in peer.VERBS)


def is_declared(path: Path) -> bool:
    """Return whether the parent module declares a Rust file."""
    if "tests" in path.parts or "benches" in path.parts or "fuzz" in path.parts:
        return True
    inside = path.name == "mod.rs"
    folder, module = (path.parent.parent, path.parent.name) if inside else (path.parent, path.stem)
    above = [folder / "mod.rs", folder / "lib.rs", folder.with_suffix(".rs")]
    return any(path.exists() and declares(path, module) for path in above)


def declares(above: Path, module: str) -> bool:
    """Return whether a Rust file has a line `mod module;`."""
    return module in rust_symbols(above) and bool(re.search(rf"\bmod\s+{module}\b", rust_code(above)))
