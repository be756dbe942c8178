# SPDX-License-Identifier: Apache-2.0
"""The cursors of Canal's clients: in `meta.dat` of an instance's folder, or in ZooKeeper.

Both contain Canal's `LogPosition` as JSON, in which the field for the position is spelled `postion`. In
ZooKeeper, a cursor is the node /otter/canal/destinations/DESTINATION/CLIENT/cursor, and the client's filter
is in a sibling node.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from penstock.coordinate.checkpoint import Checkpoint
from penstock.errors import OptionInvalid
from penstock.migrate.nested_text import parse_json
from penstock.migrate.property_files import read_text
from penstock.migrate.zookeeper import ZooKeeperTree

_ROOT = "/otter/canal/destinations"


@dataclass(frozen=True)
class CanalCursor:
    """One client's cursor: the last entry that the client has acknowledged. `time_ms` is the time of that
    entry.
    """

    client: int
    file: str
    offset: int
    gtid_set: str = ""
    time_ms: int = 0
    filter: str = ""

    @classmethod
    def of(cls, client: int, position: Any, filter_text: str, where: str) -> Self:
        """Return the cursor of a `LogPosition`. Raises OptionInvalid."""
        entry = position.get("postion") if isinstance(position, Mapping) else None
        if not isinstance(entry, Mapping) or not entry.get("journalName"):
            raise OptionInvalid(
                f"{where}: the cursor of client {client} has no journalName",
                hint="Let the client acknowledge an entry, or remove its cursor",
            )
        return cls(
            client,
            str(entry["journalName"]),
            int(entry.get("position") or 0),
            str(entry.get("gtid") or ""),
            int(entry.get("timestamp") or 0),
            filter_text,
        )

    @property
    def position(self) -> str:
        """The position in Penstock's text form."""
        return f"{self.file}:{self.offset}"

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of cursors of one server: the number of the file, and the offset in it."""
        number = re.search(r"\.(\d+)$", self.file)
        return int(number[1]) if number is not None else 0, self.offset

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint at which a daemon resumes the client."""
        return Checkpoint.now(self.position, self.gtid_set, time_us=self.time_ms * 1000)


def cursors_of_file(path: Path) -> list[CanalCursor]:
    """Return the cursors of a `meta.dat`; none if there is no such file. Raises OptionInvalid."""
    if not path.exists():
        return []
    try:
        clients = parse_json(read_text(path)).get("clientDatas") or []
        return [
            CanalCursor.of(
                int(client["clientIdentity"]["clientId"]),
                client["cursor"],
                str(client["clientIdentity"].get("filter") or ""),
                str(path),
            )
            for client in clients
            if client.get("cursor")
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise OptionInvalid(
            f"{path} has no cursors of Canal's: {type(problem).__name__}",
            hint="Copy the file while Canal is stopped",
        ) from problem


def cursors_of_zookeeper(tree: ZooKeeperTree, destination: str) -> list[CanalCursor]:
    """Return the cursors of a destination's clients in ZooKeeper. Raises OptionInvalid, CoordinationLost."""
    folder = f"{_ROOT}/{destination}"
    cursors = []
    for client in tree.children(folder):
        cursor = tree.text(f"{folder}/{client}/cursor") if re.fullmatch(r"-?\d+", client) else None
        if not cursor:
            continue
        filter_text = tree.text(f"{folder}/{client}/filter") or ""
        try:
            position = parse_json(cursor)
        except ValueError as problem:
            raise OptionInvalid(
                f"{folder}/{client}/cursor is not JSON", hint="Remove the node if the client is gone"
            ) from problem
        cursors.append(CanalCursor.of(int(client), position, filter_text, f"{folder}/{client}/cursor"))
    return cursors


def oldest(cursors: Iterable[CanalCursor]) -> CanalCursor | None:
    """Return the cursor that is furthest behind."""
    return min(cursors, key=lambda cursor: cursor.order, default=None)
