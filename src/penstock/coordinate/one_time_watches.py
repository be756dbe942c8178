# SPDX-License-Identifier: Apache-2.0
"""Persistent watches built on one-time watches, for a store that offers only those.

One thread sets the watches again and only then calls the subscriber, so that a change in between is reported
as well.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.errors import PenstockError

_RETRY_SECONDS = 0.5

_log = structlog.get_logger(__name__)

# Sets the one-time watches of a path and returns the names below the path. If the path does not exist, the
# function returns None, and sets a watch only if requested. The watches call `fired` with the path.
SetOnce = Callable[[str, bool, Callable[[str], None]], Sequence[str] | None]


@dataclass(frozen=True)
class WatchCallback:
    """A callback for ZooKeeper's watches. All callbacks of the same subscription are equal, so that
    ZooKeeper's client registers only one of them.
    """

    root: str
    fired: Callable[[str], None]

    def __call__(self, event: Any) -> None:
        # Events about the end of a connection have no path and are handled elsewhere.
        if event.path is not None:
            self.fired(event.path.removeprefix(self.root).rstrip("/"))


class PersistentWatch:
    """A subscription to changes at and below a path. Create it with `OneTimeWatches.add`."""

    def __init__(self, watches: "OneTimeWatches", path: str, changed: Callable[[], None]) -> None:
        self._watches = watches
        self.path = path
        self.changed = changed
        self.closed = False
        # The watched paths.
        self.known: set[str] = set()
        # The store registers a callback for a path only once, provided that it is always the same object.
        # Each access to the method would create another bound-method object.
        self.fired = self._fired

    def close(self) -> None:
        """Stop calling."""
        self.closed = True
        self._watches.remove(self)

    def _fired(self, path: str) -> None:
        if not self.closed:
            self._watches.put(self, path)


class OneTimeWatches:
    """All persistent watches of a store, implemented with ZooKeeper's one-time watches."""

    def __init__(self, set_once: SetOnce) -> None:
        self._set_once = set_once
        self._lock = threading.Lock()
        self._watches: list[PersistentWatch] = []
        # An event without a path means that anything may have changed.
        self._events: queue.SimpleQueue[tuple[PersistentWatch, str | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)
        self._thread.start()

    def add(self, path: str, changed: Callable[[], None]) -> PersistentWatch:
        """Start watching a path. Raises CoordinationLost."""
        watch = PersistentWatch(self, path, changed)
        with self._lock:
            self._watches.append(watch)
        try:
            self._set(watch, path)
        except PenstockError:
            watch.close()
            raise
        return watch

    def remove(self, watch: PersistentWatch) -> None:
        """Stop serving a watch."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def put(self, watch: PersistentWatch, path: str) -> None:
        """Report a change at a path."""
        self._events.put((watch, path))

    def all_gone(self) -> None:
        """Set every watch again and report a change to each, because the store was unavailable."""
        with self._lock:
            for watch in self._watches:
                self._events.put((watch, None))

    def close(self, seconds: float) -> None:
        """Stop the thread; wait for it up to `seconds`."""
        with self._lock:
            for watch in self._watches:
                watch.closed = True
            self._watches = []
        self._events.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            watch, path = event
            if watch.closed:
                continue
            try:
                if path is None:
                    watch.known.clear()
                self._set(watch, watch.path if path is None else path)
            except PenstockError as error:
                _log.warning("a path cannot be watched now", path=watch.path, error=str(error))
                time.sleep(_RETRY_SECONDS)
                self._events.put((watch, None))
            if not watch.closed:
                watch.changed()

    def _set(self, watch: PersistentWatch, path: str) -> None:
        """Watch a path, and the paths below it that are not watched yet.

        The top path is watched even if it is missing. Paths below it are discovered by the watch of their
        parent.
        """
        watch.known.add(path)
        names = self._set_once(path, path == watch.path, watch.fired)
        if names is None:
            if path != watch.path:
                watch.known.discard(path)
            return
        for name in names:
            if f"{path}/{name}" not in watch.known:
                self._set(watch, f"{path}/{name}")
