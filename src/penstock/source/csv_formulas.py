# SPDX-License-Identifier: Apache-2.0
"""Keeps spreadsheets from running cells of CSV files as formulas.

Source: OWASP, "CSV Injection". A cell that could be run is guarded by a leading apostrophe, which
spreadsheets do not display.
"""

import re

# A spreadsheet runs a text that begins with one of these characters, except for numbers and times. If a text
# already has apostrophes before such a character, one more is added, so that a reader can always remove one
# apostrophe.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER_OR_TIME = re.compile(r"[-+]?\d+(:\d+)*(\.\d+)?([eE][-+]?\d+)?")


def guard_formula(text: str) -> str:
    """Return a text, with an apostrophe before it if a spreadsheet would run it as a formula."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER_OR_TIME.fullmatch(text) else text
