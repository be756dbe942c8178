# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: settings and tables of a server that would break or hide changes."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.check.facts import Finding
from penstock.check.precheck import precheck
from penstock.cli.shared.rendering import write_json
from penstock.errors import OptionInvalid
from penstock.model import ServerAddress, TablePatterns, is_server_url
from penstock.mysql.connection import READING_SECONDS_MAX, connect

EXIT_FINDINGS = 1

# The marks of the severities, the most severe first.
_MARKS = {"error": ("ERROR", "bold red"), "warning": ("warn ", "yellow"), "ok": ("ok   ", "green")}


def run(
    server: Annotated[str, typer.Argument(metavar="mysql://...", help="The server: mysql://user@host:port.")],
    tables: Annotated[
        str | None, typer.Option(help="Check only these tables: patterns such as shop.orders,shop.*.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line instead of a report.")
    ] = False,
    user: Annotated[str | None, typer.Option(help="The account on the server.")] = None,
    password_file: Annotated[
        str | None, typer.Option(help="A file with the password. PENSTOCK_PASSWORD also works.")
    ] = None,
) -> None:
    """Report server settings that hide or corrupt changes, each with the statement that fixes it.

    Exits with 1 if a finding is an error.
    """
    if not is_server_url(server):
        raise OptionInvalid(
            f"{server!r} is no server", hint="Write mysql://user@host:3306; for files use penstock inspect"
        )
    address = ServerAddress.parse(server, user=user, password_file=password_file)
    with connect(address, READING_SECONDS_MAX) as connection:
        findings = precheck(connection, TablePatterns(tables))
    findings.sort(key=lambda finding: list(_MARKS).index(finding.severity))
    if json:
        write_json(sys.stdout, (_as_json(finding) for finding in findings))
    else:
        _report(Console(highlight=False), str(address), findings)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(EXIT_FINDINGS)


def _as_json(finding: Finding) -> dict[str, str | None]:
    return {
        "check": finding.name,
        "severity": finding.severity,
        "what": finding.what,
        "statement": finding.statement,
    }


def _report(console: Console, server: str, findings: list[Finding]) -> None:
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        console.print(Text.assemble((mark, style), f"  {finding.name}: {finding.what}"), soft_wrap=True)
        for line in (finding.statement or "").splitlines():
            # Print the statement on its own line, so that it can be copied.
            console.print(Text(f"         {line}", "cyan"), soft_wrap=True)
    counts = {name: sum(finding.severity == name for finding in findings) for name in _MARKS}
    console.print(f"{server}: {counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok")
