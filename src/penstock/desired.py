# SPDX-License-Identifier: Apache-2.0
"""The desired settings of a daemon: its file, and the instances that users have stored in the coordination
store.

    penstock.yaml ───────────────────────────┐
    coordination store: apply, PUT, DELETE ──┴─▶ settings ─▶ `Daemon.change`

If both define an instance, the store wins, so that all members of a fleet agree.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from penstock.coordinate.store import CoordinationStore, Watch, open_store
from penstock.errors import OptionInvalid, PenstockError, TransientError
from penstock.fleet.wanted import (
    WANTED,
    WantedInstance,
    forget_instance,
    next_version,
    read_wanted,
    refuse_forgetting,
    want_instance,
)
from penstock.retry import Backoff, Retry
from penstock.settings.changes import InstanceChange
from penstock.settings.daemon import Settings, load_settings
from penstock.settings.documents import InstanceDocument, exported_instance, read_section
from penstock.settings.file import Document, settings_text

_BACKOFF = Backoff(first=1.0, longest=10.0)

_log = structlog.get_logger(__name__)

_LEFT_OUT = "an instance of the store is left out"

# The section of each instance, None for a removed instance.
_Sections = dict[str, dict[str, Any] | None]


class SettingsState(StrEnum):
    """Whether the newest settings were applied. After FAILED, part of them may be in effect until a
    restart.
    """

    APPLIED = "applied"
    REFUSED = "refused"
    FAILED = "failed"


class DesiredSettings:
    """The settings that one daemon should have. Thread-safe.

    If the file has no `coordination` section, there is no store, and the file alone defines the instances.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        # The file's text when it was last accepted, and when it was last read.
        self._text: str | None = None
        self._text_read: str | None = None
        self._has_store = False
        self._store: CoordinationStore | None = None
        # The store's instances when they were last read.
        self._wanted: Mapping[str, WantedInstance] = {}
        self._watch: Watch | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def first(self, prove: Callable[[Settings], None] = lambda settings: None) -> Settings:
        """Return the settings to start with.

        Raises OptionInvalid only for problems in the file. If the store does not answer, the daemon starts
        with the file alone. A stored instance is left out if it cannot be used, alone or together with the
        others, or if `prove` raises OptionInvalid.
        """
        settings = self._read(prove, reads_file=True)
        self.accept()
        return settings

    def read(self, *, reads_file: bool) -> Settings:
        """Return the settings with the current instances of the store.

        Unless the file is read again, its last accepted text is used. Raises OptionInvalid, including for an
        instance of the store.
        """
        return self._read(None, reads_file=reads_file)

    def accept(self) -> None:
        """Record that the daemon uses the settings most recently read."""
        with self._lock:
            self._text = self._text_read

    def follow(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change in the store, until `stop`."""
        if self._has_store:
            self._thread = threading.Thread(
                target=self._follow, args=(changed,), name="wanted-instances", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop calling, and close the store."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._store is not None:
                self._store.close()

    def want(
        self,
        name: str,
        document: InstanceDocument | None,
        prove: Callable[[Settings], None],
        *,
        dry_run: bool = False,
    ) -> WantedInstance:
        """Store an instance, or remove it with None, once `prove` has accepted the resulting settings.

        A dry run stores nothing. Raises OptionInvalid, VersionConflict, CoordinationLost, or any error from
        `prove`.
        """
        wanted = WantedInstance(
            name,
            None if document is None else document.text(),
            {} if document is None else document.values,
        )
        with self._lock:
            store = self._needed_store()
            self._wanted = read_wanted(store)
            prove(self._with(self._text, {**self._wanted, name: wanted}, None))
            if dry_run:
                return next_version(self._wanted.get(name), wanted)
            return want_instance(store, wanted)[0]

    def forget(self, name: str, prove: Callable[[Settings], None], *, dry_run: bool = False) -> None:
        """Apply the settings file to an instance again, once `prove` has accepted the resulting settings.

        A dry run changes nothing. Raises SourceMissing, OptionInvalid, CoordinationLost.
        """
        with self._lock:
            store = self._needed_store()
            self._wanted = read_wanted(store)
            if dry_run:
                refuse_forgetting(store, name)
            others = {known: wanted for known, wanted in self._wanted.items() if known != name}
            prove(self._with(self._text, others, None))
            if not dry_run:
                forget_instance(store, name)

    def stored(self) -> Mapping[str, WantedInstance] | None:
        """Return the instances in the store; None without a store. Raises CoordinationLost."""
        with self._lock:
            settings = load_settings(self._file, text=self._text)
            return None if settings.coordination is None else read_wanted(self._opened(settings))

    def _needed_store(self) -> CoordinationStore:
        settings = load_settings(self._file, text=self._text)
        if settings.coordination is None:
            raise OptionInvalid(
                "this daemon keeps no instances but those of its file",
                hint="Set coordination in penstock.yaml, or change the file and send SIGHUP",
            )
        return self._opened(settings)

    def _read(self, prove: Callable[[Settings], None] | None, *, reads_file: bool) -> Settings:
        """Return the settings. `prove` is passed only when the settings are read for the first time."""
        with self._lock:
            self._text_read = settings_text(self._file) if reads_file else self._text
            settings = load_settings(self._file, text=self._text_read)
            self._has_store = settings.coordination is not None
            if not self._has_store:
                return settings
            try:
                self._wanted = read_wanted(self._opened(settings))
            except PenstockError as problem:
                if prove is None and not isinstance(problem, TransientError):
                    raise
                _log.warning("the instances of the store are not known now", why=str(problem))
            return self._with(self._text_read, self._wanted, prove)

    def _with(
        self,
        text: str | None,
        wanted: Mapping[str, WantedInstance],
        prove: Callable[[Settings], None] | None,
    ) -> Settings:
        """Return the settings of the file with these instances. Raises OptionInvalid.

        With `prove`, instances that cannot be used are left out.
        """
        sections: _Sections = {}
        for name, instance in wanted.items():
            try:
                sections[name] = (
                    None
                    if instance.text is None
                    else read_section(name, instance.text, instance.values, os.environ)
                )
            except OptionInvalid as problem:
                if prove is None:
                    raise
                _log.error(_LEFT_OUT, instance=name, why=str(problem))
                sections[name] = None
        if prove is None:
            return self._load(text, sections)
        return self._load_usable(text, sections, prove)

    def _load(self, text: str | None, sections: _Sections) -> Settings:
        return load_settings(self._file, text=text, change=partial(_replace_instances, sections))

    def _load_usable(
        self, text: str | None, sections: _Sections, prove: Callable[[Settings], None]
    ) -> Settings:
        """Return the settings from the file and the sections that work together."""
        usable, problems = sections, dict[str, OptionInvalid]()
        try:
            settings = self._load(text, sections)
            prove(settings)
        except OptionInvalid:
            settings, usable = self._load(text, {}), {}
        while added := [name for name in sections if name not in usable]:
            # Repeat while another instance becomes usable, because a merge may be listed before its members.
            for name in added:
                try:
                    candidate = self._load(text, {**usable, name: sections[name]})
                    prove(candidate)
                except OptionInvalid as problem:
                    problems[name] = problem
                else:
                    settings, usable = candidate, {**usable, name: sections[name]}
            if not any(name in usable for name in added):
                break
        for name in sections.keys() - usable.keys():
            _log.error(_LEFT_OUT, instance=name, why=str(problems[name]))
        return settings

    def _opened(self, settings: Settings) -> CoordinationStore:
        self._store = self._store or open_store(settings.coordination_url())
        return self._store

    def _follow(self, changed: Callable[[], None]) -> None:
        """Watch the store as soon as it answers."""
        retry = Retry("changes of instances are not followed", backoff=_BACKOFF, stop=self._stopping)
        while self._watch is None and not self._stopping.is_set():
            try:
                with self._lock:
                    self._watch = self._opened(load_settings(self._file, text=self._text)).watch(
                        WANTED, changed
                    )
            except PenstockError as problem:
                retry.wait(problem)
        # Also report the changes that were made before the watch began.
        changed()


class SettingsThread:
    """The thread that applies the desired settings of a daemon whenever they may have changed.

    `change` applies settings, and raises PenstockError if it rejects them.
    """

    def __init__(self, desired: DesiredSettings, change: Callable[[Settings], InstanceChange]) -> None:
        self._desired = desired
        self._change = change
        self._reload = threading.Event()
        self._reads_file = threading.Event()
        self._stopping = threading.Event()
        self._state = SettingsState.APPLIED

    @property
    def state(self) -> SettingsState:
        """The state of the newest settings."""
        return self._state

    def start(self) -> None:
        """Start following changes, including changes in the store."""
        self._start_thread()
        self._desired.follow(self.reload)

    def stop(self) -> None:
        """Apply no further settings. Does not wait for a running change."""
        self._stopping.set()
        self._reload.set()
        self._desired.stop()

    def reload(self, *, reads_file: bool = False) -> None:
        """Read the settings again soon. May be called by any thread."""
        if reads_file:
            self._reads_file.set()
        self._reload.set()

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name="settings", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._reload.wait()
                self._reload.clear()
                if not self._stopping.is_set():
                    self._apply()
        except Exception as defect:
            # The exception ends the thread, which prints the traceback. Another thread applies the next
            # change.
            self._state = SettingsState.FAILED
            _log.error(
                "a defect interrupted a change of the settings",
                why=repr(defect),
                hint="Part of the change may be in effect: restart the daemon",
            )
            self._start_thread()
            raise

    def _apply(self) -> None:
        # A signal that arrives now is handled in the next round.
        if reads_file := self._reads_file.is_set():
            self._reads_file.clear()
        try:
            change = self._change(self._desired.read(reads_file=reads_file))
            self._desired.accept()
        except PenstockError as problem:
            self._note(SettingsState.REFUSED)
            _log.error("new settings are not applied", why=str(problem), hint=problem.hint)
            return
        self._note(SettingsState.APPLIED)
        names = {name: value for name, value in vars(change).items() if name != "with_other_log"}
        if change or reads_file:
            _log.info("settings are applied" if change else "settings have not changed", **names)

    def _note(self, state: SettingsState) -> None:
        if self._state is not SettingsState.FAILED:
            self._state = state


class StoredInstances:
    """The instances in the coordination store, as the operators of a daemon view and change them.

    `plan` returns the changes that settings would cause in the daemon, and raises OptionInvalid if it rejects
    the settings. `reload` makes the daemon read the settings again.
    """

    def __init__(
        self,
        desired: DesiredSettings,
        plan: Callable[[Settings], InstanceChange],
        reload: Callable[[], None],
    ) -> None:
        self._desired = desired
        self._plan = plan
        self._reload = reload

    def want(self, name: str, document: InstanceDocument | None, *, dry_run: bool) -> dict[str, Any]:
        """Store an instance, or remove it with None; return its version and the resulting changes in this
        daemon.
        """
        changes: list[InstanceChange] = []
        stored = self._desired.want(
            name, document, lambda settings: changes.append(self._plan(settings)), dry_run=dry_run
        )
        return {"version": stored.version, **self._done(changes, dry_run=dry_run)}

    def forget(self, name: str, *, dry_run: bool) -> dict[str, Any]:
        """Apply the settings file to an instance again; return the resulting changes in this daemon."""
        changes: list[InstanceChange] = []
        self._desired.forget(name, lambda settings: changes.append(self._plan(settings)), dry_run=dry_run)
        return self._done(changes, dry_run=dry_run)

    def stored(self) -> list[dict[str, Any]] | None:
        """Return the instances in the store without secrets; None without a store."""
        wanted = self._desired.stored()
        if wanted is None:
            return None
        return [
            {
                "instance": instance.name,
                "version": instance.version,
                "updated_us": instance.updated_us,
                "document": None
                if instance.text is None
                else exported_instance(instance.name, instance.text, instance.values)[0],
            }
            for instance in wanted.values()
        ]

    def _done(self, changes: Sequence[InstanceChange], *, dry_run: bool) -> dict[str, Any]:
        if not dry_run:
            self._reload()
        return {what: list(names) for what, names in vars(changes[-1]).items()}


def _replace_instances(sections: Mapping[str, dict[str, Any] | None], document: Document) -> None:
    """Replace instances in a settings file, and remove instances without a section."""
    instances = document.value["instances"]
    for name, section in sections.items():
        in_file = instances.pop(name, None)
        if in_file is not None and in_file != section:
            _log.warning("the file has another section than the store, which decides", instance=name)
        if section is not None:
            instances[name] = section
