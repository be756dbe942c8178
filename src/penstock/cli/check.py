# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: find server settings and tables that would break capture or hide changes."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.shared.rendering import counted, write_json
from penstock.errors import OptionInvalid
from penstock.model import ServerAddress, TablePatterns, is_server_url

if TYPE_CHECKING:
    from penstock.check.facts import Finding
    from penstock.settings.daemon import InstanceSettings

EXIT_FINDINGS = 1

# The marks of the severities, the most severe first.
_MARKS = {"error": ("ERROR", "bold red"), "warning": ("warn ", "yellow"), "ok": ("ok   ", "green")}


def run(
    server: Annotated[
        str,
        typer.Argument(
            metavar="mysql://...",
            help="The server: mysql://user@host:port; the PD members of a TiDB cluster: tidb://pd1:2379,pd2;"
            " or what TiCDC wrote: ticdc+file:///folder, ticdc+kafka://broker:9092/topic.",
        ),
    ],
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
    config: Annotated[
        Path | None,
        typer.Option(
            help="For a TiDB cluster or TiCDC: settings with its instance, for tidb.sql, tidb.status, tls and"
            " ticdc."
        ),
    ] = None,
) -> None:
    """Report server settings that hide or corrupt changes, each with the statement that fixes it.

    Exits with 1 if a finding is an error.
    """
    from penstock.check.precheck import precheck
    from penstock.mysql.connection import READING_SECONDS_MAX, connect
    from penstock.settings.ticdc import is_ticdc_url
    from penstock.settings.tidb import is_tidb_url

    if tables is not None and (is_tidb_url(server) or is_ticdc_url(server)):
        raise OptionInvalid(
            "--tables is for MySQL and MariaDB: the check of a cluster is about all of it",
            hint="Leave --tables out",
        )
    if is_tidb_url(server):
        _print(server, list(_cluster_findings(server, config)), json=json)
        return
    if is_ticdc_url(server):
        _print(server, _sink_findings(server, config), json=json)
        return
    if not is_server_url(server):
        raise OptionInvalid(
            f"{server!r} is no server", hint="Write mysql://user@host:3306; for files use penstock inspect"
        )
    address = ServerAddress.parse(server, user=user, password_file=password_file)
    with connect(address, READING_SECONDS_MAX) as connection:
        findings = precheck(connection, TablePatterns(tables))
    _print(str(address), findings, json=json)


def _sink_findings(source: str, config: Path | None) -> "list[Finding]":
    """Return the findings about TiCDC's output, read with the settings of its instance or with default
    settings.
    """
    from penstock.settings.ticdc import is_ticdc_kafka

    settings = _instance_of(source, config).ticdc
    if not is_ticdc_kafka(source):
        from penstock.ticdc.precheck import precheck_sink
        from penstock.ticdc.storage import open_storage

        return list(precheck_sink(open_storage(source), settings))
    from penstock.ticdc.kafka_messages import KafkaMessages
    from penstock.ticdc.kafka_precheck import precheck_topics
    from penstock.ticdc.kafka_reader import open_reader

    with closing(open_reader(source, settings)) as reader:
        return list(precheck_topics(reader, KafkaMessages(settings.zone)))


def _cluster_findings(source: str, config: Path | None) -> "Iterator[Finding]":
    """Yield the findings about a TiDB cluster, read with the settings of its instance or with default
    settings.
    """
    from penstock.settings.tidb import pd_addresses

    # Imported here because only a TiDB cluster needs gRPC.
    from penstock.tidb.cluster import Cluster
    from penstock.tidb.drainer import cluster_tls, job_source
    from penstock.tidb.precheck import precheck_cluster

    instance = _instance_of(source, config)
    cluster = Cluster(pd_addresses(source), cluster_tls(instance.tidb))
    jobs = job_source(instance, cluster)
    try:
        yield from precheck_cluster(cluster, jobs, next(iter(instance.addresses()), None))
    finally:
        jobs.close()
        cluster.close()


def _instance_of(source: str, config: Path | None) -> "InstanceSettings":
    """Return the instance of a cluster in a settings file, or an instance with defaults. Raises
    OptionInvalid.
    """
    from penstock.settings.daemon import InstanceSettings, load_settings

    try:
        places = _places(source)
    except ValueError as problem:
        raise OptionInvalid(str(problem)) from problem
    if config is None:
        return InstanceSettings(source=source)
    for instance in load_settings(config).instances.values():
        if (instance.is_tidb or instance.is_ticdc) and _places(instance.source) & places:
            return instance
    raise OptionInvalid(
        f"{config} has no instance with the source {source}", hint="Write its source as there"
    )


def _places(source: str) -> set[str]:
    """Return the addresses that identify a source: the PD members of a cluster, or the URL of a sink. Raises
    ValueError.
    """
    from penstock.settings.ticdc import check_ticdc_url, is_ticdc_url
    from penstock.settings.tidb import pd_addresses

    return {check_ticdc_url(source).strip()} if is_ticdc_url(source) else set(pd_addresses(source))


def _print(server: str, findings: "list[Finding]", *, json: bool) -> None:
    """Print the findings, the most severe first. Exits with 1 if one is an error."""
    from penstock.check.servers import finding_to_json

    findings.sort(key=lambda finding: list(_MARKS).index(finding.severity))
    if json:
        write_json(sys.stdout, (finding_to_json(finding) for finding in findings))
    else:
        _report(Console(highlight=False), server, findings)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(EXIT_FINDINGS)


def _report(console: Console, server: str, findings: "list[Finding]") -> None:
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        console.print(Text.assemble((mark, style), f"  {finding.name}: {finding.what}"), soft_wrap=True)
        for line in (finding.statement or "").splitlines():
            # Print the statement on its own line, so that it can be copied.
            console.print(Text(f"         {line}", "cyan"), soft_wrap=True)
    counts = {name: sum(finding.severity == name for finding in findings) for name in _MARKS}
    errors, warnings = counted(counts["error"], "error"), counted(counts["warning"], "warning")
    console.print(f"{server}: {errors}, {warnings}, {counts['ok']} ok")
