# SPDX-License-Identifier: Apache-2.0
"""Following a server's log across lost connections.

A lost connection cuts a transaction anywhere, so what follows it is a new stretch: it begins at the
last whole transaction, and its reader begins anew as well.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.errors import AnswerTimedOut, DumpReplaced, ServerChanged, TransientError
from penstock.limits import RECONNECT_PAUSE_SECONDS_MAX, RECONNECT_TRIES_MAX
from penstock.model import ServerAddress
from penstock.mysql.connection import ServerIdentity
from penstock.mysql.replica import DumpStart, ReplicaName, ReplicaStream, open_stream
from penstock.retry import Retry

_TRIES_OF_TIMEOUT = 5


@dataclass
class Stretch:
    """An unbroken run of the log.

    `start` is where its bytes begin; the consumer skips what it has, as always with a position that
    the protocol cannot express. Iterating yields event bytes; it ends at the end of a bounded dump
    (`complete` is then true) or when the connection is lost (`failure` then says why).
    """

    start: DumpStart
    identity: ServerIdentity
    stream: ReplicaStream
    complete: bool = False
    failure: TransientError | None = None

    def __iter__(self) -> Iterator[memoryview]:
        try:
            yield from self.stream.event_chunks()
            self.complete = True
        except TransientError as problem:
            self.failure = problem


def follow(
    address: ServerAddress,
    start: DumpStart,
    resume_at: Callable[[], DumpStart | None],
    *,
    bounded: bool = False,
    server_key: str | None = None,
    tries_max: int = RECONNECT_TRIES_MAX,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Stretch]:
    """Yield stretches of the log, each from where the last whole transaction of the one before ended.

        for stretch in follow(address, start, resume_at=lambda: after_last_transaction):
            decoder = ...                      # a new one: the cut may lie inside a transaction
            for events in stretch: ...

    `resume_at` returns where to go on, None before the first whole transaction. With `bounded` the
    last stretch ends at the end of the log; without, this never ends by itself. `server_key` is the
    `ServerIdentity.key` the position belongs to; without it, that of the first server to answer.

    Lost connections, a busy server and a replaced dump are tried again, with exponential backoff;
    `tries_max` tries in a row without progress raise the last failure. Everything else is
    raised at once: PositionPurged, AuthenticationFailed, PrivilegeMissing, and ServerChanged where
    another server answers.
    """
    name = ReplicaName.choose(address.server_id)
    retry = Retry("reconnecting", tries=tries_max, sleep=sleep)
    while True:
        opened_at = time.monotonic()
        try:
            stream = open_stream(address, start, bounded=bounded, name=name)
        except TransientError as problem:
            failure: TransientError | None = problem
        else:
            with stream:
                server_key = _same_server(stream, server_key)
                stretch = Stretch(stream.start, stream.identity, stream)
                yield stretch
            if stretch.complete:
                return
            failure = stretch.failure
            resumed = resume_at() or start
            # An idle server moves no position, so a connection that held counts as progress too.
            if resumed != start or time.monotonic() - opened_at > RECONNECT_PAUSE_SECONDS_MAX:
                retry.succeeded()
            start = resumed
        if failure is None:
            # The consumer left the stretch by itself, so nothing is wrong.
            continue
        if isinstance(failure, DumpReplaced) and address.server_id is None:
            name = ReplicaName.choose(None)
        # A server that hangs costs a timeout for each try.
        weight = _TRIES_OF_TIMEOUT if isinstance(failure, AnswerTimedOut) else 1
        retry.wait(failure, weight=weight, server=str(address), at=str(start))


def _same_server(stream: ReplicaStream, server_key: str | None) -> str:
    """Return the server's key. Raises ServerChanged where it is not the expected one."""
    found = stream.identity.key
    if server_key is not None and found != server_key:
        raise ServerChanged(
            f"{stream.address} is now {found}, the position belongs to {server_key}",
            position=str(stream.start),
            hint="A file position means nothing on another server: start by GTID set or from a new snapshot",
        )
    return found
