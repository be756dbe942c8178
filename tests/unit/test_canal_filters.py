# SPDX-License-Identifier: Apache-2.0
"""An instance's own filters limit Canal clients, as Canal's filter.regex and filter.black.regex do."""

from collections.abc import Iterator
from itertools import count

import pytest

from penstock.coordinate.backends.memory import MemoryStore
from penstock.model import TablePatterns
from tests.support.canal.client import CanalClient, describe_entries
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving

_client_ids = count(1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[ServedLog]:
    store = MemoryStore("canal-filters")
    with captured_log() as log, serving(log, {"canal": "127.0.0.1:0"}, store=store) as daemon:
        yield daemon
    store.close()


@pytest.mark.parametrize(
    ("tables", "exclude", "client_filter", "sees_rows"),
    [
        ([], [], "", True),
        (["nowhere.*"], [], "", False),
        # A client's filter replaces the instance's selection of tables, but tables that the instance excludes
        # stay excluded.
        (["nowhere.*"], [], ".*\\..*", True),
        ([], ["*.*"], "", False),
        ([], ["*.*"], ".*\\..*", False),
    ],
)
def test_filters_of_the_instance_and_of_the_client(
    daemon: ServedLog, tables: list[str], exclude: list[str], client_filter: str, *, sees_rows: bool
) -> None:
    daemon.served.canal_filters[INSTANCE] = TablePatterns(tables, exclude)
    with CanalClient(daemon.port("canal"), INSTANCE).log_in("", "") as client:
        client.client_id = str(next(_client_ids))
        client.subscribe(client_filter)
        _, entries = client.get()
    kinds = {entry[0] for entry in describe_entries(entries)}
    assert bool(kinds & {"INSERT", "UPDATE", "DELETE"}) is sees_rows
