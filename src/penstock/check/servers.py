# SPDX-License-Identifier: Apache-2.0
"""The findings of `penstock check` for each server of a cluster, as plain values."""

from collections.abc import Sequence
from typing import Any

from penstock.check.facts import Finding
from penstock.check.precheck import precheck
from penstock.errors import PenstockError
from penstock.model import ServerAddress, TablePatterns
from penstock.mysql.connection import READING_SECONDS_MAX, connect

# Severities, the most severe first.
SEVERITIES = ("error", "warning", "ok")


def check_servers(addresses: Sequence[ServerAddress], tables: TablePatterns) -> list[dict[str, Any]]:
    """Return the findings about each server, the most severe first, or why the server cannot be queried."""
    return [_check_server(address, tables) for address in addresses]


def _check_server(address: ServerAddress, tables: TablePatterns) -> dict[str, Any]:
    try:
        with connect(address, READING_SECONDS_MAX) as connection:
            findings = precheck(connection, tables)
    except PenstockError as problem:
        return {"server": str(address), "findings": [], "problem": problem.message, "hint": problem.hint}
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    shown = [finding_to_json(finding) for finding in findings]
    return {"server": str(address), "findings": shown, "problem": None, "hint": None}


def finding_to_json(finding: Finding) -> dict[str, str | None]:
    """Return a finding as plain JSON values."""
    return {
        "check": finding.name,
        "severity": finding.severity,
        "what": finding.what,
        "statement": finding.statement,
    }
