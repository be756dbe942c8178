# SPDX-License-Identifier: Apache-2.0
"""A single folder for everything that a test run writes to disk.

The run removes it at its end. A killed run leaves it behind, and the next run removes it: a lock on a file in
the folder shows whether its owner is alive.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "penstock-tests-"
_LOCK_NAME = "owner.lock"
GIGABYTE = 10**9
# How much disk space the tests need. The everyday tests use 2 to 3 GB at once. The deep tests write
# transactions of 2 GB and more, and the redo logs and captured logs of these transactions.
DISK_BYTES = {"everyday": 4 * GIGABYTE, "deep": 12 * GIGABYTE, "all": 12 * GIGABYTE}


class DiskTooSmall(Exception):
    """The disk does not have the space that the tests need."""


@contextmanager
def temporary_folder(parent: Path, bytes_needed: int) -> Iterator[Path]:
    """Create a folder below `parent`; remove it at the end.

    First removes the folders of killed runs. Raises DiskTooSmall if fewer than `bytes_needed` bytes are free
    after that.
    """
    remove_leftovers(parent)
    free = shutil.disk_usage(parent).free
    if free < bytes_needed:
        raise DiskTooSmall(
            f"{parent} has {free / GIGABYTE:.1f} GB free and the tests write up to"
            f" {bytes_needed / GIGABYTE:.0f} GB: free some space, or set TMPDIR to a folder on a larger disk"
        )
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    # PostgreSQL refuses to run as root: its own account has to reach its folder below this one.
    folder.chmod(0o711)
    with open(folder / _LOCK_NAME, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove the folders below `parent` whose runs have ended, and return them."""
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        if folder.stat().st_uid == os.geteuid() and _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    """Return whether the run that created a folder has ended. A folder without lock is just being created."""
    try:
        with open(folder / _LOCK_NAME, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
