# SPDX-License-Identifier: Apache-2.0
"""The audit: one log line for each change that an account makes."""

from typing import Any

import structlog

from penstock.serve.access import Account

_log = structlog.get_logger("penstock.serve.audit")


def record_action(account: Account, action: str, **values: Any) -> None:
    """Record an action of an account. `values` identify the object of the action and never contain row
    values.
    """
    _log.info("audit", action=action, account=account.name, **values)
