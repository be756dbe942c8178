# SPDX-License-Identifier: Apache-2.0
"""A log captured from a real server, the server's view of its content, and a way to run the command line on
the log.
"""

import json
import shutil
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.logstore.disk import LocalDisk
from penstock.logstore.epochs import EpochFile
from penstock.logstore.layout import Layout
from penstock.logstore.reader import LogReader
from penstock.model import Position
from penstock.settings.daemon import Settings
from tests.support.capture.captured_log import capturing, head_of, rotate, settings_of, wait_for
from tests.support.suite.patience import wait_for_next_second
from tools.servers import Server

BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Ran:
    """A finished run of the program."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of the output."""
        return self.out.splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects in the output, without log lines, which a real process writes to standard
        error.
        """
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    @property
    def one(self) -> dict[str, Any]:
        """The single JSON object of a successful run."""
        assert self.code == 0, self
        (line,) = self.objects
        return line


def penstock(*words: object) -> Ran:
    """Run the program in this process, which avoids the cost of starting it."""
    done = CliRunner().invoke(make_app(), [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


@dataclass(frozen=True)
class Transaction:
    """One transaction according to the server: its GTID, and its byte range [start, end) in a file."""

    gtid: str
    start: Position
    end: Position


@dataclass
class KeptLog:
    """A log in a folder, and its server.

    `head` is the end of the log. `split` is a time between the log's two files. `logged` contains the
    transactions that the server shows.
    """

    server: Server
    root: Path
    start: Position
    database: str
    split: datetime
    head: Position
    logged: list[Transaction] = field(default_factory=list)

    @classmethod
    def capture(cls, server: Server, root: Path, database: str) -> Self:
        """Capture 60 transactions of a table, rotate, and capture 40 more at least a second later."""
        rotate(server)
        start = Position(0, head_of(server).file, 4)
        server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY AUTO_INCREMENT, b VARCHAR(300))")
        insert(server, database, 60)
        rotate(server)
        # MariaDB logs whole seconds.
        wait_for_next_second()
        split = datetime.now(UTC).replace(microsecond=0)
        insert(server, database, 40)
        kept = cls(server, root, start, database, split, head_of(server))
        kept.config.write_text(yaml.safe_dump(_plain(server, root, start)))
        kept.run_capture()
        if len(LogReader.open(kept.folder).segments) > len(kept.files):
            # The hour ended during the capture, which also ended a segment. The tests need one segment per
            # file, so the capture is repeated.
            shutil.rmtree(kept.folder)
            kept.run_capture()
        kept.logged = [
            transaction
            for transaction in transactions(server, list(kept.files))
            if transaction.end <= kept.head
        ]
        return kept

    def copy(self, root: Path) -> Self:
        """Return a copy of the log in its own folder."""
        shutil.copytree(self.root, root)
        copy = replace(self, root=root)
        copy.config.write_text(self.config.read_text().replace(str(self.root), str(root)))
        return copy

    def set_upto(self, gtid: str) -> str:
        """Return the GTID set up to and including a transaction; it contains all transactions before the
        log.
        """
        log = LogReader.open(self.folder)
        first = log.earliest()
        assert first is not None, "the log has something"
        before = [gtid_range.strip() for gtid_range in log.gtid_set(first).split(",") if gtid_range.strip()]
        source, colon, number = gtid.partition(":")
        if colon:
            return ",".join([*before, f"{source}:1-{number}"])
        # A MariaDB set has one transaction per domain.
        domain = gtid.partition("-")[0]
        return ",".join(
            [*(gtid_range for gtid_range in before if gtid_range.partition("-")[0] != domain), gtid]
        )

    @property
    def folder(self) -> Path:
        """The log's folder."""
        return self.root / "shop"

    @property
    def config(self) -> Path:
        """Return a settings file that names the log as instance `shop`."""
        return self.root / "penstock.yaml"

    @property
    def settings(self) -> Settings:
        """The settings that captured the log."""
        return settings_of(
            self.root, self.server.url(), log={"block_bytes": BLOCK_BYTES}, start=str(self.start)
        )

    @property
    def files(self) -> dict[str, int]:
        """The server's files that were captured into the log, with the captured size of each file."""
        sizes = {row[0]: row[1] for row in self.server.sql("SHOW BINARY LOGS")}
        sizes[self.head.file] = self.head.offset
        return {name: size for name, size in sizes.items() if self.start.file <= name <= self.head.file}

    def run_capture(self) -> None:
        """Capture up to the server's head in the newest epoch, and shut down in order."""
        start = EpochFile.load(LocalDisk(), Layout(self.folder)).latest
        head = replace(head_of(self.server), epoch=0 if start is None else start.epoch)
        with capturing(self.settings) as capture:
            wait_for(
                capture, lambda status: bool(status.position) and Position.parse(status.position) >= head
            )


def transactions(server: Server, files: list[str]) -> list[Transaction]:
    """Return every transaction of some files according to SHOW BINLOG EVENTS."""
    logged = []
    for file in files:
        opened: tuple[str, int] | None = None
        for _, start, kind, _, end, text in server.sql(f"SHOW BINLOG EVENTS IN '{file}'"):
            if kind == "Gtid":
                assert opened is None
                opened = _gtid_of(text), start
            elif opened is not None and (kind == "Xid" or (kind == "Query" and "BEGIN" not in text)):
                gtid, begin = opened
                logged.append(Transaction(gtid, Position(0, file, begin), Position(0, file, end)))
                opened = None
    return logged


def insert(server: Server, database: str, transactions: int) -> None:
    """Commit this many single-row transactions."""
    server.sql(";".join([f"INSERT INTO {database}.t (b) VALUES (REPEAT('x', 150))"] * transactions))


def _gtid_of(text: str) -> str:
    """Return the GTID in the server's description of an event: in quotes, or after BEGIN."""
    return text.split("'")[1] if "'" in text else text.split()[-1]


def _plain(server: Server, root: Path, start: Position) -> dict[str, Any]:
    return {
        "log": {"folder": str(root), "block_bytes": BLOCK_BYTES},
        "instances": {"shop": {"source": server.url(), "start": str(start)}},
    }
