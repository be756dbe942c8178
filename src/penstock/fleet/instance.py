# SPDX-License-Identifier: Apache-2.0
"""An instance as a member of a fleet serves it: either the member captures the instance itself, or it directs
clients to the member that captures it.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.capture.status import CaptureStatus, State
from penstock.coordinate.store import CoordinationStore
from penstock.errors import CapturedElsewhere, PenstockError
from penstock.fleet.records import capturer_of
from penstock.fleet.tenure import TenuredCapture
from penstock.logstore.followed_log import ServedLog

# All requests reuse the store's answer for this long.
_FRESH_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Capturer:
    """The member that captures an instance, as last read; `name` is None if no member does."""

    name: str | None
    address: str | None
    read_at: float


class Directory:
    """Looks up which member captures each instance. It reads the store in the background and never blocks.
    Thread-safe.
    """

    def __init__(self, open_store: Callable[[], CoordinationStore], member: str) -> None:
        self._open_store = open_store
        self._member = member
        self._capturers: dict[str, _Capturer] = {}
        self._asked: set[str] = set()
        self._changed = threading.Condition()
        self._stopping = False
        self._store: CoordinationStore | None = None
        self._thread = threading.Thread(target=self._run, name="fleet-directory", daemon=True)

    def start(self) -> None:
        """Start reading the store."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading the store."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def elsewhere(self, instance: str) -> CapturedElsewhere:
        """Return the error for a reader of an instance that is not captured here."""
        with self._changed:
            capturer = self._capturers.get(instance)
            if capturer is None or time.monotonic() - capturer.read_at > _FRESH_SECONDS:
                self._asked.add(instance)
                self._changed.notify()
        hint = "See who captures what: penstock fleet status"
        if capturer is None:
            return CapturedElsewhere(f"the member that captures {instance} is not known yet", hint=hint)
        if capturer.name is None or capturer.name == self._member:
            return CapturedElsewhere(f"no member captures {instance} at the moment", hint=hint)
        return CapturedElsewhere(
            f"{instance} is captured by member {capturer.name} at {capturer.address}",
            hint=hint,
            address=capturer.address,
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._stopping)
                if self._stopping:
                    break
                asked, self._asked = self._asked, set()
            for instance in asked:
                self._read(instance)
        if self._store is not None:
            self._store.close()

    def _read(self, instance: str) -> None:
        try:
            if self._store is None:
                self._store = self._open_store()
            member = capturer_of(self._store, instance)
        except PenstockError as problem:
            # Keep the last answer: the member that it names serves readers even while the store is
            # unavailable.
            _log.warning("it is not known who captures", instance=instance, why=str(problem))
            return
        name, address = (None, None) if member is None else (member.name, member.address)
        with self._changed:
            self._capturers[instance] = _Capturer(name, address, time.monotonic())


class FleetInstance:
    """An instance that some member of the fleet captures; see `penstock.serve.served.ServedInstance`."""

    def __init__(
        self,
        name: str,
        capture: Callable[[], TenuredCapture | None],
        directory: Directory,
        tables: list[str],
        exclude_tables: list[str],
    ) -> None:
        self._name = name
        self._capture = capture
        self._directory = directory
        self._tables = tables
        self._exclude_tables = exclude_tables

    @property
    def name(self) -> str:
        """The name of the instance."""
        return self._name

    def status(self) -> Mapping[str, Any]:
        """Return the capture's status, or the member that captures the instance. Never waits."""
        capture = self._capture()
        if capture is not None:
            return capture.status()
        why = self._directory.elsewhere(self._name).message
        return CaptureStatus.of_idle(
            self._name, State.ELSEWHERE, why, self._tables, self._exclude_tables
        ).to_json()

    def log(self) -> ServedLog:
        """Return the capture's log. Raises CapturedElsewhere, or any error from opening the log."""
        capture = self._capture()
        if capture is None:
            raise self._directory.elsewhere(self._name)
        return capture.log()
