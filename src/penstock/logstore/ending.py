# SPDX-License-Identifier: Apache-2.0
"""The end of a log whose writer continues without it."""

import structlog

from penstock.errors import PenstockError
from penstock.logstore.log import Log

_log = structlog.get_logger(__name__)


def end_log(log: Log, instance: str, *, finish: bool = True) -> None:
    """Close a log, and release it in any case. An error is logged.

    Without `finish` its files stay unchanged, for recovery on opening.
    """
    try:
        if finish:
            log.close()
    except PenstockError as problem:
        _log.error("a log could not be finished", instance=instance, why=str(problem))
    finally:
        log.abandon()
