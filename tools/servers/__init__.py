# SPDX-License-Identifier: Apache-2.0
"""Real database servers, private to one process, for tests, the demo and benchmarks.

    from tools.servers import Server

    with Server("mysql", {"binlog_row_metadata": "MINIMAL"}) as server:
        server.sql("CREATE DATABASE shop")
        server.url("repl")

`packages` installs the programs, `server` runs them, and `proxy` forwards and cuts connections.
"""

from tools.servers.errors import PartMissing, ServerFailed
from tools.servers.packages import FLAVORS, Installation, install
from tools.servers.proxy import Proxy
from tools.servers.server import Server
from tools.servers.template import REPLICATION_PASSWORD, REPLICATION_USER

__all__ = [
    "FLAVORS",
    "REPLICATION_PASSWORD",
    "REPLICATION_USER",
    "Installation",
    "PartMissing",
    "Proxy",
    "Server",
    "ServerFailed",
    "install",
]
