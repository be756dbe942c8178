# SPDX-License-Identifier: Apache-2.0
"""Values of rows as text for people."""

import json
from typing import Any

# Marks that are shown in place of a value. A text that looks like a mark is shown in quotes.
_MARKS = frozenset({"NULL", "(not logged)", "(masked)", "-"})


def shown_text(value: Any) -> str:
    """Return a JSON value as text for people.

    NULL is shown without quotes. A text is shown in quotes if it is "NULL", looks like one of the other
    unquoted marks, or looks like a quoted text.
    """
    if value is None:
        return "NULL"
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    in_quotes = value in _MARKS or (value.startswith('"') and value.endswith('"'))
    return json.dumps(value, ensure_ascii=False) if in_quotes else value
