# SPDX-License-Identifier: Apache-2.0
"""Servers with commits that are logged but not yet visible."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tools.servers import Server

SEMI_SYNC = {
    "mysql": ["INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'"]
    + [f"SET GLOBAL rpl_semi_sync_source_{setting}" for setting in ("timeout = 600000", "enabled = 1")],
    "mariadb": [
        f"SET GLOBAL rpl_semi_sync_master_{setting}"
        for setting in ("timeout = 600000", "wait_point = AFTER_SYNC", "enabled = 1")
    ],
}


@contextmanager
def waiting_commits(server: Server, flavor: str) -> Iterator[Callable[[], object]]:
    """Make commits wait for a missing replica until the block ends or the yielded function is called."""
    for statement in SEMI_SYNC[flavor]:
        server.sql(statement)
    name = "rpl_semi_sync_source" if flavor == "mysql" else "rpl_semi_sync_master"

    def show() -> None:
        server.sql(f"SET GLOBAL {name}_enabled = 0")

    try:
        yield show
    finally:
        show()
