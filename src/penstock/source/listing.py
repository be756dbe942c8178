# SPDX-License-Identifier: Apache-2.0
"""Which files make up a log: paths, folders and glob patterns, put in order by their numbers."""

import glob
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import OptionInvalid, SequenceGap, SourceMissing
from penstock.source.source import MAGIC, MAGIC_ENCRYPTED, file_number

# The server writes at least six digits, which tells binlogs from other numbered files of a folder.
_IN_FOLDER = re.compile(r"(?P<file>(?P<log>.+)\.\d{6,})(?:\.(?P<compression>gz|zst))?")
_NUMBERED = re.compile(r"(?P<file>(?P<log>.+)\.\d+)(?:\.(?P<compression>gz|zst))?")
_ALONE = re.compile(r"(?P<file>.+?)(?:\.(?P<compression>gz|zst))?")
# The server's list of its files, and MariaDB's index of GTIDs beside each file.
_INDEX_SUFFIXES = (".index", ".idx")

_HINT_PATHS = "Name binlog files, a folder of them, or a glob pattern: '/backup/mysql-bin.*'"


@dataclass(frozen=True)
class LocatedFile:
    """One file of a log. `file` is its name without the folder and the compression's ending."""

    path: Path
    file: str
    compression: str | None

    @property
    def number(self) -> int:
        """The number in its name, 0 for a file that stands alone."""
        return file_number(self.file)


def list_files(paths: tuple[str, ...]) -> list[LocatedFile]:
    """Return the log files the paths name, ordered by number.

    A file given both plain and compressed is taken plain. Index files and everything else that carries
    no number are passed over in folders and patterns. Raises SourceMissing, and OptionInvalid where two logs
    are mixed.
    """
    found: dict[str, LocatedFile] = {}
    for text in paths:
        for located in _expand(text):
            other = found.get(located.file)
            if other is None or _same_but_plain(located, other):
                found[located.file] = located
            elif other.path != located.path and not _same_but_plain(other, located):
                raise OptionInvalid(
                    f"{other.path} and {located.path} are the same binlog file", hint="Name one of them"
                )
    files = sorted(found.values(), key=lambda one: one.number)
    if not files:
        raise SourceMissing(f"no binlog file is found in {', '.join(paths)}", hint=_HINT_PATHS)
    if len(files) > 1:
        _check_numbers(files)
    return files


def check_sequence(files: list[LocatedFile]) -> None:
    """Raise SequenceGap where a number is missing between two files."""
    for one, other in itertools.pairwise(files):
        if other.number != one.number + 1:
            digits = len(one.file.rsplit(".", 1)[1])
            missing = f"{one.file.rsplit('.', 1)[0]}.{one.number + 1:0{digits}d}"
            raise SequenceGap(
                f"{missing} is missing between {one.file} and {other.file}",
                position=f"{one.file}:end",
                hint=f"Add {missing}, or read the parts one by one with start and end",
            )


def _expand(text: str) -> list[LocatedFile]:
    path = Path(text)
    if path.is_dir():
        names = [entry for entry in path.iterdir() if _IN_FOLDER.fullmatch(entry.name) and entry.is_file()]
        logs: dict[str, list[LocatedFile]] = {}
        for one in map(_locate, names):
            logs.setdefault(one.file.rsplit(".", 1)[0], []).append(one)
        if len(logs) > 1:
            # A data directory holds other numbered files, such as aria_log.00000001.
            logs = {log: files for log, files in logs.items() if any(map(_may_be_binlog, files))}
        if len(logs) > 1:
            patterns = " or ".join(str(path / f"{log}.*") for log in sorted(logs))
            found = ", ".join(sorted(logs))
            raise OptionInvalid(f"{path} holds several logs: {found}", hint=f"Name one: {patterns}")
        return next(iter(logs.values()), [])
    if path.is_file():
        return [_locate(path)]
    if glob.has_magic(text):
        matched = [Path(name) for name in glob.glob(text)]
        numbered = [one for one in matched if _NUMBERED.fullmatch(one.name) and one.is_file()]
        alone = [one for one in matched if one.is_file() and one.suffix not in _INDEX_SUFFIXES]
        return [_locate(one) for one in numbered or alone]
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


def _same_but_plain(one: LocatedFile, other: LocatedFile) -> bool:
    return one.compression is None and other.compression is not None and one.path.parent == other.path.parent


def _check_numbers(files: list[LocatedFile]) -> None:
    for one, other in itertools.pairwise(files):
        if one.number == other.number:
            raise OptionInvalid(
                f"{one.path} and {other.path} do not follow one another",
                hint="Name the files of one log; only a file alone may carry no number",
            )
