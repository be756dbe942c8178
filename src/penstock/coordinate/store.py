# SPDX-License-Identifier: Apache-2.0
"""The one seam of coordination: small records by path, sessions whose records end with them, and watches.

A path is `/` and names joined by `/`; `path_of` makes one of any names. A record is at most
`limits.COORDINATION_RECORD_BYTES_MAX` bytes. Every operation is bounded in time: where the store does not
answer, CoordinationLost is raised, and then a change may or may not have happened; who must know reads
again.
"""

import os
import pkgutil
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol
from urllib.parse import quote, unquote, urlsplit

from penstock.coordinate import backends
from penstock.errors import OptionInvalid, SchemaInvalid

# The version of a record that is not there.
ABSENT = -1

# How long an operation is tried before CoordinationLost is raised.
OPERATION_SECONDS = 10.0

# A session ends when nothing was heard of it for so long.
SESSION_SECONDS = 10.0

_PATH = re.compile(r"(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9_.~%-]+)+")


@dataclass(frozen=True)
class Record:
    """What stands at a path.

    `version` grows with each change of this record; a record that was deleted and made again may have
    versions it had before. `created` is the number of the change that made it: numbers of changes rise over
    the whole store and are never used twice. `of_session` tells that it ends with somebody's session.
    """

    value: bytes
    version: int
    created: int
    of_session: bool = False


class Watch(Protocol):
    """A standing wish to be told of changes."""

    def close(self) -> None:
        """Call no more; a call that runs already is not waited for."""
        ...


class Session(Protocol):
    """A life sign that the store watches: what was put under it goes when the sign ends."""

    @property
    def seconds(self) -> float:
        """How long after its last sign of life the store ends it; the store may have changed what was asked
        for.
        """
        ...

    @property
    def alive(self) -> bool:
        """False once it has ended, for good: closed, expired, or without an answer for `seconds`."""
        ...

    @property
    def certain(self) -> bool:
        """Whether the store is known to count it as alive right now: False already while it does not
        answer.
        """
        ...

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Call this once when the session has ended other than by `close`; at once if it has.

        Must not block.
        """
        ...

    def put_ephemeral(self, path: str, value: bytes) -> int:
        """Make a record that goes with the session; return its `created`.

        A record that the session has made there already is left as it is, and its `created` returned.
        Raises VersionConflict where another's record stands, CoordinationLost, also when the session has
        ended.
        """
        ...

    def remove(self, path: str) -> None:
        """Delete the record that the session has put there; another's is left alone.

        Raises CoordinationLost.
        """
        ...

    def close(self) -> None:
        """End it, and remove what was put under it, now if the store answers, else when it expires."""
        ...


class CoordinationStore(Protocol):
    """Records by path.

    Safe for threads; not for a process forked from the one that opened it: OptionInvalid.
    """

    @property
    def url(self) -> str:
        """Which store this is, without a password."""
        ...

    def get(self, path: str, *, latest: bool = False) -> Record | None:
        """Return the record at a path, None where there is none. Raises CoordinationLost.

        Without `latest` it may miss what another process wrote within the last seconds.
        """
        ...

    def put(self, path: str, value: bytes, version: int | None = None) -> int:
        """Write a record and return its version.

        `version` is the one that it must have now: ABSENT for a record that must not be there, None for
        whatever there is. Raises VersionConflict, CoordinationLost, and LimitExceeded for a value too
        large.
        """
        ...

    def delete(self, path: str, version: int | None = None) -> None:
        """Delete a record; none there is fine unless a version was given.

        Raises VersionConflict, CoordinationLost.
        """
        ...

    def list(self, path: str) -> Sequence[str]:
        """Return the names below a path, one level deep, sorted, as they stand in paths.

        Raises CoordinationLost.
        """
        ...

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        """Call `changed` after every change at a path or below it; several changes may be one call.

        It may be called without a change, never left out after one: also when the store was away for a
        while. It runs in a thread of the store and must not block or call the store.
        """
        ...

    def session(self, seconds: float = SESSION_SECONDS) -> Session:
        """Begin a session that ends `seconds` after its last sign of life. Raises CoordinationLost."""
        ...

    def close(self) -> None:
        """End every session and watch of this store object, and let its connections go."""
        ...


class OneProcess:
    """Refuses a store in a process that was forked from the one that opened it: its threads are not there."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def check(self, url: str) -> None:
        """Raise OptionInvalid in another process than the one that made this."""
        if os.getpid() != self._process:
            raise OptionInvalid(
                f"the coordination store {url} was opened before this process was forked",
                hint="Open the store in the process that uses it",
            )


def open_store(url: str, seconds: float = OPERATION_SECONDS) -> CoordinationStore:
    """Open the store that a URL names; the scheme is the name of a backend.

    `memory://name` lives in this process, for tests; `sqlite:///var/lib/penstock/coordination.db` is a file
    that the processes of one host share (`sqlite:file.db` for a relative one);
    `zookeeper://host:2181,host:2181/root` an ensemble, with `user:password@` before the hosts for its
    digest scheme. `seconds` bounds every operation. Raises OptionInvalid, DependencyMissing,
    CoordinationLost, DiskFailed.
    """
    scheme = urlsplit(url.strip()).scheme
    if scheme not in backend_names():
        raise OptionInvalid(
            f"coordination {without_password(url)!r} names none of {', '.join(backend_names())}",
            hint="Write sqlite:///path/to/file.db, or zookeeper://host:2181/root",
        )
    backend = import_module(f"{backends.__name__}.{scheme}")
    opened: CoordinationStore = backend.open_url(url.strip(), seconds)
    return opened


def backend_names() -> tuple[str, ...]:
    """Return the backends that there are, by the name of their files."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(backends.__path__)))


def without_password(url: str) -> str:
    """Return a URL fit for messages."""
    # A password may hold an @ itself: the last one ends it.
    return re.sub(r"(//[^:/@]*):.*@", r"\1:********@", url, flags=re.DOTALL)


# For records of subscriptions: the checkpoints, the assignment and the leases are below the subscription's.
HINT_RECORD = "Use the version that wrote it, or begin again: penstock subscriptions delete"


@contextmanager
def reading_record(what: str, hint: str) -> Iterator[None]:
    """Raise SchemaInvalid where a record's value is not what this version of Penstock writes."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, zlib.error) as problem:
        raise SchemaInvalid(f"{what} cannot be read: {problem!r}", hint=hint) from problem


def path_of(*names: str) -> str:
    """Return the path of names of any kind: what is not plain in one is percent-encoded."""
    return "".join("/" + encoded_name(name) for name in names)


def encoded_name(name: str) -> str:
    """Return a name as it stands in paths."""
    encoded = quote(name, safe="")
    return encoded.replace(".", "%2E") if set(encoded) == {"."} else encoded


def decoded_name(name: str) -> str:
    """Return the name that stands in a path."""
    return unquote(name)


def is_path(text: str) -> bool:
    """Tell whether a text is a path."""
    return _PATH.fullmatch(text) is not None


def checked_path(path: str) -> str:
    """Return a path that is one; anything else is our own mistake, since names are encoded."""
    assert is_path(path), f"{path!r} is no path; make it with path_of"
    return path


def below_of(top: str) -> str:
    """Return how every path below a path begins; the path of everything is `/`."""
    return "/" if top == "/" else checked_path(top) + "/"


def is_below(path: str, top: str) -> bool:
    """Tell whether a path is another or lies below it."""
    return path == top or path.startswith(top.rstrip("/") + "/")
