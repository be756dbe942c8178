# SPDX-License-Identifier: Apache-2.0
"""Closes a log, or sets it aside by renaming its folder, while the process that wrote the log keeps
running.
"""

import time
from pathlib import Path

import structlog

from penstock.errors import PenstockError
from penstock.logstore.disk import Disk
from penstock.logstore.log import Log

_log = structlog.get_logger(__name__)


def end_log(log: Log, instance: str, *, finish: bool = True) -> None:
    """Close a log, and release it in any case. An error is logged.

    Without `finish`, the files stay unchanged for recovery when the log is next opened.
    """
    try:
        if finish:
            log.close()
    except PenstockError as problem:
        _log.error("a log could not be finished", instance=instance, why=str(problem))
    finally:
        log.abandon()


def put_aside(disk: Disk, folder: Path) -> Path:
    """Rename the folder of a closed log, and return the new path. Raises DiskFailed, SourceMissing."""
    aside = folder.with_name(f"{folder.name}.aside-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    disk.rename(folder, aside)
    disk.sync_folder(aside.parent)
    return aside
