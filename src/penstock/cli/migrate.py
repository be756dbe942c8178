# SPDX-License-Identifier: Apache-2.0
"""`penstock migrate`: convert settings of Canal, Debezium, Maxwell, Ptubes, Bifrost or Drainer."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.shared.rendering import Field, LineWriter, write_json
from penstock.errors import OptionInvalid

if TYPE_CHECKING:
    from penstock.migrate.output import Migration, SecretsIn

HELP = "Write settings from those of Canal, Debezium, Maxwell, Ptubes, Bifrost or Drainer."

EXIT_ATTENTION = 1

Output = Annotated[Path, typer.Option(help="The folder to write, which must be new or empty.")]
Secrets = Annotated[
    str,
    typer.Option(
        help="Where passwords go: file, below the folder; or env, environment variables that you set."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and report only; write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for each property.")]
ZooKeeper = Annotated[
    str | None, typer.Option(help="Read positions from ZooKeeper, host:port,host:port.", show_default=False)
]

_COLUMNS = (Field("location", 28), Field("property", 46), Field("outcome", 11), Field("remark", 0))
_OUTPUT_DEFAULT = Path("penstock-migrated")


def canal(
    conf_dir: Annotated[Path, typer.Argument(help="Canal's conf folder, with canal.properties.")],
    output: Output = _OUTPUT_DEFAULT,
    zookeeper: ZooKeeper = None,
    client_password_file: Annotated[
        Path | None, typer.Option(help="A file with the password of canal.user, which Canal keeps as a hash.")
    ] = None,
    secrets: Secrets = "file",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write a daemon's settings for Canal's clients, with cursors, or pipelines if Canal writes to Kafka."""
    from penstock.migrate.canal import migrate_canal

    with _migrating("canal", output, secrets, dry_run=dry_run, as_json=json) as migration:
        password = None if client_password_file is None else _secret_of(client_password_file)
        migrate_canal(conf_dir, migration, zookeeper=zookeeper, password=password)


def debezium(
    connector: Annotated[Path, typer.Argument(help="The connector's JSON, or Debezium Server's properties.")],
    output: Output = _OUTPUT_DEFAULT,
    offsets: Annotated[
        Path | None, typer.Option(help="The saved response of GET /connectors/NAME/offsets.")
    ] = None,
    kafka: Annotated[
        str | None, typer.Option(help="The brokers of Kafka Connect's worker, host:port,host:port.")
    ] = None,
    secrets: Secrets = "file",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write a pipeline that continues a connector for MySQL or MariaDB in the same topics."""
    from penstock.migrate.debezium import migrate_debezium

    with _migrating("debezium", output, secrets, dry_run=dry_run, as_json=json) as migration:
        migrate_debezium(connector, migration, offsets=offsets, kafka=kafka)


def maxwell(
    config: Annotated[Path, typer.Argument(help="Maxwell's config.properties.")],
    output: Output = _OUTPUT_DEFAULT,
    start: Annotated[
        str | None, typer.Option(help="Where changes start: a position, a GTID set or a time.")
    ] = None,
    from_server: Annotated[
        bool, typer.Option("--from-server", help="Read the position from Maxwell's table positions.")
    ] = False,
    secrets: Secrets = "file",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write a pipeline that continues Maxwell."""
    from penstock.migrate.maxwell import migrate_maxwell

    with _migrating("maxwell", output, secrets, dry_run=dry_run, as_json=json) as migration:
        migrate_maxwell(config, migration, start=start, from_server=from_server)


def ptubes(
    conf_dir: Annotated[Path, typer.Argument(help="The reader's folder, with reader.conf.")],
    output: Output = _OUTPUT_DEFAULT,
    zookeeper: ZooKeeper = None,
    secrets: Secrets = "file",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write a daemon's settings for Ptubes clients. The daemon's logs begin before the clients' storage
    points.
    """
    from penstock.migrate.ptubes import migrate_ptubes

    with _migrating("ptubes", output, secrets, dry_run=dry_run, as_json=json) as migration:
        migrate_ptubes(conf_dir, migration, zookeeper=zookeeper)


def bifrost(
    export: Annotated[Path, typer.Argument(help="The JSON file of Backup - Export.")],
    output: Output = _OUTPUT_DEFAULT,
    secrets: Secrets = "file",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write a pipeline for each data source and target."""
    from penstock.migrate.bifrost import migrate_bifrost

    with _migrating("bifrost", output, secrets, dry_run=dry_run, as_json=json) as migration:
        migrate_bifrost(export, migration)


def drainer(
    config: Annotated[Path, typer.Argument(help="The Drainer's configuration, drainer.toml.")],
    output: Output = _OUTPUT_DEFAULT,
    savepoint: Annotated[
        Path | None, typer.Option(help="The Drainer's checkpoint: the file savepoint in its data-dir.")
    ] = None,
    from_server: Annotated[
        bool, typer.Option("--from-server", help="Read the checkpoint from its table in the target.")
    ] = False,
    secrets: Secrets = "file",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write the settings of a daemon that replaces a Drainer, and a pipeline that continues it."""
    from penstock.migrate.drainer import migrate_drainer

    with _migrating("drainer", output, secrets, dry_run=dry_run, as_json=json) as migration:
        migrate_drainer(config, migration, savepoint=savepoint, from_server=from_server)


@contextmanager
def _migrating(
    original: str, output: Path, secrets: str, *, dry_run: bool, as_json: bool
) -> "Iterator[Migration]":
    """Yield a migration. After the block, write its folder and print the report; exit with 1 if something
    needs a decision.
    """
    from penstock.migrate.output import Migration

    choices: dict[str, SecretsIn] = {"file": "file", "env": "env"}
    if secrets not in choices:
        raise OptionInvalid(f"--secrets {secrets}", hint="Write --secrets file or --secrets env")
    migration = Migration(original, choices[secrets])
    yield migration
    files = migration.write(output, dry_run=dry_run)
    _print_report(migration, files, output, dry_run=dry_run, as_json=as_json)
    if migration.report.attention:
        raise typer.Exit(EXIT_ATTENTION)


def _secret_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionInvalid(f"{path} cannot be read: {problem}") from problem


def _print_report(
    migration: "Migration", files: list[str], output: Path, *, dry_run: bool, as_json: bool
) -> None:
    from penstock.migrate.report import Outcome

    report = migration.report
    if as_json:
        write_json(
            sys.stdout,
            (
                {
                    "location": entry.location,
                    "property": entry.name,
                    "outcome": entry.outcome,
                    "remark": entry.remark,
                    "set": entry.is_set,
                    "attention": entry.attention,
                }
                for entry in report.entries
            ),
        )
    else:
        counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in Outcome)
        typer.echo(f"properties set in the original: {counts}")
        writer = LineWriter(sys.stdout, _COLUMNS)
        for entry in report.attention:
            writer.write([entry.location, entry.name, entry.outcome, entry.remark])
        for number, step in enumerate(report.steps, 1):
            typer.echo(f"{number}. {step}")
        verb = "would be written to" if dry_run else "are in"
        typer.echo(f"{', '.join(files)} {verb} {output}")
    for name in migration.variables:
        typer.echo(f"set the environment variable {name}", err=True)


VERBS = {
    "canal": canal,
    "debezium": debezium,
    "maxwell": maxwell,
    "ptubes": ptubes,
    "bifrost": bifrost,
    "drainer": drainer,
}
