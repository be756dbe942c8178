# SPDX-License-Identifier: Apache-2.0
"""The page of the options of `format("penstock")`."""

from penstock.spark.options import KNOWN_OPTIONS
from tools.document.markdown import document, table


def page() -> str:
    """Return the page."""
    head = (
        'Options of `spark.read.format("penstock")` and `spark.readStream.format("penstock")`. Names are\n'
        "case-insensitive; an unknown name is an error. Sizes may end in `k`, `m`, `g` or `t`."
    )
    rows = [(f"`{name}`", meaning) for name, meaning in KNOWN_OPTIONS.items()]
    return document(
        "Spark options", "src/penstock/spark/options.py", head, table(("option", "meaning"), rows)
    )
