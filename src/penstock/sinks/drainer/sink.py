# SPDX-License-Identifier: Apache-2.0
"""Writes files in the format of TiDB-Binlog's Drainer (`db-type = "file"`), which its Reparo reads.

Each batch becomes a separate file, `binlog-<index>-<time>`. The index is recorded with the batch number
before the file is given its name, so replaying a batch does not create a second file. A record in the file is
a whole transaction: magic number, length, content, CRC-32C.
"""

import fcntl
import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from penstock import _native
from penstock.changes import Changes, DefiningStatement, Target
from penstock.errors import OptionInvalid, PenstockError
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
    is_repeated,
)

EXTRA = ""

_RECORD_HEAD = struct.Struct("<IQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC = 471_532_804
_BATCH, _STAGED, _LOCK = ".penstock-batch-", ".penstock-staged-", ".penstock-lock"
_NAME = re.compile(r"binlog-(\d{16})-")


class Settings(Section):
    """Where the files are."""

    path: Path = Field(description="the folder of the files, on this host")
    statements: bool = Field(
        default=True,
        description="whether statements (DDL) are written; never with steps that change names or columns",
    )


@dataclass(frozen=True)
class _BatchRecord:
    """The last batch that was committed under a name, with the index of its file."""

    application: str
    number: int
    index: int


class DrainerSink(Sink):
    """Writes transactions."""

    kind = "drainer"
    delivery = Delivery.EXACTLY_ONCE
    spread = Spread.WHOLE
    keeps_state = False
    shares_columns = False
    in_driver = True
    remembers_alone = True
    remembers_by_target = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.takes_statements = settings.statements

    def check(self) -> Sequence[Finding]:
        try:
            self._make_folder()
        except PenstockError as problem:
            return [Finding(str(self.settings.path), problem.message)]
        if not os.access(self.settings.path, os.W_OK | os.X_OK):
            return [Finding(str(self.settings.path), "nothing can be written to it")]
        return []

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        return () if self.settings.path.is_dir() else (f"create the folder {self.settings.path}",)

    def prepare(self, target: Target, evolution: Evolution) -> None:
        self._make_folder()

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for the record of a batch that the pipeline wrote in any of its generations."""
        with translate_file_errors(str(self.settings.path)):
            records = self._records()
        return any(record.application.startswith(applications_of(pipeline)) for record in records)

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Remove the file of the batch: the load is read again, and written under another number."""
        with translate_file_errors(str(self.settings.path)):
            for record in self._records():
                if (record.application, record.number) == (mark.application, mark.number):
                    for path in self._files_of(record):
                        path.unlink()
        return None

    def last_number(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        with translate_file_errors(str(self.settings.path)):
            records = self._records()
        numbers = [record.number for record in records if record.application == mark.application]
        return max(numbers, default=None)

    def open(self, mark: BatchMark, part: int) -> Writer:
        with translate_file_errors(str(self.settings.path)):
            _refuse_others(self._records(), mark)
        return _FileWriter(self.settings.path / f"{_STAGED}{_digest(mark)}-{mark.number}-{part}")

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        folder = self.settings.path
        names = [name for receipt in receipts for name in receipt.staged]
        if not names:
            return
        # One writer receives the whole batch.
        (name,) = names
        staged = folder / name
        with translate_file_errors(str(folder)), self._locked():
            record = self._record_of(mark)
            if self._files_of(record):
                # An earlier attempt at this commit renamed the file.
                staged.unlink(missing_ok=True)
            else:
                time = datetime.now(UTC).strftime("%Y%m%d%H%M%S")
                staged.rename(folder / f"binlog-{record.index:016d}-{time}")
            _sync_folder(folder)

    def _files_of(self, record: _BatchRecord) -> list[Path]:
        return list(self.settings.path.glob(f"binlog-{record.index:016d}-*"))

    def _records(self) -> list[_BatchRecord]:
        """Return the last batch of each generation that wrote to the folder, and of each replay of a dead
        letter.
        """
        # A host that died while it wrote a record left a file with another suffix.
        paths = self.settings.path.glob(f"{_BATCH}*.json")
        return [_BatchRecord(**json.loads(path.read_bytes())) for path in paths]

    def _record_of(self, mark: BatchMark) -> _BatchRecord:
        """Return the durable record of a batch. A new batch gets an index above all others.

        Raises OptionInvalid if another pipeline writes to the folder, and StateOutdated if the folder has a
        later batch. The caller holds the lock.
        """
        records = self._records()
        _refuse_others(records, mark)
        for record in records:
            if record.application == mark.application and is_repeated(mark, record.number):
                return record
        names = (_NAME.match(path.name) for path in self.settings.path.iterdir())
        # Use recorded indexes too, because a recorded index may have no file yet.
        indexes = [int(name[1]) for name in names if name] + [record.index for record in records]
        record = _BatchRecord(mark.application, mark.number, max(indexes, default=-1) + 1)
        path = self.settings.path / f"{_BATCH}{_digest(mark)}.json"
        staged = path.with_suffix(".new")
        with staged.open("wb") as file:
            file.write(json.dumps(asdict(record)).encode())
            _sync(file)
        staged.rename(path)
        _sync_folder(self.settings.path)
        return record

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Wait for other processes that commit to the folder, such as the replay of a dead letter."""
        with (self.settings.path / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_folder(self) -> None:
        with translate_file_errors(str(self.settings.path)):
            self.settings.path.mkdir(parents=True, exist_ok=True)


make = DrainerSink


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

    def statement(self, statement: DefiningStatement) -> None:
        self._append(self._transactions.statement(statement))

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
            with translate_file_errors(str(self._path)):
                if self._file is None:
                    self._file = self._path.open("wb")
                # Make three writes instead of joining the pieces, because a transaction may be large.
                self._file.write(_RECORD_HEAD.pack(_MAGIC, len(transaction)))
                self._file.write(transaction)
                self._file.write(_CHECKSUM.pack(_native.crc32c(transaction)))
            self._bytes += _RECORD_HEAD.size + len(transaction) + _CHECKSUM.size


def _refuse_others(records: Sequence[_BatchRecord], mark: BatchMark) -> None:
    """Raise OptionInvalid if another pipeline wrote to the folder.

    Readers search by commit timestamp, and the timestamps of two pipelines cannot be ordered relative to each
    other.
    """
    own = applications_of(mark.pipeline)
    others = [record.application for record in records if not record.application.startswith(own)]
    if others:
        raise OptionInvalid(
            f"the folder of the drainer sink has files of another pipeline ({others[0].split('/')[1]})",
            hint=f"Give each pipeline a path of its own, or remove {_BATCH}*.json if the other one has ended",
        )


def _digest(mark: BatchMark) -> str:
    return hashlib.sha256(mark.application.encode()).hexdigest()[:16]


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the file names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
