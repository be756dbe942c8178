# SPDX-License-Identifier: Apache-2.0
"""Writes a file atomically."""

import os
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import DiskFailed


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file under a temporary name, make it durable, and rename it. Raises DiskFailed.

    On failure, an existing file stays unchanged; on success, the new file gets the permissions of the
    existing file. A pipe or a device is written directly.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            with target.open("wb") as device:
                device.writelines(pieces)
            return
        unfinished = target.with_name(f".penstock-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            with unfinished.open("xb") as file:
                if target.exists():
                    # Keep the permissions: a file that only its owner may read must stay that way.
                    os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as problem:
        raise DiskFailed(
            f"{path} cannot be written: {problem.strerror or problem}",
            hint="Name a file that this account may write, on a disk with space",
        ) from problem
