# SPDX-License-Identifier: Apache-2.0
"""The audit: one line of the log for everything that an account has changed."""

from typing import Any

import structlog

from penstock.serve.access import Account

_log = structlog.get_logger("penstock.serve.audit")


def record_action(account: Account, action: str, **values: Any) -> None:
    """Record what an account does. `values` say where, and never hold a value of a row."""
    _log.info("audit", action=action, account=account.name, **values)
