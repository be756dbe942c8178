# SPDX-License-Identifier: Apache-2.0
"""Cells of CSV files that spreadsheets must not run as formulas.

Source: OWASP, "CSV Injection". A spreadsheet hides the apostrophe before such a text.
"""

import re

# A spreadsheet runs a text that begins with one of these characters, except for numbers and times. The
# apostrophes before them count too, so that a reader can remove the one that was added.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER_OR_TIME = re.compile(r"[-+]?\d+(:\d+)*(\.\d+)?([eE][-+]?\d+)?")


def guard_formula(text: str) -> str:
    """Return a text with an apostrophe before it if a spreadsheet would take it for a formula."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER_OR_TIME.fullmatch(text) else text
