# SPDX-License-Identifier: Apache-2.0
"""A pipeline behind a network that fails at random bytes, between it and its daemon or server, ends equal."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import pipeline_of_values
from penstock.pipeline.verify.report import lines
from penstock.pipeline.verify.verify import verify
from tests.support.daemon.process import DaemonProcess
from tests.support.pipeline.running import run_to_end, running, wait_until_loaded
from tests.support.pipeline.workload import Workload
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.sweep_seed import sweep_random, sweep_seed
from tools.servers import Server
from tools.servers.proxy import Cut, Proxy

FAILURES = 40
CUTS: tuple[Cut, ...] = ("reset", "close", "silence")
# Within a head, a frame, a batch and a load.
CUT_BYTES = (1, 50, 400, 5_000, 60_000, 200_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sink", ["delta", "sqlite"])
@pytest.mark.parametrize("behind", ["daemon", "server"])
def test_pipeline_behind_a_failing_network_ends_equal(
    behind: str, sink: str, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=sweep_seed(61), big_rows=600, ddl=True)
    workload.create()
    instances = {"instances": {"shop": {"source": mysql_server.url(), "start": "latest"}}}
    with DaemonProcess(tmp_path, instances) as daemon:
        daemon.wait_for(lambda status: status["state"] == "running")
        port = daemon.port if behind == "daemon" else mysql_server.port
        with Proxy(port) as proxy:
            source: dict[str, Any] = {"url": proxy.through(mysql_server.url("root"))}
            if behind == "daemon":
                url = f"penstock://127.0.0.1:{proxy.port}/shop"
                source = {"url": url, "server": mysql_server.url()}
            values = {
                "name": "network",
                "source": {**source, "name": "shop", "tables": [f"{database}.*"]},
                "sink": {sink: {"path": str(tmp_path / "target")}},
                "load": {"chunk_rows": 60},
            }
            settings = pipeline_of_values(values, tmp_path)
            with workload.busy(0.003), running(LocalDriver(2), settings):
                fail(proxy, sweep_random(61))
                wait_until_loaded(settings)
            run_to_end(LocalDriver(2), settings)
            verification = verify(settings)
    assert verification.equal, [line for table in verification.results for line in lines(table, 5)]


def fail(proxy: Proxy, chance: random.Random) -> None:
    """Let the network fail in random ways, then restore it."""
    for _ in range(FAILURES):
        kind = chance.choice(["now", "at a byte", "at a byte", "swallow", "refuse"])
        if kind == "now":
            proxy.cut(chance.choice(CUTS))
        elif kind == "at a byte":
            after = chance.choice(CUT_BYTES) + chance.randrange(100)
            proxy.cut_after(after, chance.choice(CUTS), times=chance.choice([1, 3]))
        elif kind == "swallow":
            proxy.swallow()
            time.sleep(chance.uniform(0, 3))
            proxy.resume()
        else:
            proxy.refuse()
            time.sleep(chance.uniform(0, 1))
            proxy.refuse(False)
        # A failure falls anywhere within a batch.
        time.sleep(chance.uniform(0, 1))
    proxy.disarm()
    proxy.cut()
