# SPDX-License-Identifier: Apache-2.0
"""The parsed URL of a ZooKeeper ensemble."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote

from penstock.coordinate.store import is_path, without_password
from penstock.errors import OptionInvalid


@dataclass(frozen=True)
class EnsembleAddress:
    """The hosts of a ZooKeeper ensemble, Penstock's account there, and the root node of all records ("" for
    the top).
    """

    url: str
    hosts: str
    root: str
    account: tuple[str, str] | None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse `zookeeper://[user:password@]host[:port][,host[:port]...][/root]`. Raises OptionInvalid."""
        shown = without_password(url)
        authority, slash, root = url.partition("://")[2].partition("/")
        account, _, hosts = authority.rpartition("@")
        user, colon, password = account.partition(":")
        wrong = not hosts or "?" in url or (bool(account) and not (user and colon and password))
        for host in hosts.split(","):
            name, _, port = host.rpartition(":") if ":" in host.rpartition("]")[2] else (host, "", "")
            wrong = wrong or not name or (bool(port) and not port.isdecimal())
        root = f"{slash}{root}".rstrip("/")
        if wrong or (root and not is_path(root)):
            raise OptionInvalid(
                f"coordination {shown!r} names no ensemble",
                hint="Write zookeeper://host:2181,host:2181/root, or zookeeper://user:password@host/root",
            )
        return cls(shown, hosts, root, (unquote(user), unquote(password)) if account else None)
