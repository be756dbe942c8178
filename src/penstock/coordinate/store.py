# SPDX-License-Identifier: Apache-2.0
"""The interface of coordination: small records by path, sessions with ephemeral records, and watches.

A path is `/` followed by names joined by `/`; `path_of` builds one from any names. A record holds at most
`limits.COORDINATION_RECORD_BYTES_MAX` bytes. Every operation has a timeout: if the store does not answer, the
operation raises CoordinationLost, and a change may or may not have happened. The caller can read again to
find out.
"""

import functools
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from penstock.coordinate import backends
from penstock.coordinate.backends import backend_names
from penstock.errors import OptionInvalid, SchemaInvalid

# The version of a missing record.
ABSENT = -1

# The timeout of an operation, including retries.
OPERATION_SECONDS = 10.0

# A session ends when no heartbeat has arrived for this long.
SESSION_SECONDS = 10.0

# Encoded names are cached, because a page about thousands of records encodes the same names repeatedly.
_NAMES_CACHED = 8192

_PATH = re.compile(r"(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9_.~%:-]+)+")


@dataclass(frozen=True)
class Record:
    """The record at a path.

    `version` increases with each change of this record. If a record is deleted and recreated, its versions
    may repeat. `created` is the number of the change that created the record. Change numbers increase across
    the whole store and are never reused. `of_session` marks an ephemeral record.
    """

    value: bytes
    version: int
    created: int
    of_session: bool = False


class Watch(Protocol):
    """A subscription to changes below a path."""

    def close(self) -> None:
        """Stop calling the callback. Does not wait for a call in progress."""


class Session(Protocol):
    """A session kept alive by heartbeats. When it ends, its ephemeral records are deleted."""

    @property
    def seconds(self) -> float:
        """How long after the last heartbeat the store ends the session; the store may adjust the requested
        time."""

    @property
    def key(self) -> str:
        """The argument for `end_session`. Anyone who knows the key can end or use the session."""

    @property
    def alive(self) -> bool:
        """False once the session has ended for good: closed, expired, or unanswered for `seconds`."""

    @property
    def certain(self) -> bool:
        """Whether the store is known to consider the session alive right now; false while the store does not
        answer."""
        return time.monotonic() < self.certain_until

    @property
    def certain_until(self) -> float:
        """The time until which the store cannot have ended the session, in monotonic seconds of this host;
        -inf while the session is not certain.
        """

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Register a callback for when the session ends other than by `close`.

        If it has already ended, the callback is called immediately. The callback must not block.
        """

    def put_ephemeral(self, path: str, value: bytes, *, plain: bool = False) -> int:
        """Create an ephemeral record; return its `created`.

        A `plain` record is for another system: its content is the value alone, and `get` does not read it.

        If the session has already created a record at the path, the record is left unchanged and its
        `created` is returned. Raises VersionConflict if another record exists, and CoordinationLost, also
        after the end of the session.
        """

    def remove(self, path: str) -> None:
        """Delete the session's own record at a path; other records are left alone.

        Raises CoordinationLost.
        """

    def close(self) -> None:
        """End the session and delete its records: at once if the store answers, otherwise when the session
        expires.
        """


class CoordinationStore(Protocol):
    """Stores records by path.

    Thread-safe. In a process forked from the process that opened the store, every call raises OptionInvalid.
    """

    @property
    def url(self) -> str:
        """The store's URL, without a password."""

    def get(self, path: str, *, latest: bool = False) -> Record | None:
        """Return the record at a path, None if it is missing. Raises CoordinationLost.

        Without `latest`, the result may miss writes of other processes within the last seconds (a stale
        read).
        """

    def put(self, path: str, value: bytes, version: int | None = None) -> int:
        """Write a record and return its version.

        `version` is the expected current version: ABSENT for a record that must not exist, None for any
        version. Raises VersionConflict, CoordinationLost, and LimitExceeded for a value that is too large.
        """

    def delete(self, path: str, version: int | None = None) -> None:
        """Delete a record.

        A missing record is an error only if a version is given. Raises VersionConflict, CoordinationLost.
        """

    def list(self, path: str) -> Sequence[str]:
        """Return the names one level below a path, sorted and encoded as in paths.

        Raises CoordinationLost.
        """

    def read_below(self, path: str, wanted: Callable[[str], bool]) -> Mapping[str, Record | None]:
        """Return all records below a path, keyed by path. This takes far fewer requests than `get`.

        For a path that is not `wanted`, the value is None, and a store may leave out the records below it.
        The result may be stale, and each record may be from a different time. Raises CoordinationLost.
        """
        ...

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        """Call `changed` after every change at or below a path; several changes may be combined into one
        call.

        There may be calls without a change, but every change is followed by a call, even if the store was
        unavailable. The call runs in a thread of the store and must neither block nor use the store.
        """

    def session(self, seconds: float = SESSION_SECONDS) -> Session:
        """Start a session that ends `seconds` after its last heartbeat. Raises CoordinationLost."""

    def close(self) -> None:
        """End every session and watch of this store object, and close its connections."""


class OneProcess:
    """Rejects use of a store in a forked process, because the store's threads do not run there."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def check(self, url: str) -> None:
        """Raise OptionInvalid in any process other than the creator."""
        if os.getpid() != self._process:
            raise OptionInvalid(
                f"the coordination store {url} was opened before this process was forked",
                hint="Open the store in the process that uses it",
            )


def open_store(url: str, seconds: float = OPERATION_SECONDS) -> CoordinationStore:
    """Open the store of a URL; the scheme is the name of a backend.

    `memory://name` exists only in this process, for tests. `sqlite:///var/lib/penstock/coordination.db` is a
    file shared by the processes of one host (`sqlite:file.db` for a relative path).
    `zookeeper://host:2181,host:2181/root` is an ensemble, with `user:password@` before the hosts for the
    digest scheme. `seconds` is the timeout of every operation. Raises OptionInvalid, DependencyMissing,
    CoordinationLost, DiskFailed.
    """
    opened: CoordinationStore = _backend_of(url).open_url(url.strip(), seconds)
    return opened


def end_session(url: str, key: str, seconds: float = OPERATION_SECONDS) -> None:
    """End the session with a key, in the store at a URL, immediately. A session that has already ended is not
    an error.

    No process that used the session may still be running, because it would not learn of the end in time.
    Raises any error from `open_store`.
    """
    _backend_of(url).end_session(url.strip(), key, seconds)


def _backend_of(url: str) -> Any:
    scheme = urlsplit(url.strip()).scheme
    if scheme not in backend_names():
        raise OptionInvalid(
            f"coordination {without_password(url)!r} names none of {', '.join(backend_names())}",
            hint="Write sqlite:///path/to/file.db, or zookeeper://host:2181/root",
        )
    return import_module(f"{backends.__name__}.{scheme}")


def without_password(url: str) -> str:
    """Return a URL with its password masked, for messages."""
    # A password may contain an @, so the last @ ends it.
    return re.sub(r"(//[^:/@]*):.*@", r"\1:********@", url, flags=re.DOTALL)


# The hint for errors about unreadable subscription records. Checkpoints, the assignment and leases are stored
# below the path of the subscription.
HINT_RECORD = "Use the version that wrote it, or begin again: penstock subscriptions delete"


@contextmanager
def reading_record(what: str, hint: str) -> Iterator[None]:
    """Raise SchemaInvalid if a record's value was not written by this version of Penstock."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, zlib.error) as problem:
        raise SchemaInvalid(f"{what} cannot be read: {problem!r}", hint=hint) from problem


@functools.lru_cache(_NAMES_CACHED)
def path_of(*names: str) -> str:
    """Return the path of any names; special characters are percent-encoded."""
    return "".join("/" + encoded_name(name) for name in names)


@functools.lru_cache(_NAMES_CACHED)
def encoded_name(name: str) -> str:
    """Return a name as encoded in paths."""
    encoded = quote(name, safe="")
    return encoded.replace(".", "%2E") if set(encoded) == {"."} else encoded


def decoded_name(name: str) -> str:
    """Return the name decoded from a path."""
    return unquote(name)


def is_path(text: str) -> bool:
    """Return whether a text is a path."""
    return _PATH.fullmatch(text) is not None


def checked_path(path: str) -> str:
    """Return a valid path unchanged. An invalid path is a bug, because names are encoded."""
    assert is_path(path), f"{path!r} is no path; make it with path_of"
    return path


def below_of(top: str) -> str:
    """Return the prefix of every path below a path. The path `/` stands for everything."""
    return "/" if top == "/" else checked_path(top) + "/"


def is_below(path: str, top: str) -> bool:
    """Return whether a path equals another or lies below it."""
    return path == top or path.startswith(top.rstrip("/") + "/")
