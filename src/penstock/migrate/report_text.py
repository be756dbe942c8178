# SPDX-License-Identifier: Apache-2.0
"""The report of a migration as Markdown."""

from collections.abc import Iterator
from itertools import groupby

from penstock.migrate.report import Entry, Report


def report_text(original: str, report: Report) -> str:
    """Return the whole report: decisions to make, remaining tasks, and every property by file."""
    return "\n".join(_lines(original, report)) + "\n"


def _lines(original: str, report: Report) -> Iterator[str]:
    yield f"# Migration from {original}"
    yield ""
    yield "## Needs your attention"
    yield ""
    for entry in report.attention:
        yield f"- `{entry.name}` in {entry.location}: {entry.outcome}. {entry.remark}"
    if not report.attention:
        yield "Nothing: every property that was set keeps its meaning, or is not needed."
    yield ""
    yield "## What to do next"
    yield ""
    for number, step in enumerate(report.steps, 1):
        yield f"{number}. {step}"
    for location, entries in groupby(report.entries, lambda entry: entry.location):
        of_location = list(entries)
        yield ""
        yield f"## {location}"
        yield ""
        yield from _table([entry for entry in of_location if entry.is_set])
        unset = [entry for entry in of_location if not entry.is_set]
        if unset:
            yield ""
            yield "Not set there; what Penstock makes of them:"
            yield ""
            yield from _table(unset)


def _table(entries: list[Entry]) -> Iterator[str]:
    if not entries:
        yield "No properties are set."
        return
    yield "| property | outcome | |"
    yield "| --- | --- | --- |"
    for entry in entries:
        remark = entry.remark.replace("|", "\\|")
        yield f"| `{entry.name}` | {entry.outcome} | {remark} |"
