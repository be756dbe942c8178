# SPDX-License-Identifier: Apache-2.0
"""Holds of a log: named positions that protect all later segments from removal, each in a small durable file.

    holds = Holds(log.disk, log.layout)
    holds.put(Hold("cache", position, expires_us, "account"), log=log)
    holds.give_up("cache", "account")

`retention` limits how much of the log a hold may keep.
"""

import hashlib
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from penstock.errors import (
    AccessDenied,
    LogDamaged,
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    QuotaReached,
    SourceMissing,
)
from penstock.limits import HOLDS_PER_ACCOUNT_MAX
from penstock.logstore.disk import Disk, SharedLock
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.layout import Layout
from penstock.model import Position

HOLDS_FOLDER = "holds"
# The prefix of the holds that the daemon sets for itself.
OWN_PREFIX = "penstock."
# The prefix of the holds of named consumers. Operators may remove these holds.
CONSUMER_PREFIX = f"{OWN_PREFIX}consumer."

_SUFFIX = ".json"
_LOCK_FILE = "holds.lock"
_READER_CHARACTERS_MAX = 40
_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,127}")
# One lock per log folder: serving threads set holds while the retention thread evaluates them.
_LOCKS: dict[Path, AbstractContextManager[object]] = {}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Hold:
    """A request to keep everything in the log after a position.

    With an `expires_us` of None, the hold lasts until it is removed. Only the `account` that set the hold may
    move it; "" means that the account is unknown.
    """

    name: str
    position: Position
    expires_us: int | None = None
    account: str = ""

    def has_expired(self, now_us: int) -> bool:
        """Return whether the hold has expired."""
        return self.expires_us is not None and self.expires_us <= now_us


@dataclass(frozen=True)
class BrokenHold:
    """A hold that is ignored because it exceeds a limit, and the reason."""

    hold: Hold
    why: str


class LocatingLog(Protocol):
    """A log that can look up positions, such as `LogReader`."""

    def earliest(self) -> Position | None:
        """Return the start of the oldest segment, None in an empty log."""

    def earliest_on_disk(self) -> Position | None:
        """Return `earliest()` after all removals so far."""

    def locate_position(self, position: Position) -> object:
        """Raise PositionPurged or PositionInvalid for a position that the log does not have."""


class Holds:
    """The holds of one log, each in a small file that survives restarts.

    Thread-safe, even if several instances use the same log. Only the process that writes the log may use
    them, unless every process that uses them has called `share_holds`.
    """

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self._disk = disk
        self._folder = layout.folder / HOLDS_FOLDER
        self._lock = _LOCKS.setdefault(layout.folder.absolute(), threading.RLock())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Block other threads of this process from setting or removing holds of this log."""
        with self._lock:
            yield

    def put(self, hold: Hold, *, log: LocatingLog | None = None, admin: bool = False) -> None:
        """Set a hold durably, replacing any hold of the same name.

        With `log`, raises any error from locating the position, and guarantees that the log still has the
        held data when the call returns. Raises OptionInvalid for a bad name; AccessDenied for a hold of
        another account, unless an `admin` sets it; QuotaReached if the account has too many holds.
        """
        path = self._path(hold.name)
        while True:
            begin = None if log is None else log.earliest()
            if log is not None:
                # Locate the position without the lock, because an object store that does not answer must not
                # block the removal of segments.
                log.locate_position(hold.position)
            with self.unchanged():
                if log is not None and log.earliest_on_disk() != begin:
                    # Segments were removed after the position was located.
                    continue
                values = {
                    "position": str(hold.position),
                    "expires_us": hold.expires_us,
                    "account": self._prove_may_put(hold, admin=admin),
                }
                self._disk.make_folder(self._folder)
                self._disk.write_atomic(path, seal_json(values))
                return

    def _prove_may_put(self, hold: Hold, *, admin: bool) -> str:
        """Return the account that will own a hold."""
        owner = self._owner(hold.name)
        if owner is None:
            prove_may_add((active.account for active in self._active_holds()), hold.account)
        else:
            prove_owns(hold.name, owner, hold.account, admin=admin)
        return owner or hold.account

    def remove(self, name: str) -> None:
        """Remove a hold. A missing hold is not an error."""
        path = self._path(name)
        with self.unchanged():
            if self._disk.exists(path):
                self._disk.remove(path)
                self._disk.sync_folder(self._folder)

    def give_up(self, name: str, account: str, *, admin: bool = False) -> None:
        """Remove a hold on behalf of an account.

        Raises SourceMissing for a missing hold. Raises AccessDenied for a hold of the daemon itself, and for
        a hold of another account unless an `admin` asks.
        """
        if not name.startswith(CONSUMER_PREFIX):
            prove_not_own(name)
        with self.unchanged():
            if not self._disk.exists(self._path(name)):
                raise missing_hold(name)
            prove_owns(name, self._owner(name) or "", account, admin=admin)
            self.remove(name)

    def all(self, now_us: int | None = None) -> list[Hold]:
        """Return the unexpired holds by name. Raises LogDamaged for an unreadable hold."""
        now = _now_us() if now_us is None else now_us
        return [hold for hold in map(self._load, self._names()) if not hold.has_expired(now)]

    def readable(self, now_us: int) -> list[Hold]:
        """Return the readable, unexpired holds.

        An unreadable hold does not retain any data and is logged as an error. Its position is unknown, and
        keeping the whole log would fill the disk and stop capture, possibly for a reader that no longer
        exists.
        """
        holds = []
        for name in self._names():
            match self._try_load(name):
                case Hold() as hold if not hold.has_expired(now_us):
                    holds.append(hold)
                case PenstockError() as problem:
                    _log.error("a hold cannot be read and holds nothing", hold=name, reason=str(problem))
        return holds

    def remove_expired(self, now_us: int) -> None:
        """Remove the expired holds. Unreadable holds stay for an operator to inspect."""
        with self.unchanged():
            for name in self._names():
                hold = self._try_load(name)
                if isinstance(hold, Hold) and hold.has_expired(now_us):
                    _log.info("a hold expired", hold=name)
                    self.remove(name)

    def _owner(self, name: str) -> str | None:
        """Return the owner of a hold, None if there is no hold in force."""
        if not self._disk.exists(self._path(name)):
            return None
        hold = self._try_load(name)
        return hold.account if isinstance(hold, Hold) and not hold.has_expired(_now_us()) else None

    def _active_holds(self) -> Iterator[Hold]:
        now_us = _now_us()
        for name in self._names():
            hold = self._try_load(name)
            if isinstance(hold, Hold) and not hold.has_expired(now_us):
                yield hold

    def _names(self) -> list[str]:
        names = self._disk.list(self._folder)
        return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]

    def _try_load(self, name: str) -> Hold | PenstockError:
        """Return a hold, or the error from loading it."""
        try:
            return self._load(name)
        except (LogDamaged, OptionInvalid, PositionInvalid) as problem:
            return problem

    def _load(self, name: str) -> Hold:
        path = self._path(name)
        match unseal_json(self._disk.read(path)):
            case {"position": str(position), "expires_us": int() | None as expires_us, **extra}:
                return Hold(name, Position.parse(position), expires_us, str(extra.get("account", "")))
        raise LogDamaged(
            f"the hold {path} is not what was written",
            position=f"{path.name}:0",
            hint=f"Set it again, or remove it: rm {path}",
        )

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise OptionInvalid(
                f"{name!r} cannot name a hold", hint="Use letters, digits, '.', '_' and '-', at most 128"
            )
        return self._folder / f"{name}{_SUFFIX}"


def share_holds(layout: Layout) -> None:
    """Let several processes use the holds of a log. Each of them calls this first. Raises DiskFailed."""
    folder = layout.folder.absolute()
    if not isinstance(_LOCKS.get(folder), SharedLock):
        _LOCKS[folder] = SharedLock(folder / _LOCK_FILE)


def consumer_hold_name(consumer: str) -> str:
    """Return the name of a named consumer's hold, which includes the owner."""
    return CONSUMER_PREFIX + reader_name(consumer)


def reader_name(text: str) -> str:
    """Return the part of a hold's name that identifies its reader, for a reader name of any characters."""
    name = re.sub(r"[^0-9A-Za-z_-]", lambda match: f".{ord(match[0]):x}.", text)
    if len(name) <= _READER_CHARACTERS_MAX:
        return name
    return f"{name[:_READER_CHARACTERS_MAX]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def prove_owns(name: str, owner: str, account: str, *, admin: bool) -> None:
    """Raise AccessDenied if a hold belongs to another account. An empty owner allows every account."""
    if owner not in ("", account) and not admin:
        raise AccessDenied(
            f"the hold {name} belongs to another account than {account}", hint="Choose another reader=NAME"
        )


def prove_not_own(name: str) -> None:
    """Raise AccessDenied for the name of a hold that the daemon sets itself."""
    if name.startswith(OWN_PREFIX):
        raise AccessDenied(f"the hold {name} is the daemon's own", hint="Choose another reader=NAME")


def missing_hold(name: str) -> SourceMissing:
    """Return the error for a missing hold."""
    return SourceMissing(f"there is no hold {name}", hint="Run: penstock holds list")


def prove_may_add(owners: Iterable[str], account: str) -> None:
    """Raise QuotaReached if an account already has the maximum number of holds."""
    if list(owners).count(account) >= HOLDS_PER_ACCOUNT_MAX:
        raise QuotaReached(
            f"account {account} has {HOLDS_PER_ACCOUNT_MAX} holds, which is all it may have",
            hint="Use the names of readers again, or wait until a hold expires",
        )


def _now_us() -> int:
    return time.time_ns() // 1000
