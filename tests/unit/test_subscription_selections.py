# SPDX-License-Identifier: Apache-2.0
"""Selections and pauses that an operator sets: invalid changes are refused and change nothing."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.subscription_record import AS_MEMBERS_ASK, Selection, Subscription, Subscriptions


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[MemoryStore]:
    store = MemoryStore(request.node.name.partition("[")[0])
    yield store
    store.close()


@pytest.fixture
def registry(store: MemoryStore) -> Subscriptions:
    registry = Subscriptions(store)
    registry.create(Subscription("shop", "cache"))
    return registry


def error_of(store: MemoryStore, *words: str) -> str:
    """Run a command of `penstock subscriptions` that fails, and return its error."""
    result = CliRunner().invoke(make_app(), ["subscriptions", *words, "--coordination", store.url])
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.parametrize("text", ["", " ", ","])
@pytest.mark.parametrize("option", ["--tables", "--exclude", "--changes", "--columns", "--where"])
def test_option_that_names_nothing_is_refused(
    store: MemoryStore, registry: Subscriptions, option: str, text: str
) -> None:
    tables = ["--tables", "shop.t"] if option == "--exclude" else []
    assert "OptionInvalid" in error_of(store, "set", "cache", *tables, option, text)
    stored = registry.get("shop", "cache")
    assert stored is not None
    assert stored.selection == AS_MEMBERS_ASK


def test_selections_that_are_set_at_the_same_time_both_apply(registry: Subscriptions) -> None:
    def select_columns(current: Selection) -> Selection:
        if current.where is None:
            # Another command writes between the read and the write of this command.
            registry.select("shop", "cache", lambda other: replace(other, where="a = 1"))
        return replace(current, columns=("a",))

    selected = registry.select("shop", "cache", select_columns)
    assert selected.selection == Selection(where="a = 1", columns=("a",))
    assert selected.revision == 2


@pytest.mark.parametrize("text", ["shop.t", "shop.t=", "shop.t=,", "shop.t=a,a", "a,b=c"])
def test_shard_columns_that_name_nothing_are_refused(
    store: MemoryStore, registry: Subscriptions, text: str
) -> None:
    assert "OptionInvalid" in error_of(store, "set", "cache", "--shard-columns", text)


def test_shard_columns_are_set_and_dropped(store: MemoryStore, registry: Subscriptions) -> None:
    def run(*words: str) -> Subscription:
        result = CliRunner().invoke(
            make_app(), ["subscriptions", "set", "cache", *words, "--coordination", store.url]
        )
        assert result.exit_code == 0, result.output
        stored = registry.get("shop", "cache")
        assert stored is not None
        return stored

    run("--shard-columns", "shop.a=x")
    keyed = run("--shard-columns", "shop.b=y, z", "--where", "a = 1")
    assert keyed.shard_columns == {"shop.a": ("x",), "shop.b": ("y", "z")}
    assert keyed.selection.where == "a = 1"
    dropped = run("--as-members-ask")
    assert (dropped.shard_columns, dropped.selection) == ({}, AS_MEMBERS_ASK)
