# SPDX-License-Identifier: Apache-2.0
"""Configurations of other systems, written as in the documentation of these systems."""

from pathlib import Path

from penstock.migrate.report import Entry, Report

ORIGINALS = Path(__file__).parent / "originals"


def entries_by_name(report: Report) -> dict[str, Entry]:
    """Return the entries of all properties that are set, by name."""
    return {entry.name: entry for entry in report.entries if entry.is_set}
