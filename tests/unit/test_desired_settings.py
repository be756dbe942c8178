# SPDX-License-Identifier: Apache-2.0
"""The settings of a daemon from its file and from the instances that are kept in the coordination store."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.captures import check_instances
from penstock.coordinate.store import CoordinationStore, open_store
from penstock.desired import DesiredSettings, SettingsState, SettingsThread
from penstock.errors import OptionInvalid
from penstock.fleet.wanted import WantedInstance, read_wanted, want_instance
from penstock.settings.changes import InstanceChange
from penstock.settings.daemon import Settings
from penstock.settings.documents import instance_document
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

SECTION = "source: mysql://repl@${host}\n"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/coordination.db"


@pytest.fixture
def store(url: str) -> Iterator[CoordinationStore]:
    with closing(open_store(url)) as store:
        yield store


@pytest.fixture
def file(tmp_path: Path, url: str) -> Path:
    return write(tmp_path / "penstock.yaml", coordination=url)


@pytest.fixture
def desired(file: Path) -> Iterator[DesiredSettings]:
    desired = DesiredSettings(file)
    yield desired
    desired.stop()


def write(path: Path, **sections: Any) -> Path:
    """Write a settings file with one instance."""
    path.write_text(yaml.safe_dump({"instances": {"shop": {"source": "mysql://db1"}}, **sections}))
    return path


def sources(settings: Settings) -> dict[str, str]:
    """Return the server of each instance."""
    return {name: instance.source for name, instance in settings.instances.items()}


def test_store_decides_about_the_instances_that_it_names(
    desired: DesiredSettings, store: CoordinationStore
) -> None:
    assert sources(desired.first()) == {"shop": "mysql://db1"}
    want_instance(store, WantedInstance("users", SECTION, {"host": "db2"}))
    want_instance(store, WantedInstance("shop", SECTION, {"host": "db3"}))
    assert sources(desired.read(reads_file=False)) == {
        "shop": "mysql://repl@db3",
        "users": "mysql://repl@db2",
    }
    want_instance(store, WantedInstance("shop", None))
    assert sources(desired.read(reads_file=False)) == {"users": "mysql://repl@db2"}


def test_instance_that_cannot_be_used_changes_nothing_and_prevents_no_start(
    desired: DesiredSettings, store: CoordinationStore
) -> None:
    want_instance(store, WantedInstance("users", SECTION))
    assert sources(desired.first()) == {"shop": "mysql://db1"}
    with pytest.raises(OptionInvalid, match="the environment has no variable host"):
        desired.read(reads_file=False)


def test_daemon_starts_without_instances_that_conflict_with_others(
    desired: DesiredSettings, store: CoordinationStore, file: Path, url: str
) -> None:
    write(file, coordination=url, log={"folder": "/log"})
    want_instance(store, WantedInstance("all", "merge: [shop, users]\n"))
    want_instance(store, WantedInstance("none", "merge: [shop, nobody]\n"))
    want_instance(store, WantedInstance("shop", None))
    want_instance(store, WantedInstance("users", SECTION, {"host": "db2"}))
    want_instance(store, WantedInstance("zoo", SECTION + "log: {folder: /log/users}\n", {"host": "db3"}))
    settings = desired.first(check_instances)
    assert sorted(settings.instances) == ["all", "shop", "users"]


def test_file_counts_as_it_was_accepted(
    desired: DesiredSettings, store: CoordinationStore, file: Path
) -> None:
    desired.first()
    text = file.read_text()
    file.write_text("half of a file: [")
    want_instance(store, WantedInstance("users", SECTION, {"host": "db2"}))
    assert sources(desired.read(reads_file=False)) == {"shop": "mysql://db1", "users": "mysql://repl@db2"}
    for broken in ("half of a file: [", "\0", "[" * 1_000):
        file.write_text(broken)
        with pytest.raises(OptionInvalid, match="no YAML"):
            desired.read(reads_file=True)
    file.write_text(text.replace("db1", "db9"))
    assert sources(desired.read(reads_file=True))["shop"] == "mysql://db9"
    # The daemon has refused the changed file.
    assert sources(desired.read(reads_file=False))["shop"] == "mysql://db1"
    assert sources(desired.read(reads_file=True))["shop"] == "mysql://db9"
    desired.accept()
    assert sources(desired.read(reads_file=False))["shop"] == "mysql://db9"


def test_changes_in_the_store_are_followed(desired: DesiredSettings, store: CoordinationStore) -> None:
    changed = threading.Event()
    desired.first()
    desired.follow(changed.set)
    for name in ("users", "audit"):
        assert changed.wait(WAIT_SECONDS_MAX)
        changed.clear()
        want_instance(store, WantedInstance(name, SECTION, {"host": "db2"}))
        wait_until(lambda name=name: changed.is_set() and name in desired.read(reads_file=False).instances)  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_settings_are_followed_after_a_defect_which_stays_visible(
    desired: DesiredSettings, store: CoordinationStore
) -> None:
    first = desired.first()
    applied: list[Settings] = [first]

    def change(settings: Settings) -> InstanceChange:
        if "poison" in settings.instances:
            raise KeyError("poison")
        change = InstanceChange.between(applied[-1], settings)
        applied.append(settings)
        return change

    thread = SettingsThread(desired, change)
    thread.start()
    try:
        want_instance(store, WantedInstance("users", "source: nonsense\n"))
        wait_until(lambda: thread.state is SettingsState.REFUSED)
        want_instance(store, WantedInstance("users", SECTION, {"host": "db2"}))
        wait_until(lambda: thread.state is SettingsState.APPLIED and "users" in applied[-1].instances)
        want_instance(store, WantedInstance("poison", SECTION, {"host": "db2"}))
        wait_until(lambda: thread.state is SettingsState.FAILED)
        want_instance(store, WantedInstance("poison", None))
        want_instance(store, WantedInstance("audit", SECTION, {"host": "db2"}))
        wait_until(lambda: "audit" in applied[-1].instances)
        assert thread.state is SettingsState.FAILED
    finally:
        thread.stop()


def test_instance_is_stored_once_the_daemon_accepts_it(
    desired: DesiredSettings, store: CoordinationStore
) -> None:
    desired.first()
    users = instance_document({"instance": "users", "settings": {"source": "mysql://db2"}})
    proved: list[Settings] = []
    assert desired.want("users", users, proved.append).version == 1
    assert sources(proved[0]) == {"shop": "mysql://db1", "users": "mysql://db2"}

    def refuse(settings: Settings) -> None:
        raise OptionInvalid("it cannot be changed")

    with pytest.raises(OptionInvalid, match="it cannot be changed"):
        desired.want("users", None, refuse)
    assert read_wanted(store)["users"].text is not None
    # The last instance stays.
    desired.want("users", None, proved.append)
    with pytest.raises(OptionInvalid, match="instances"):
        desired.want("shop", None, proved.append)


def test_daemon_without_a_store_keeps_no_instances(tmp_path: Path) -> None:
    desired = DesiredSettings(write(tmp_path / "penstock.yaml", log={"folder": str(tmp_path / "log")}))
    desired.first()
    users = instance_document({"instance": "users", "settings": {"source": "mysql://db2"}})
    with pytest.raises(OptionInvalid, match="no instances but those of its file"):
        desired.want("users", users, lambda settings: None)
    desired.stop()
    assert not (tmp_path / "log").exists()
