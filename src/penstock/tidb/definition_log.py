# SPDX-License-Identifier: Apache-2.0
"""The table definitions of a TiDB cluster, stored next to the log whose rows were written with them.

`tidb-definitions.jsonl` is a snapshot and the DDL jobs applied after it, one JSON object per line with its
CRC32. A job is durable here before anything that depends on it is written to the log, so a restarted drainer
reads the same rows with the same definitions, and never asks the cluster for the same job twice. A line torn
by a crash is ignored, and its job is read again. The file is rewritten when its jobs outgrow the snapshot.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import EventMalformed, EventUnsupported, SchemaInvalid
from penstock.limits import MIB
from penstock.logstore.disk import AppendFile, Disk
from penstock.logstore.schemas import encode_line, sound_lines
from penstock.tidb.definitions import Definitions, TableVersion
from penstock.tidb.jobs import ROWS_NOT_IN_BINLOGS, DdlJob

FILE = "tidb-definitions.jsonl"
FORMAT = 1

_JOBS_BYTES_MAX = 4 * MIB


class DefinitionLog:
    """The table definitions stored with one log. Used by one thread."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        """Read the stored definitions. Nothing is written. Raises SchemaInvalid."""
        self._disk = disk
        self._path = folder / FILE
        self._file: AppendFile | None = None
        self._sound_bytes = self._snapshot_bytes = 0
        self.definitions: Definitions | None = None
        if disk.exists(self._path):
            self._load()

    def _load(self) -> None:
        try:
            lines = list(sound_lines(self._disk.read(self._path)))
            first, self._snapshot_bytes = lines[0]
            if first["format"] != FORMAT:
                raise SchemaInvalid(
                    f"{self._path} has format {first['format']}, this program reads {FORMAT}",
                    hint="Read it with the version of penstock that wrote it, or a newer one",
                )
            definitions = Definitions.from_json(first["definitions"])
            for line, _ in lines[1:]:
                _apply_line(definitions, line)
        except (IndexError, KeyError, TypeError, ValueError, EventMalformed) as problem:
            raise SchemaInvalid(
                f"{self._path} is damaged: its definitions cannot be read ({problem!r})",
                hint=f"Move {self._path} away: the definitions are read from the cluster at the next start",
            ) from problem
        self._sound_bytes = lines[-1][1]
        self.definitions = definitions

    def seed(self, definitions: Definitions) -> None:
        """Replace all stored definitions with these, durably. Raises LogFull, DiskFailed."""
        self.close()
        first = encode_line({"format": FORMAT, "definitions": definitions.to_json()})
        self._disk.write_atomic(self._path, first)
        self._sound_bytes = self._snapshot_bytes = len(first)
        self.definitions = definitions

    def apply(self, job: DdlJob, commit_ts: int) -> Sequence[TableVersion]:
        """Apply a job durably; return the table definitions that it changed, which apply to rows from
        `commit_ts` on.

        After an error open the definitions again. Raises LogFull, DiskFailed, and EventUnsupported for a
        change of rows that no binlog contains: a log is complete only if it begins after such a job.
        """
        if job.schema_version <= self._known.version:
            return ()
        return self._store(job, commit_ts)

    def apply_early(self, job: DdlJob, commit_ts: int, *, is_logged: bool) -> Sequence[TableVersion]:
        """Apply a job durably before its version, like `Definitions.apply_early`. Propagates errors from
        `apply`.
        """
        if self._known.is_early(job) and self._known.is_logged(job) >= is_logged:
            return ()
        return self._store(job, commit_ts, is_logged)

    @property
    def _known(self) -> Definitions:
        assert self.definitions is not None, "the definitions were seeded before"
        return self.definitions

    def _store(self, job: DdlJob, commit_ts: int, is_logged: bool | None = None) -> Sequence[TableVersion]:
        """Apply a job, and write it. With `is_logged`, the job is applied early."""
        definitions = self._known
        if job.action in ROWS_NOT_IN_BINLOGS:
            raise EventUnsupported(
                f"the cluster executed {job.query!r}: rows changed that are in no binlog",
                position=str(job.finished_ts),
                hint="Begin a new log: move the folder of this one away, and read the tables again",
            )
        if self._sound_bytes - self._snapshot_bytes > max(_JOBS_BYTES_MAX, self._snapshot_bytes):
            self.seed(definitions)
        values = job.to_json() | {"commit_ts": commit_ts}
        values |= {} if is_logged is None else {"early": {"is_logged": is_logged}}
        changed = _apply_line(definitions, values)
        line = encode_line(values)
        file = self._file = self._file or self._disk.append_open(self._path)
        if file.size != self._sound_bytes:
            # Cut off the last line, which a crash left incomplete.
            file.truncate(self._sound_bytes)
        file.write([line])
        file.sync()
        self._sound_bytes += len(line)
        return changed

    def close(self) -> None:
        """Close the file. It is opened again when needed."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _apply_line(definitions: Definitions, values: dict[str, Any]) -> Sequence[TableVersion]:
    """Apply a line of the file. Lines of earlier versions have no commit timestamp."""
    job, commit_ts = DdlJob.parse(json.dumps(values)), values.get("commit_ts", 0)
    early = values.get("early")
    if early is None:
        return definitions.apply(job, commit_ts)
    return definitions.apply_early(job, commit_ts, is_logged=early["is_logged"])
