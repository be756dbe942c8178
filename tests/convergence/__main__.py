# SPDX-License-Identifier: Apache-2.0
"""Run the convergence test with seeds on separate servers: `python -m tests.convergence FLAVOR TARGET MODE
SEED ROUNDS`.

SEED is a number, a range such as 1-20, or the path of a journal of an earlier run, which is then shortened.
`--kills` adds rounds in which the command is killed, `--kinds still,busy` selects the kinds of rounds. The
pipeline runs in this process, or in a Spark session with `--spark`.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from penstock.engine.driver import Driver
from penstock.local.driver import LocalDriver
from tests.convergence import machine as machine_module
from tests.convergence.machine import Divergence, Machine, Round, play_journal, play_seed, smaller
from tests.convergence.targets import TARGETS, ConvergenceTarget
from tools.servers import Server

# gh-ost and pt-online-schema-change require the settings that servers use with replicas.
SERVER_SETTINGS = {"binlog-row-metadata": "FULL"}
KILLS = {"kill": 1}


@contextmanager
def started(
    flavor: str, target: str, mode: str, folder: Path, on_spark: bool
) -> Iterator[tuple[Server, ConvergenceTarget, Driver]]:
    """Start a source, a target, and the driver for the pipeline's tasks."""
    target_class = TARGETS[target]
    with Server(flavor, SERVER_SETTINGS) as server, target_class.new_server() as target_server:
        made = target_class(mode, folder, target_server)
        if not on_spark:
            yield server, made, LocalDriver()
            return
        with spark_driver(folder) as driver:
            yield server, made, driver


@contextmanager
def spark_driver(folder: Path) -> Iterator[Driver]:
    """Start a session of Spark."""
    from pyspark.sql import SparkSession

    from penstock.spark.driver import SparkDriver
    from tests.support.spark.patience import write_configuration
    from tests.support.spark.session import session_settings

    (folder / "spark").mkdir()
    write_configuration(folder / "spark")
    os.environ |= {
        "SPARK_CONF_DIR": str(folder / "spark"),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    settings = session_settings() | {"spark.ui.showConsoleProgress": "false"}
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    try:
        yield SparkDriver(session)
    finally:
        session.stop()


def main(words: Sequence[str]) -> int:
    """Play the seeds, and print divergences; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.convergence", description=__doc__)
    for name in ("flavor", "target", "mode", "seed"):
        parser.add_argument(name)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--kinds", default=",".join(machine_module.KINDS))
    given = parser.parse_args(words)
    log = Path(tempfile.gettempdir()) / f"convergence-{os.getpid()}.log"
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(log.open("w", buffering=1)))
    kinds = {name: machine_module.KINDS[name] for name in given.kinds.split(",")} | (
        KILLS if given.kills else {}
    )
    counts: Counter[str] = Counter()
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="convergence-") as folder,
        started(given.flavor, given.target, given.mode, Path(folder), given.spark) as (
            server,
            target,
            driver,
        ),
    ):
        if Path(given.seed).is_file():
            return shorten(server, target, driver, Path(given.seed))
        first, _, last = given.seed.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            machine = Machine(server, target, driver, f"seed_{seed}")
            name = f"{given.flavor} {given.target} {given.mode} {seed}"
            journal, divergence = play_seed(machine, name, given.rounds, kinds)
            counts += machine.counts
            path = Path(tempfile.gettempdir()) / f"{name.replace(' ', '-')}.json"
            path.write_text(machine_module.written(journal))
            if divergence is not None:
                failed += 1
                played = journal[-1]
                print(f"DIVERGENCE {name}, round {played.number} ({played.kind}): {path}\n{divergence}")
            machine.close()
            print(f"seed {seed}", flush=True)
    print(dict(counts))
    return 1 if failed else 0


def shorten(server: Server, target: ConvergenceTarget, driver: Driver, path: Path) -> int:
    """Shorten a journal, and print the remaining steps."""
    journal = machine_module.read(path.read_text())
    tries = [0]
    sql_mode = machine_module.sql_mode_of(path.stem.replace("-", " "))

    def diverges(tried: Sequence[Round]) -> Divergence | None:
        tries[0] += 1
        machine = Machine(server, target, driver, f"try_{tries[0]}")
        try:
            return play_journal(machine, tried, sql_mode)
        finally:
            machine.close()

    wanted = diverges(journal)
    if wanted is None:
        print("the journal does not diverge again")
        return 0
    left = smaller(journal, wanted, diverges)
    path.with_suffix(".small.json").write_text(machine_module.written(left))
    print(f"after {tries[0]} tries, sql_mode {sql_mode!r}:")
    for one in left:
        for action in one.actions:
            print("\n".join(f"  {statement}" for statement in action.statements))
        print(f"  -- {one.kind} {one.number} {one.asked}")
    print(diverges(left))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
