# SPDX-License-Identifier: Apache-2.0
"""A copy of one version's samples, and rows in the form in which the server's own record contains them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from penstock.model import Position
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from tests.samples.shop import ORDERS, plain
from tests.samples.write import ACCOUNT, SAMPLES
from tools.servers.ports import free_port

# From the oldest to the newest: 0.2 is older than 0.10.
VERSIONS = sorted(
    (path.parent.name for path in SAMPLES.glob(f"*/{ACCOUNT}")),
    key=lambda version: [int(number) for number in version.split(".")],
)
COLUMNS = ["id", "code", "total"]
_SYSTEM_COLUMNS = ["_change_type", "_commit_version", "_metadata"]
# The phases of the server's record, by number.
LOADED, STREAMED, CAPTURED = range(3)

Change = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """A copy of the samples of one version, and the server's own record of their content."""

    folder: Path
    account: dict[str, Any]

    @classmethod
    def copy(cls, version: str, folder: Path) -> Self:
        """Copy the samples of a version into a folder, which must not exist yet."""
        shutil.copytree(SAMPLES / version, folder)
        return cls(folder, json.loads((folder / ACCOUNT).read_text(encoding="utf-8")))

    @property
    def log(self) -> Path:
        """The log of a server without column names: one cold segment, two closed segments and an open
        segment.
        """
        return self.folder / "log/shop"

    @property
    def moved(self) -> Path:
        """The log of a MariaDB server that was replaced by its replica."""
        return self.folder / "log/moved"

    @property
    def shop(self) -> dict[str, Any]:
        """The record of the first server."""
        found: dict[str, Any] = self.account["shop"]
        return found

    def position(self, phase: int) -> Position:
        """Return the position at which the log ended after a phase."""
        return Position.parse(self.shop["phases"][phase]["position"])

    def changes(self, table: str, after: int | None = None, upto: int = CAPTURED) -> list[Change]:
        """Return the changes of a table's rows after one phase and up to another. Fails if there are none."""
        phases = self.shop["phases"]
        first = 0 if after is None else phases[after]["changes"][table]
        wanted = self.shop["changes"][table][first : phases[upto]["changes"][table]]
        assert wanted, f"the account has no change of {table} there"
        return [(change, row) for change, row in wanted]

    def pipeline(self, name: str) -> PipelineSettings:
        """Return a pipeline of the samples; its server is gone."""
        environment = {"FOLDER": str(self.folder), "SERVER": f"mysql://root@127.0.0.1:{free_port()}"}
        return load_pipeline(self.folder / f"pipelines/{name}.yaml", environment)

    def coordination(self, name: str) -> Path:
        """Return the file of a coordination store: `running` or `resized`."""
        path = self.folder / f"coordination/{name}.db"
        # Opening a store that does not exist creates it.
        assert path.exists(), path
        return path

    def stream_options(self) -> dict[str, str]:
        """Return the options of the Spark stream of the log's folder."""
        return {"path": str(self.log), "tables": ORDERS, "columns": ",".join([*COLUMNS, *_SYSTEM_COLUMNS])}

    def offset(self, batch: int, source: str = "kept") -> dict[str, Any]:
        """Return the end of a batch, from the checkpoint of a Spark stream."""
        text = (self.folder / f"spark/{source}/checkpoint/offsets/{batch}").read_text()
        found: dict[str, Any] = json.loads(text.splitlines()[-1])
        return found


def row_changes(rows: list[dict[str, Any]], columns: list[str] | None = None) -> list[Change]:
    """Return decoded rows in the same form as in the record, without the system columns."""
    names = [columns or [name for name in row if not name.startswith("_")] for row in rows]
    return [
        (row["_change_type"], {name: plain(row[name]) for name in chosen})
        for row, chosen in zip(rows, names, strict=True)
    ]


def only(changes: list[Change], columns: list[str] = COLUMNS) -> list[Change]:
    """Return changes with only some of their columns."""
    return [(change, {name: row[name] for name in columns}) for change, row in changes]


def sorted_changes(changes: list[Change]) -> list[str]:
    """Return changes in an order that does not depend on shards."""
    return sorted(json.dumps(change, sort_keys=True) for change in changes)
