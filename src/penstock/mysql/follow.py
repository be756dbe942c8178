# SPDX-License-Identifier: Apache-2.0
"""Follows a server's log across lost connections.

A lost connection can interrupt a transaction at any byte. After a reconnect, reading therefore restarts at
the end of the last complete transaction, with a new reader.
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

_TRIES_PER_TIMEOUT = 5


@dataclass
class Stretch:
    """A continuous part of the log.

    `start` is where the part's bytes start. If the protocol cannot express a requested position, the bytes
    start before that position, and the consumer skips what it already has. Iterating yields event bytes until
    the end of a bounded dump (then `complete` is true) or until the connection is lost (then `failure` is
    set).
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
    """Yield stretches of the log, each from the end of the last complete transaction of the previous one.

        for stretch in follow(address, start, resume_at=lambda: after_last_transaction):
            decoder = ...                      # a new decoder: the cut may be inside a transaction
            for events in stretch: ...

    `resume_at` returns where to resume, None before the first complete transaction. With `bounded` the last
    stretch ends at the end of the log; otherwise another stretch always follows. `server_key` is the
    `ServerIdentity.key` that the position belongs to, by default that of the first server that answers.

    Lost connections, a busy server and a replaced dump are retried with exponential backoff. After
    `tries_max` attempts in a row without progress, the last failure is raised. All other errors are raised at
    once: PositionPurged, AuthenticationFailed, PrivilegeMissing, and ServerChanged if another server answers.
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
                server_key = _check_server(stream, server_key)
                stretch = Stretch(stream.start, stream.identity, stream)
                yield stretch
            if stretch.complete:
                return
            failure = stretch.failure
            resumed = resume_at() or start
            # An idle server does not advance the position, so a connection that stayed open also counts as
            # progress.
            if resumed != start or time.monotonic() - opened_at > RECONNECT_PAUSE_SECONDS_MAX:
                retry.succeeded()
            start = resumed
        if failure is None:
            # The consumer stopped reading early, so nothing failed.
            continue
        if isinstance(failure, DumpReplaced) and address.server_id is None:
            name = ReplicaName.choose(None)
        # An attempt with a hung server counts as several, because each takes a whole timeout.
        weight = _TRIES_PER_TIMEOUT if isinstance(failure, AnswerTimedOut) else 1
        retry.wait(failure, weight=weight, server=str(address), at=str(start))


def _check_server(stream: ReplicaStream, server_key: str | None) -> str:
    """Return the server's key. Raises ServerChanged if it is not the expected key."""
    key = stream.identity.key
    if server_key is not None and key != server_key:
        raise ServerChanged(
            f"{stream.address} is now {key}, the position belongs to {server_key}",
            position=str(stream.start),
            hint="A file position means nothing on another server: start by GTID set or from a new snapshot",
        )
    return key
