# SPDX-License-Identifier: Apache-2.0
"""A sink, a step, a coordination store and a verb are each one file or folder, and no other file names
them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from penstock import cli, sinks
from penstock.cli.app import make_app
from penstock.coordinate import backends
from penstock.coordinate.store import open_store
from penstock.pipeline import steps
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.settings.daemon import load_settings
from penstock.sinks.sink import BatchMark
from tests.support.pipeline.changes_made import changes_of, insert
from tests.support.pipeline.steps_run import ORDERS, rows, run

AddFiles = Callable[[ModuleType, Mapping[str, str]], None]

SINK = """
from collections.abc import Sequence

from penstock.changes import Changes, Target
from penstock.settings.values import Section
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Receipt, Sink, Spread, Writer

EXTRA = "toy"
ROWS: list[int] = []


class Settings(Section):
    times: int = 1


def make(settings: Settings) -> Sink:
    return ToySink(settings.times)


class ToySink(Sink):
    kind = "toy"
    delivery = Delivery.AT_LEAST_ONCE
    spread = Spread.WHOLE
    keeps_state = False

    def __init__(self, times: int) -> None:
        self.times = times

    def check(self) -> Sequence[Finding]:
        return ()

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        return ()

    def prepare(self, target: Target, evolution: Evolution) -> None:
        return

    def open(self, mark: BatchMark, part: int) -> Writer:
        return ToyWriter(self.times)


class ToyWriter(Writer):
    def __init__(self, times: int) -> None:
        self.times = times

    def write(self, changes: Changes) -> None:
        ROWS.extend(changes.rows.column("id").to_pylist() * self.times)

    def finish(self) -> Receipt:
        return Receipt(rows=len(ROWS), bytes=0, tables={})
"""

STEP = """
from typing import ClassVar

from penstock.changes import Changes, Target
from penstock.pipeline.step import Step
from penstock.pipeline.step_section import StepSection


class Settings(StepSection):
    SHORTHAND: ClassVar[str] = "first"
    first: int


def make(settings: Settings) -> Step:
    return FirstStep(settings)


class FirstStep(Step):
    verb = "toy"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def target(self, target: Target) -> Target:
        return target

    def apply(self, changes: Changes) -> list[Changes]:
        return [changes.with_rows(changes.rows.slice(0, self.settings.first))]
"""

STORE = """
from penstock.coordinate.backends.memory import MemoryStore


def open_url(url: str, seconds: float) -> MemoryStore:
    return MemoryStore(url.removeprefix("toy://"))
"""

VERB = '''
import typer


def run(name: str) -> None:
    """Play with a toy."""
    typer.echo(f"playing with {name}")
'''


@pytest.fixture
def add_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddFiles]:
    """Return a function that adds source files, by name, to a package of Penstock until the test ends."""
    packages: list[str] = []

    def add(package: ModuleType, files: Mapping[str, str]) -> None:
        folder = tmp_path / package.__name__
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        packages.append(package.__name__)

    yield add
    for name in list(sys.modules):
        if name.startswith(tuple(f"{package}.toy" for package in packages)):
            del sys.modules[name]


def pipeline_of(folder: Path, text: str) -> PipelineSettings:
    path = folder / "shop.yaml"
    path.write_text("source: {url: 'mysql://repl@db1:3306'}\n" + text)
    return load_pipeline(path, {})


def test_sink_is_one_folder(tmp_path: Path, add_files: AddFiles) -> None:
    add_files(sinks, {"toy/__init__.py": "", "toy/sink.py": SINK})
    sink = pipeline_of(tmp_path, "sink: {toy: {times: 2}}").make_sink()
    writer = sink.open(BatchMark("shop", "generation", 1, False), 0)
    writer.write(changes_of(ORDERS, insert(1, id=7)))
    assert writer.finish().rows == 2


def test_step_is_one_file(tmp_path: Path, add_files: AddFiles) -> None:
    add_files(steps, {"toy.py": STEP})
    settings = pipeline_of(tmp_path, "sink: stdout\nsteps: [{toy: 1}]")
    (step,) = settings.make_steps()
    assert [row[1] for row in rows(run(step, changes_of(ORDERS, insert(1, id=7), insert(2, id=8))))] == [7]


def test_coordination_store_is_one_file_that_pipelines_and_daemons_name_by_its_scheme(
    tmp_path: Path, add_files: AddFiles
) -> None:
    add_files(backends, {"toy.py": STORE})
    store = open_store("toy://shelf")
    store.put("/record", b"value")
    assert store.get("/record") is not None
    store.close()
    assert pipeline_of(tmp_path, "sink: stdout\nstate: 'toy://shelf'").state == "toy://shelf"
    path = tmp_path / "penstock.yaml"
    path.write_text("instances: {shop: {source: 'mysql://repl@db1'}}\ncoordination: 'toy://shelf'")
    assert load_settings(path, {}).coordination_url() == "toy://shelf"


def test_verb_is_one_file(add_files: AddFiles) -> None:
    add_files(cli, {"toy.py": VERB})
    outcome = CliRunner().invoke(make_app(), ["toy", "blocks"])
    assert outcome.output.strip() == "playing with blocks", outcome.output
