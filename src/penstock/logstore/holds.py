# SPDX-License-Identifier: Apache-2.0
"""Holds of a log: named positions behind which nothing leaves, each a small file that outlasts the process.

    holds = Holds(log.disk, log.layout)
    holds.put(Hold("cache", position, expires_us, "account"), prove=log.locate_position)
    holds.give_up("cache", "account")

How much a hold may keep is bounded; see `retention`.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.layout import Layout
from penstock.model import Position

HOLDS_FOLDER = "holds"
# Names that begin so are set by the daemon itself.
OWN_PREFIX = "penstock."
# Of these, the ones set for named consumers, which may be removed by hand.
CONSUMER_PREFIX = f"{OWN_PREFIX}consumer."

_SUFFIX = ".json"
_READER_CHARACTERS_MAX = 40
_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,127}")
# One for each log folder: holds are set by the threads that serve readers, and judged by the one that trims.
_LOCKS: dict[Path, threading.RLock] = {}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Hold:
    """A checkpoint's wish that nothing behind its position leaves. `expires_us` None means until it is
    removed. `account` set it, and no other account moves it; "" where that is not known."""

    name: str
    position: Position
    expires_us: int | None = None
    account: str = ""

    def has_expired(self, now_us: int) -> bool:
        """Tell whether its time is over."""
        return self.expires_us is not None and self.expires_us <= now_us


@dataclass(frozen=True)
class BrokenHold:
    """A hold that is past a bound and holds nothing, and why."""

    hold: Hold
    why: str


class Holds:
    """The holds of one log: a small file for each, so that they outlast the process.

    Many threads may use it, and several of it for one log; the process is the one that writes the log.
    """

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self._disk = disk
        self._folder = layout.folder / HOLDS_FOLDER
        self._lock = _LOCKS.setdefault(layout.folder.absolute(), threading.RLock())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Let no other thread of this process set or remove a hold of this log."""
        with self._lock:
            yield

    def put(
        self, hold: Hold, *, prove: Callable[[Position], object] | None = None, admin: bool = False
    ) -> None:
        """Set a hold, in place of the one of that name; it lasts when this returns.

        `prove` raises where the log no longer has a position. It is asked while nothing can leave, so what
        it has found to be there is held. Raises OptionInvalid for a name; AccessDenied for a hold of another
        account, unless an `admin` sets it; QuotaReached for one more than an account may have.
        """
        path = self._path(hold.name)
        with self.unchanged():
            owner = self._owner(hold.name)
            if owner is None:
                prove_may_add((known.account for known in self._in_force()), hold.account)
            else:
                prove_owns(hold.name, owner, hold.account, admin=admin)
            if prove is not None:
                prove(hold.position)
            self._disk.make_folder(self._folder)
            values = {
                "position": str(hold.position),
                "expires_us": hold.expires_us,
                "account": owner or hold.account,
            }
            self._disk.write_atomic(path, seal_json(values))

    def remove(self, name: str) -> None:
        """Give a hold up; one that is not there is no error."""
        path = self._path(name)
        with self.unchanged():
            if self._disk.exists(path):
                self._disk.remove(path)
                self._disk.sync_folder(self._folder)

    def give_up(self, name: str, account: str, *, admin: bool = False) -> None:
        """Remove a hold for an account.

        Raises SourceMissing where there is none, AccessDenied for a hold of another account, unless an
        `admin` asks, and for one of the daemon's own.
        """
        if not name.startswith(CONSUMER_PREFIX):
            prove_not_own(name)
        with self.unchanged():
            if not self._disk.exists(self._path(name)):
                raise missing_hold(name)
            prove_owns(name, self._owner(name) or "", account, admin=admin)
            self.remove(name)

    def all(self, now_us: int | None = None) -> list[Hold]:
        """Return the holds that have not expired, by name. Raises LogDamaged for one that cannot be read."""
        now = _now_us() if now_us is None else now_us
        return [hold for hold in map(self._load, self._names()) if not hold.has_expired(now)]

    def readable(self, now_us: int) -> list[Hold]:
        """Return those of `all` that can be read; one that cannot holds nothing, and is named in an error.

        Nobody can say what it was to hold. Were it everything, the disk would fill and the capture stop,
        for a reader that may be gone.
        """
        found = []
        for name in self._names():
            match self._try_load(name):
                case Hold() as hold if not hold.has_expired(now_us):
                    found.append(hold)
                case PenstockError() as problem:
                    _log.error("a hold cannot be read and holds nothing", hold=name, reason=str(problem))
        return found

    def remove_expired(self, now_us: int) -> None:
        """Remove the holds whose time is over. One that cannot be read stays, for somebody to look at."""
        with self.unchanged():
            for name in self._names():
                hold = self._try_load(name)
                if isinstance(hold, Hold) and hold.has_expired(now_us):
                    _log.info("a hold expired", hold=name)
                    self.remove(name)

    def _owner(self, name: str) -> str | None:
        """Return whose a hold is, None where there is none in force."""
        if not self._disk.exists(self._path(name)):
            return None
        hold = self._try_load(name)
        return hold.account if isinstance(hold, Hold) and not hold.has_expired(_now_us()) else None

    def _in_force(self) -> Iterator[Hold]:
        now_us = _now_us()
        for name in self._names():
            hold = self._try_load(name)
            if isinstance(hold, Hold) and not hold.has_expired(now_us):
                yield hold

    def _names(self) -> list[str]:
        names = self._disk.list(self._folder)
        return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]

    def _try_load(self, name: str) -> Hold | PenstockError:
        """Return a hold, or what is wrong with it."""
        try:
            return self._load(name)
        except (LogDamaged, OptionInvalid, PositionInvalid) as problem:
            return problem

    def _load(self, name: str) -> Hold:
        path = self._path(name)
        match unseal_json(self._disk.read(path)):
            case {"position": str(position), "expires_us": int() | None as expires_us, **others}:
                return Hold(name, Position.parse(position), expires_us, str(others.get("account", "")))
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


def reader_name(text: str) -> str:
    """Return the part of a hold's name that says whose it is, for a name of any characters and length."""
    name = re.sub(r"[^0-9A-Za-z_-]", lambda found: f".{ord(found[0]):x}.", text)
    if len(name) <= _READER_CHARACTERS_MAX:
        return name
    return f"{name[:_READER_CHARACTERS_MAX]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def prove_owns(name: str, owner: str, account: str, *, admin: bool) -> None:
    """Raise AccessDenied where a hold is another account's; "" is nobody in particular."""
    if owner not in ("", account) and not admin:
        raise AccessDenied(
            f"the hold {name} belongs to another account than {account}", hint="Choose another reader=NAME"
        )


def prove_not_own(name: str) -> None:
    """Raise AccessDenied for the name of a hold that the daemon sets itself."""
    if name.startswith(OWN_PREFIX):
        raise AccessDenied(f"the hold {name} is the daemon's own", hint="Choose another reader=NAME")


def missing_hold(name: str) -> SourceMissing:
    """Return what to raise where there is no hold of a name."""
    return SourceMissing(f"there is no hold {name}", hint="Run: penstock holds list")


def prove_may_add(owners: Iterable[str], account: str) -> None:
    """Raise QuotaReached where an account has as many of all holds as it may have."""
    if list(owners).count(account) >= HOLDS_PER_ACCOUNT_MAX:
        raise QuotaReached(
            f"account {account} has {HOLDS_PER_ACCOUNT_MAX} holds, which is all it may have",
            hint="Use the names of readers again, or wait until a hold expires",
        )


def _now_us() -> int:
    return time.time_ns() // 1000
