# SPDX-License-Identifier: Apache-2.0
"""Translates the change kinds and columns of a subscription request into the form that the daemon expects."""

from collections.abc import Sequence

from penstock.errors import OptionInvalid
from penstock.source.reading import CHANGE_TYPES, SYSTEM_COLUMNS

# These system columns are always sent: sharding and change types depend on them.
_SENT_ALWAYS = SYSTEM_COLUMNS[:3]
_UPDATES = ("update_preimage", "update_postimage")


def sent_columns(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the columns to send for the requested columns; None means all."""
    return None if columns is None else tuple(dict.fromkeys((*columns, *_SENT_ALWAYS)))


def change_types(kinds: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the change types that the requested kinds comprise; None means all.

    Raises OptionInvalid for an unknown kind, and for an empty list, which would exclude every change.
    """
    if kinds is None:
        return None
    requested = [kinds] if isinstance(kinds, str) else list(kinds)
    if not requested:
        raise OptionInvalid(
            "changes names no kind of change",
            hint="Use some of insert, update, delete, or leave it out for all",
        )
    wanted = [
        change_type for kind in requested for change_type in (_UPDATES if kind == "update" else (kind,))
    ]
    for kind in wanted:
        if kind not in CHANGE_TYPES:
            raise OptionInvalid(
                f"change type {kind!r} is unknown",
                hint=f"Use some of insert, update, delete, {', '.join(_UPDATES)}",
            )
    return tuple(dict.fromkeys(wanted))
