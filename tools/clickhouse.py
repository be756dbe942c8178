# SPDX-License-Identifier: Apache-2.0
"""A private ClickHouse: the engine of the Python package chdb, behind its own HTTP server.

    with ClickHouse() as server:
        server.url          # "http://127.0.0.1:40213/default"

See `clickhouse_server.py`.
"""

import importlib.util
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tools.companion import Companion
from tools.servers.errors import PartMissing

_ROOT = Path(__file__).resolve().parent.parent


class ClickHouse(Companion):
    """The server."""

    NAME = "ClickHouse"

    @property
    def url(self) -> str:
        """The server's URL, in the form of the sink's setting."""
        return f"http://127.0.0.1:{self.port}/default"

    def argv(self, folder: Path) -> list[str]:
        if importlib.util.find_spec("chdb") is None:
            raise PartMissing("the Python package chdb is not installed: pip install chdb")
        return [sys.executable, str(_ROOT / "tools" / "clickhouse_server.py"), str(self.port), str(folder)]

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ping", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
