# SPDX-License-Identifier: Apache-2.0
"""Ports of test servers: outside the ephemeral range, and reserved for one process while it lives."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools import rocketmq
from tools.servers import ServerFailed, ports

ROOT = Path(__file__).resolve().parents[2]
PORTS = 50


def test_ports_are_assigned_once_and_only_from_the_server_range() -> None:
    assigned = [ports.free_port() for _ in range(PORTS)]
    assert len(set(assigned)) == PORTS
    assert set(assigned) <= set(ports.candidates())


def test_brokers_with_a_second_port_each_have_ports_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocketmq, "install", lambda version: tmp_path)
    brokers = [rocketmq.RocketMQ() for _ in range(3)]
    assigned = []
    for number, broker in enumerate(brokers):
        (folder := tmp_path / str(number)).mkdir()
        broker.name_server.port, broker.port = ports.free_port(), ports.free_port()
        broker.argv(folder)
        assigned += [broker.name_server.port, broker.port, broker.port - 2]
        # Another broker starts with the same data again.
        broker.argv(folder)
        assert broker.port == assigned[-2]
    assert len(set(assigned)) == len(assigned)
    assert not any(map(ports.reserve, assigned))


def test_port_leaves_room_for_the_bus_port_of_a_redis_node() -> None:
    assert max(ports.candidates()) + 10_000 <= 65_535


@pytest.mark.parametrize(
    ("lower", "first", "last"),
    [(32_768, 20_000, 32_703), (49_152, 20_000, 49_087), (16_000, 10_000, 15_935), (1024, 20_000, 32_703)],
)
def test_ports_are_below_the_ephemeral_range_if_there_is_room(
    lower: int, first: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    range_file = tmp_path / "range"
    range_file.write_text(f"{lower}\t60999\n")
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", range_file)
    assert (ports.candidates()[0], ports.candidates()[-1]) == (first, last)


def test_port_of_a_process_is_reserved_until_the_process_ends() -> None:
    words = "from tools.servers import ports; print(ports.free_port(), flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    port = int(holder.stdout.readline())
    assert not ports.reserve(port)
    # Closing the standard input would end the process in order; a kill simulates a crash.
    holder.kill()
    holder.communicate()
    assert ports.reserve(port)
    assert not ports.reserve(port), "it is this process's now"


def test_bound_port_is_not_assigned() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not ports.reserve(listener.getsockname()[1])


def test_port_is_free_until_a_server_listens_there() -> None:
    port = ports.free_port()
    assert ports.is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not ports.is_free(port)


def test_exhausted_ports_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ports.free_port()
    monkeypatch.setattr(ports, "candidates", lambda: range(taken, taken + 1))
    with pytest.raises(ServerFailed, match=rf"no port from {taken} to {taken} is free.*ip_local_port_range"):
        ports.free_port()
