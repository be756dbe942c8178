# SPDX-License-Identifier: Apache-2.0
"""The part of the log that the filters of a query select."""

from dataclasses import dataclass

from penstock.commit_versions import are_positional, commit_version
from penstock.source.source import ByteRange, file_number


@dataclass(frozen=True)
class Narrowing:
    """The part of the log that filters select. None selects everything. Numeric bounds are inclusive."""

    changes: tuple[str, ...] | None = None
    version_min: int | None = None
    version_max: int | None = None
    time_min_us: int | None = None
    time_max_us: int | None = None
    databases: frozenset[str] | None = None
    tables: frozenset[str] | None = None
    files: frozenset[str] | None = None

    def keeps(self, byte_range: ByteRange) -> bool:
        """Return whether a range can contain a transaction that passes."""
        if self.files is not None and byte_range.file not in self.files:
            return False
        if not are_positional(byte_range.file):
            return True
        number = file_number(byte_range.file)
        first_version = commit_version(byte_range.epoch, number, byte_range.start)
        if self.version_max is not None and first_version > self.version_max:
            return False
        if byte_range.stop is None:
            last_version = commit_version(byte_range.epoch, number + 1, 0)
        else:
            last_version = commit_version(byte_range.epoch, number, byte_range.stop)
        return self.version_min is None or last_version >= self.version_min
