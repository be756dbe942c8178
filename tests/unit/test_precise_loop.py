# SPDX-License-Identifier: Apache-2.0
"""The listeners' event loop waits in microseconds, and wakes for events like any other loop."""

import asyncio
import select
import selectors
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock.serve.precise_loop import new_loop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has epoll")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float | None]]:
    """Record how long the loop waits in each of the two system calls."""
    made: list[tuple[str, float | None]] = []
    wait, poll = select.select, selectors.EpollSelector.select

    def precisely(*arguments: Any) -> Any:
        made.append(("select", arguments[3]))
        return wait(*arguments)

    def in_milliseconds(selector: Any, timeout: float | None = None) -> Any:
        made.append(("epoll", timeout))
        return poll(selector, timeout)

    monkeypatch.setattr(select, "select", precisely)
    monkeypatch.setattr(selectors.EpollSelector, "select", in_milliseconds)
    return made


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with closing(new_loop()) as loop:
        yield loop


def test_short_pause_is_not_rounded_to_milliseconds(
    loop: asyncio.AbstractEventLoop, waits: list[tuple[str, float | None]]
) -> None:
    loop.run_until_complete(asyncio.sleep(0.0002))
    precise = [timeout for call, timeout in waits if call == "select"]
    assert precise
    assert all(timeout is not None and timeout <= 0.0002 for timeout in precise)
    assert all(timeout == 0 for call, timeout in waits if call == "epoll")


def test_long_pause_takes_one_system_call(
    loop: asyncio.AbstractEventLoop, waits: list[tuple[str, float | None]]
) -> None:
    loop.run_until_complete(asyncio.sleep(0.02))
    (first, timeout), *_ = [wait for wait in waits if wait[1]]
    assert first == "epoll"
    assert timeout is not None
    assert timeout > 0.01


@pytest.mark.parametrize("descriptors_max", [0, 1024])
def test_event_ends_a_short_pause(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, descriptors_max: int
) -> None:
    monkeypatch.setattr("penstock.serve.precise_loop._DESCRIPTORS_MAX", descriptors_max)
    # Every timeout of this loop is short.
    monkeypatch.setattr("penstock.serve.precise_loop._PRECISE_SECONDS_MAX", 1e6)

    async def exchange() -> bytes:
        first, second = socket.socketpair()
        with first, second:
            first.setblocking(False)
            second.setblocking(False)
            loop.call_later(0.001, second.send, b"x")
            async with asyncio.timeout(60):
                return await loop.sock_recv(first, 1)

    assert loop.run_until_complete(exchange()) == b"x"
