# SPDX-License-Identifier: Apache-2.0
"""Plays rounds of random statements against one pipeline; after each round, the target must equal the source.

A journal keeps the statements in steps, so that a divergence can be reproduced without the seed, and
shortened with `smaller`.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pymysql
import pytest
import yaml

from penstock import Pipeline
from penstock.engine.driver import Driver
from penstock.engine.run import PipelineRun
from penstock.errors import PenstockError
from penstock.local.driver import LocalDriver
from penstock.model import TableName
from penstock.pipeline.state import PipelineState
from tests.convergence.grammar import NAMES, Action, Grammar
from tests.convergence.targets import ConvergenceTarget
from tests.support.pipeline.oracle import differences, source_rows
from tests.support.pipeline.running import patient_leases
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

ACTIONS_OF_A_ROUND = 25
# When the statements of a round are sent: before the pipeline runs, while it runs, or during runs that crash.
KINDS = {"still": 6, "busy": 3, "crash": 3}
# On a busy machine a session of Spark takes minutes to start.
BEGIN_SECONDS_MAX = 5 * WAIT_SECONDS_MAX
# Requests that some rounds make between their statements.
RESNAPSHOT = "resnapshot"


@dataclass
class Round:
    """One round of a journal: how the pipeline ran, and the statements sent before or during the run."""

    kind: str
    number: int
    actions: list[Action] = field(default_factory=list)
    asked: str = ""


@dataclass
class Divergence:
    """The problems at the end of a round: differing `rows` by table, or the error that ended the pipeline."""

    rows: dict[str, list[str]]
    error: str = ""

    @property
    def names(self) -> frozenset[str]:
        """The facts that a shortened journal must reproduce."""
        return frozenset(self.rows) or frozenset({self.error.split(":")[0]})

    def __str__(self) -> str:
        return self.error or "\n".join(
            f"{table}: {line}" for table, lines in self.rows.items() for line in lines[:4]
        )


class Crash(BaseException):
    """Signals that the runner dies at this point."""


class Machine:
    """One database of a source, one pipeline that reads it, and the rounds that are played. Close it when
    done.
    """

    def __init__(self, server: Server, target: ConvergenceTarget, driver: Driver, database: str) -> None:
        self._server = server
        self._target = target
        self._driver = driver
        self.database = database
        self.counts: Counter[str] = Counter()
        self.stops: dict[str, str] = {}
        server.sql(f"DROP DATABASE IF EXISTS {database}; CREATE DATABASE {database} CHARACTER SET utf8mb4")
        self._connection = server.connect(database=database, autocommit=True)
        self._file = target.folder / f"{database}.yaml"
        written = {
            "name": database,
            "source": {"url": server.url("root"), "name": "here", "tables": [f"{database}.*"]},
            "sink": target.sink(database),
            "batch": {"interval": 0},
            "load": {"chunk_rows": 5},
            # An error that stops one table must not hide problems of the other tables.
            "errors": {"table": "skip_table"},
            **target.settings,
        }
        self._file.write_text(yaml.safe_dump(written))

    def close(self) -> None:
        """Drop the database."""
        self._connection.close()
        self._server.sql(f"DROP DATABASE {self.database}")

    @property
    def takes_resnapshots(self) -> bool:
        """Whether the target replaces a row that is read again. A feed adds the row as an insert."""
        return self._target.mode != "feed"

    def grammar(self, chance: random.Random) -> Grammar:
        """Return the generator of actions for the database, limited to changes that the target can follow."""
        abilities = self._target.MODES[self._target.mode]
        return Grammar(chance, self._connection.cursor(), self._server.family == "mariadb", abilities)

    def set_sql_mode(self, mode: str) -> None:
        """Make the following statements run in lenient or strict mode."""
        with self._connection.cursor() as cursor:
            cursor.execute("SET time_zone = '+00:00', sql_mode = %s", (mode,))

    def send(self, action: Action) -> None:
        """Send the statements of an action. Statements that the server refuses have no effect."""
        with self._connection.cursor() as cursor:
            for statement in action.statements:
                try:
                    cursor.execute(statement)
                    self.counts[action.name] += 1
                except pymysql.err.MySQLError:
                    self.counts[f"{action.name} (refused)"] += 1

    def play(self, played: Round, actions: Iterator[Action]) -> Divergence | None:
        """Send a round's statements, run the pipeline to the end, and compare."""
        if played.asked:
            self._ask(played.asked)
        try:
            if played.kind == "busy":
                self._run_while(actions)
            else:
                for action in actions:
                    self.send(action)
            if played.kind == "crash":
                self._crash(random.Random(played.number))
            elif played.kind == "kill":
                self._kill(random.Random(played.number))
            self._run()
        except PenstockError as problem:
            return Divergence({}, f"{type(problem).__name__}: {problem}")
        return self._compared()

    def _run(self) -> None:
        with patient_leases():
            PipelineRun(Pipeline.load(self._file).settings, self._driver, until_caught_up=True).run()

    def _run_while(self, actions: Iterator[Action]) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self._run()
            # Any error is raised again below.
            except BaseException as problem:  # noqa: BLE001
                failed.append(problem)

        thread = threading.Thread(target=run, name="pipeline")
        thread.start()
        try:
            for action in actions:
                self.send(action)
                # Statements must arrive throughout the run, not all before its first batch.
                thread.join(0.03)
        finally:
            thread.join()
        if failed:
            raise failed[0]

    def _crash(self, chance: random.Random) -> None:
        """Run until the runner dies before or after one of its writes."""
        with dying(chance.randint(1, 12)):
            try:
                self._run()
            except Crash:
                self.counts["crash"] += 1

    def _kill(self, chance: random.Random) -> None:
        """Run the command, and kill it at the start of a batch, or a while later."""
        words = [
            str(Path(sys.executable).parent / "penstock"),
            "run",
            str(self._file),
            "--until",
            "caught-up",
            *(["--local"] if isinstance(self._driver, LocalDriver) else []),
        ]
        output = subprocess.DEVNULL
        process = subprocess.Popen(
            words, stdout=output, stderr=output, start_new_session=True, env=os.environ
        )
        before = self._begun()
        try:
            wait_until(lambda: process.poll() is not None or self._begun() != before, BEGIN_SECONDS_MAX)
            # The command dies at a random point of the batch that it has begun.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(chance.choice((0.01, 0.1, 0.5, 2.0)))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                self.counts["kill"] += 1
            process.wait()

    def _begun(self) -> tuple[int, bool] | None:
        with closing(PipelineState.open(Pipeline.load(self._file).settings.state, self.database)) as state:
            checkpoint = state.checkpoint()
            return None if checkpoint is None else (checkpoint.number, state.begun(checkpoint) is not None)

    def _ask(self, table: str) -> None:
        with closing(PipelineState.open(Pipeline.load(self._file).settings.state, self.database)) as state:
            if state.checkpoint() is not None:
                state.request_resnapshot("here", TableName(self.database, table))
                self.counts[RESNAPSHOT] += 1

    def _stopped(self) -> dict[str, str]:
        """Return the tables that the pipeline no longer processes, and why."""
        with closing(PipelineState.open(Pipeline.load(self._file).settings.state, self.database)) as state:
            checkpoint = state.checkpoint()
        assert checkpoint is not None, "the pipeline ran"
        return {key.rpartition(".")[2].strip("`"): why for key, why in checkpoint.stopped.items()}

    def _compared(self) -> Divergence | None:
        found = {}
        stopped = self._stopped()
        for table, why in stopped.items():
            if self.stops.get(table) != why:
                self.counts["stopped"] += 1
                self.stops[table] = why
                print(f"  stopped {self.database}.{table}: {why[:300]}", flush=True)
        there = {str(row[0]) for row in self._server.sql("SHOW TABLES", database=self.database)}
        for table in sorted((there & set(NAMES)) - set(stopped)):
            source = source_rows(self._server, self.database, table)
            try:
                rows = self._target.rows(self.database, source, table)
                told = differences(source, rows)
            # A value that cannot be read as the source's type counts as wrong.
            except (AssertionError, ValueError) as problem:
                told = [str(problem)]
            if told:
                found[table] = told
            self.counts["rows compared"] += len(source)
        return Divergence(found) if found else None


@contextmanager
def dying(calls: int) -> Iterator[None]:
    """Make the runner die at a given write to the state. Writes to the state surround every commit."""
    left = [calls]

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            result = method(*given, **named)
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return result

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("begin", "write", "put_large"):
            patch.setattr(PipelineState, name, around(getattr(PipelineState, name)))
        yield


def play_seed(
    machine: Machine, seed: str, rounds: int, kinds: dict[str, int]
) -> tuple[list[Round], Divergence | None]:
    """Play the rounds of a seed; return the journal, and the problems, if there are any."""
    chance = random.Random(seed)
    grammar = machine.grammar(chance)
    machine.set_sql_mode(sql_mode_of(seed))
    journal: list[Round] = []
    for number in range(rounds):
        kind = "still" if number == 0 else chance.choices(list(kinds), list(kinds.values()))[0]
        played = Round(kind, number)
        if number and machine.takes_resnapshots and chance.random() < 0.25:
            played.asked = chance.choice(NAMES)
        journal.append(played)

        def actions(played: Round = played) -> Iterator[Action]:
            drawn = iter(grammar.first()) if played.number == 0 else iter(())
            for action in drawn:
                played.actions.append(action)
                yield action
            for _ in range(ACTIONS_OF_A_ROUND):
                played.actions.append(grammar.next())
                yield played.actions[-1]

        divergence = machine.play(played, actions())
        if divergence is not None:
            return journal, divergence
    return journal, None


def sql_mode_of(seed: str) -> str:
    """Return the mode of a seed's session."""
    return random.Random(f"mode of {seed}").choice(("", "STRICT_TRANS_TABLES"))


def play_journal(machine: Machine, journal: Sequence[Round], sql_mode: str) -> Divergence | None:
    """Play a journal; return the problems at the end of a round."""
    machine.set_sql_mode(sql_mode)
    for played in journal:
        divergence = machine.play(played, iter(played.actions))
        if divergence is not None:
            return divergence
    return None


def smaller(
    journal: Sequence[Round], wanted: Divergence, diverges: Callable[[Sequence[Round]], Divergence | None]
) -> list[Round]:
    """Return a shorter journal that shows the same problem."""

    def shows(tried: Sequence[Round]) -> bool:
        found = diverges(tried)
        return found is not None and bool(found.names & wanted.names)

    kept = list(journal)
    of_tables = [
        Round(
            one.kind, one.number, [action for action in one.actions if action.table in wanted.rows], one.asked
        )
        for one in kept
    ]
    if wanted.rows and shows(of_tables):
        kept = of_tables
    flat = [(at, action) for at, one in enumerate(kept) for action in one.actions]

    def joined(parts: Sequence[tuple[int, Action]]) -> list[Round]:
        return [
            Round(one.kind, one.number, [action for place, action in parts if place == at], one.asked)
            for at, one in enumerate(kept)
        ]

    size = max(1, len(flat) // 2)
    while size:
        at = 0
        while at < len(flat):
            tried = flat[:at] + flat[at + size :]
            if shows(joined(tried)):
                flat = tried
            else:
                at += size
        size //= 2
    return [one for one in joined(flat) if one.actions or one.kind != "still" or one is kept[-1] or one.asked]


def written(journal: Sequence[Round]) -> str:
    """Return a journal as JSON."""
    return json.dumps([asdict(one) for one in journal], ensure_ascii=False, indent=1)


def read(text: str) -> list[Round]:
    """Return the journal that `written` wrote."""
    return [
        Round(one["kind"], one["number"], [Action(**action) for action in one["actions"]], one["asked"])
        for one in json.loads(text)
    ]
