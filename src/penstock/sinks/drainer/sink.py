# SPDX-License-Identifier: Apache-2.0
"""Files as TiDB-Binlog's Drainer writes them (`db-type = "file"`), which its Reparo reads.

Each batch is a file of its own, `binlog-<index>-<time>`. Its index follows from the batch number, so a batch
that is replayed is stored once. A record is a whole transaction: magic number, length, content, CRC-32C.
"""

import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from penstock import _native
from penstock.changes import Changes, Target
from penstock.errors import PenstockError
from penstock.settings.values import Section
from penstock.sinks.drainer_transactions import DrainerTransactions
from penstock.sinks.lake.parquet_files import translate_file_errors
from penstock.sinks.sink import (
    BatchMark,
    Delivery,
    Evolution,
    Finding,
    Receipt,
    Sink,
    Spread,
    Writer,
    applications_of,
)

EXTRA = ""

_RECORD_HEAD = struct.Struct("<IQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC = 471_532_804
_INDEXES, _STAGED = ".penstock-indexes-", ".penstock-staged-"


class Settings(Section):
    """Where the files are."""

    path: Path = Field(description="the folder of the files, on this host")


def make(settings: Settings) -> Sink:
    """Create the sink."""
    return DrainerSink(settings)


class DrainerSink(Sink):
    """Writes transactions."""

    kind = "drainer"
    delivery = Delivery.EXACTLY_ONCE
    spread = Spread.WHOLE
    keeps_state = False
    shares_columns = False
    in_driver = True
    remembers_alone = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def check(self) -> Sequence[Finding]:
        try:
            self._make_folder()
        except PenstockError as problem:
            return [Finding(str(self.settings.path), problem.message)]
        if not os.access(self.settings.path, os.W_OK | os.X_OK):
            return [Finding(str(self.settings.path), "nothing can be written to it")]
        return []

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        return () if self.settings.path.is_dir() else (f"make the folder {self.settings.path}",)

    def prepare(self, target: Target, evolution: Evolution) -> None:
        self._make_folder()

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for the record of the indexes of one of the pipeline's generations."""
        with translate_file_errors(str(self.settings.path)):
            records = [json.loads(path.read_bytes()) for path in self.settings.path.glob(f"{_INDEXES}*")]
        return any(record["application"].startswith(applications_of(pipeline)) for record in records)

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Remove the file of the batch: the load is read again, and written under another number."""
        with translate_file_errors(str(self.settings.path)):
            for path in self._files_of(mark):
                path.unlink()
        return None

    def open(self, mark: BatchMark, part: int) -> Writer:
        return _FileWriter(self.settings.path / f"{_STAGED}{_digest(mark)}-{mark.number}-{part}")

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        folder = self.settings.path
        with translate_file_errors(str(folder)):
            for staged in (folder / name for receipt in receipts for name in receipt.staged):
                if self._files_of(mark):
                    # An earlier attempt at this commit renamed the file.
                    staged.unlink(missing_ok=True)
                    continue
                time = datetime.now(UTC).strftime("%Y%m%d%H%M%S")
                staged.rename(folder / f"binlog-{self._index(mark):016d}-{time}")
            _sync_folder(folder)

    def _files_of(self, mark: BatchMark) -> list[Path]:
        return list(self.settings.path.glob(f"binlog-{self._index(mark):016d}-*"))

    def _index(self, mark: BatchMark) -> int:
        """Return the index of a batch's file, above those of files from before the pipeline's generation."""
        record = self.settings.path / f"{_INDEXES}{_digest(mark)}.json"
        if not record.exists():
            known = [int(path.name.split("-")[1]) for path in self.settings.path.glob("binlog-*-*")]
            base = max(known, default=-1) + 1 - mark.number
            staged = record.with_suffix(".new")
            with open(staged, "wb") as file:
                file.write(json.dumps({"application": mark.application, "base": base}).encode())
                _sync(file)
            staged.rename(record)
            _sync_folder(self.settings.path)
        base = json.loads(record.read_bytes())["base"]
        return int(base) + mark.number

    def _make_folder(self) -> None:
        with translate_file_errors(str(self.settings.path)):
            self.settings.path.mkdir(parents=True, exist_ok=True)


class _FileWriter(Writer):
    """Writes the file of a batch, which the commit renames."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._transactions = DrainerTransactions("file")
        self._tables: Counter[str] = Counter()
        self._bytes = 0

    def write(self, changes: Changes) -> None:
        self._tables[str(changes.target.name)] += len(changes)
        with self.working_on(changes.target.name):
            transactions = self._transactions.add(changes)
            self._append(transactions)

    def finish(self) -> Receipt:
        self._append(self._transactions.finish())
        staged: tuple[Any, ...] = ()
        if self._file is not None:
            with translate_file_errors(str(self._path)), self._file:
                _sync(self._file)
            staged = (self._path.name,)
        return Receipt(rows=self._tables.total(), bytes=self._bytes, tables=self._tables, staged=staged)

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _append(self, transactions: Iterator[bytes]) -> None:
        for transaction in transactions:
            record = _RECORD_HEAD.pack(_MAGIC, len(transaction)) + transaction
            with translate_file_errors(str(self._path)):
                if self._file is None:
                    self._file = self._path.open("wb")
                self._file.write(record + _CHECKSUM.pack(_native.crc32c(transaction)))
            self._bytes += len(record) + _CHECKSUM.size


def _digest(mark: BatchMark) -> str:
    return hashlib.sha256(mark.application.encode()).hexdigest()[:16]


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
