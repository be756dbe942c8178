# SPDX-License-Identifier: Apache-2.0
"""The files of a log: paths, folders and glob patterns, ordered by file number."""

import glob
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import OptionInvalid, SequenceGap, SourceMissing
from penstock.source.source import MAGIC, MAGIC_ENCRYPTED, file_number

# Servers write at least six digits, which distinguishes binlogs from other numbered files.
_IN_FOLDER = re.compile(r"(?P<file>(?P<log>.+)\.\d{6,})(?:\.(?P<compression>gz|zst))?")
_NUMBERED = re.compile(r"(?P<file>(?P<log>.+)\.\d+)(?:\.(?P<compression>gz|zst))?")
_ALONE = re.compile(r"(?P<file>.+?)(?:\.(?P<compression>gz|zst))?")
# The server's list of its files, and MariaDB's GTID index of each file.
_INDEX_SUFFIXES = (".index", ".idx")

_HINT_PATHS = "Name binlog files, a folder of them, or a glob pattern: '/backup/mysql-bin.*'"


@dataclass(frozen=True)
class LocatedFile:
    """One file of a log. `file` is its name without the folder and the compression suffix."""

    path: Path
    file: str
    compression: str | None

    @property
    def number(self) -> int:
        """The number in the file's name, 0 for a single file without a number."""
        return file_number(self.file)


def list_files(paths: tuple[str, ...]) -> list[LocatedFile]:
    """Return the log files that the paths name, ordered by number.

    If a file is present both plain and compressed, the plain one is used. Index files and other files without
    a number are skipped in folders and patterns. Raises SourceMissing, and OptionInvalid for files of
    different logs.
    """
    files_by_name: dict[str, LocatedFile] = {}
    for text in paths:
        for located in _expand(text):
            other = files_by_name.get(located.file)
            if other is None or _same_but_plain(located, other):
                files_by_name[located.file] = located
            elif other.path != located.path and not _same_but_plain(other, located):
                raise OptionInvalid(
                    f"{other.path} and {located.path} are the same binlog file", hint="Name one of them"
                )
    files = sorted(files_by_name.values(), key=lambda located: located.number)
    if not files:
        raise SourceMissing(f"no binlog file is found in {', '.join(paths)}", hint=_HINT_PATHS)
    if len(files) > 1:
        _check_numbers(files)
    return files


def check_sequence(files: list[LocatedFile]) -> None:
    """Raise SequenceGap if a number is missing between two files."""
    for file, next_file in itertools.pairwise(files):
        if next_file.number != file.number + 1:
            digits = len(file.file.rsplit(".", 1)[1])
            missing = f"{file.file.rsplit('.', 1)[0]}.{file.number + 1:0{digits}d}"
            raise SequenceGap(
                f"{missing} is missing between {file.file} and {next_file.file}",
                position=f"{file.file}:end",
                hint=f"Add {missing}, or read the parts one by one with start and end",
            )


def _expand(text: str) -> list[LocatedFile]:
    path = Path(text)
    if path.is_dir():
        names = [entry for entry in path.iterdir() if _IN_FOLDER.fullmatch(entry.name) and entry.is_file()]
        logs: dict[str, list[LocatedFile]] = {}
        for located in map(_locate, names):
            logs.setdefault(located.file.rsplit(".", 1)[0], []).append(located)
        if len(logs) > 1:
            # A data directory contains other numbered files, such as aria_log.00000001.
            logs = {log: files for log, files in logs.items() if any(map(_may_be_binlog, files))}
        if len(logs) > 1:
            patterns = " or ".join(str(path / f"{log}.*") for log in sorted(logs))
            log_names = ", ".join(sorted(logs))
            raise OptionInvalid(f"{path} holds several logs: {log_names}", hint=f"Name one: {patterns}")
        return next(iter(logs.values()), [])
    if path.is_file():
        return [_locate(path)]
    if glob.has_magic(text):
        matched = [Path(name) for name in glob.glob(text)]
        numbered = [file for file in matched if _NUMBERED.fullmatch(file.name) and file.is_file()]
        alone = [file for file in matched if file.is_file() and file.suffix not in _INDEX_SUFFIXES]
        return [_locate(file) for file in numbered or alone]
    raise SourceMissing(f"there is no file {text}", hint=_HINT_PATHS)


def _locate(path: Path) -> LocatedFile:
    match = _NUMBERED.fullmatch(path.name) or _ALONE.fullmatch(path.name)
    assert match is not None, "any name matches the last pattern"
    return LocatedFile(path, match.group("file"), match.group("compression"))


def _may_be_binlog(located: LocatedFile) -> bool:
    if located.compression is not None:
        return True
    with located.path.open("rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, MAGIC_ENCRYPTED)


def _same_but_plain(located: LocatedFile, other: LocatedFile) -> bool:
    return (
        located.compression is None
        and other.compression is not None
        and located.path.parent == other.path.parent
    )


def _check_numbers(files: list[LocatedFile]) -> None:
    for file, next_file in itertools.pairwise(files):
        if file.number == next_file.number:
            raise OptionInvalid(
                f"{file.path} and {next_file.path} do not follow one another",
                hint="Name the files of one log; only a file alone may carry no number",
            )
