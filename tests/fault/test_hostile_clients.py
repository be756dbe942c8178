# SPDX-License-Identifier: Apache-2.0
"""Attack each listener of a real daemon with 20,000 hostile clients during writes: capture continues."""

import asyncio
import random
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.capture.captured_log import head_of
from tests.support.daemon.hostile_clients import attack
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server, certificate

LISTENERS = ("http", "canal", "ptubes")
CLIENTS = 20_000
# A commit must be visible before a request that waits for it times out.
COMMIT_SECONDS_MAX = 50
GROWN_BYTES_MAX = 256 << 20


@pytest.fixture(scope="module")
def server(server_of: Callable[[str], Server]) -> Iterator[Server]:
    actual = server_of("mariadb")
    actual.sql("CREATE DATABASE hostile; CREATE TABLE hostile.t (a INT PRIMARY KEY AUTO_INCREMENT)")
    yield actual
    actual.sql("DROP DATABASE hostile")


def daemon_of(folder: Path, server: Server, **listen: object) -> DaemonProcess:
    return DaemonProcess(
        folder,
        {
            "instances": {"shop": {"source": server.url(), "start": str(head_of(server))}},
            "listen": {**dict.fromkeys(LISTENERS[1:], "127.0.0.1:0"), **listen},
        },
    )


def commits_seen_during(daemon: DaemonProcess, server: Server, work: Callable[[], Counter[str]]) -> int:
    """Return the number of commits that a well-behaved reader received in time during the attack."""
    done: list[Counter[str]] = []
    working = threading.Thread(target=lambda: done.append(work()))
    working.start()
    seen = 0
    while working.is_alive():
        head = head_of(server)
        daemon.wait_for_head(head.file, head.offset)
        server.sql("INSERT INTO hostile.t VALUES ()")
        position = daemon.get("/v1/instances/shop/head", after=str(head), timeout=COMMIT_SECONDS_MAX)[
            "position"
        ]
        assert position != str(head), "the commit was not seen"
        seen += 1
    working.join()
    (counts,) = done
    assert counts.total() > CLIENTS // 2, f"too few came through: {counts}"
    return seen


@pytest.mark.deep(
    guard="tests/unit/test_hostile_clients_in_process.py::test_log_is_written_and_read_during_hostile_connections"
)
@pytest.mark.parametrize("name", LISTENERS)
def test_hostile_clients_do_not_affect_capture(server: Server, tmp_path: Path, name: str) -> None:
    seed = random.randrange(1 << 32)
    with daemon_of(tmp_path, server) as daemon:
        server.sql("INSERT INTO hostile.t VALUES ()")
        before = daemon.resident_bytes()

        def hostile() -> Counter[str]:
            return asyncio.run(attack(daemon.ports[name], name, CLIENTS, seed))

        assert commits_seen_during(daemon, server, hostile) > 5, seed
        status = daemon.get("/v1/instances/shop/status")
        assert (status["state"], status["error"]) == ("running", None), seed
        assert daemon.resident_bytes() - before < GROWN_BYTES_MAX, seed
        assert "Traceback" not in daemon.said(), seed
        # All accepted connections are closed, with their file descriptors.
        wait_until(lambda: len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) < 100, WAIT_SECONDS_MAX)


@pytest.mark.deep(
    guard="tests/unit/test_connection_bounds.py::test_handshakes_in_progress_are_counted_and_bounded_per_peer"
)
def test_endless_handshakes_do_not_affect_capture(server: Server, tmp_path: Path) -> None:
    certificate.make(tmp_path / "tls")
    names = certificate.server_options(tmp_path / "tls")
    trusting = ssl.create_default_context(cafile=str(names["ssl-ca"]))
    trusting.check_hostname = False
    files = {"cert": names["ssl-cert"], "key": names["ssl-key"]}
    with daemon_of(tmp_path, server, tls=files) as daemon:
        server.sql("INSERT INTO hostile.t VALUES ()")
        counts = asyncio.run(attack(daemon.ports["canal"], "canal", CLIENTS // 4, 11, trusting))
        assert counts.total() > CLIENTS // 8
        wait_until(lambda: len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) < 100, WAIT_SECONDS_MAX)
        assert "Traceback" not in daemon.said()
