# SPDX-License-Identifier: Apache-2.0
"""The coordination store of the fleet that a command works on."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import OptionInvalid

if TYPE_CHECKING:
    from penstock.coordinate.store import CoordinationStore


def store_url_of(config: Path | None, coordination: str | None) -> str:
    """Return the URL of the store that the options name. Raises OptionInvalid."""
    from penstock.settings.daemon import load_settings

    if coordination is not None and config is None:
        return coordination
    if config is not None and coordination is None:
        return load_settings(config, with_secrets=False).coordination_url()
    raise OptionInvalid(
        "name the fleet by --config or by --coordination",
        hint="Write --config penstock.yaml, or --coordination zookeeper://host:2181/penstock",
    )


@contextmanager
def opened_store(config: Path | None, coordination: str | None) -> "Iterator[CoordinationStore]":
    """Open the store for the block; the options name the store."""
    from penstock.coordinate.store import open_store

    with closing(open_store(store_url_of(config, coordination))) as store:
        yield store
