# SPDX-License-Identifier: Apache-2.0
"""`penstock init`: write commented files for a pipeline and for a daemon, to start from."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import OptionInvalid
from penstock.model import is_server_url

# A line that begins with # and no space is a setting with an example; remove the # to set it.
_PIPELINE = """\
# A pipeline: penstock run pipeline.yaml --local --until caught-up
# Every setting: docs/reference/pipelines.md. For editors: penstock run --json-schema
# A line that begins with # and no space is a setting with an example value.

# The position is stored under the name. Rename a pipeline only with a fresh state.
name: shop

source:
  # Try the account first: penstock check {source}
  url: {source}
  # Instead of the password itself, name where it is. PENSTOCK_PASSWORD is read if nothing is set.
  #password_file: /run/secrets/repl
  # Rows carry this name as their instance. Set it if the server's host may change.
  #name: db1
  # More servers of the cluster, for fail-over by GTID.
  #servers: [db2, "db3:3307"]
  # Patterns: shop.orders, shop.*, /regex/
  tables: ["{tables}"]
  #exclude: [shop.audit_*]
  #tls: {{mode: verify_identity, ca: /etc/ssl/db.pem}}

# What is read from the tables before their changes: full, or none for changes only.
load:
  mode: full
  #parallel: 4
  #where: {{shop.orders: "created_at >= '2026-01-01'"}}

# Changes of each row on the way, in this order.
#steps:
#  - mask: {{columns: {{email: hash}}}}

# Exactly one sink. Others: docs/guides/sinks
sink:
  # Parquet files with every change. This sink needs no extra package.
  files:
    path: {directory}/feed
  # A mirror of each table instead: pip install 'penstock[delta]', then
  # delta: {{path: /lake}}

# One table with an error, and rows that a step cannot handle: stop, or go on without them.
errors:
  table: stop
  rows: stop
  #retry_for: 600s

# Where the position and the progress are stored.
state: sqlite://{directory}/state.db
"""

_DAEMON = """\
# The daemon: penstock serve penstock.yaml --check, then without --check
# Every setting: docs/guides/serve.md. For editors: penstock serve --schema
# A line that begins with # and no space is a setting with an example value.

listen:
  # An address other than loopback needs a token, or accounts in access.
  http: 127.0.0.1:7070
  #canal: 127.0.0.1:11111
  #token_env: PENSTOCK_TOKEN
  #tls: {{cert: /etc/penstock/cert.pem, key: /etc/penstock/key.pem}}

log:
  folder: {directory}/log
  # How long readers may stay away. The first limit that is reached counts.
  retention:
    age: 24h
    #bytes: 500GB
  #cold_after: 2h

instances:
  # Readers name it: penstock://127.0.0.1:7070/shop
  shop:
    source: {source}
    #password_file: /run/secrets/repl
    #servers: [db2, "db3:3307"]
    # Where an empty log starts: earliest, latest, a position, a GTID set or a time.
    #start: latest
"""


def run(
    directory: Annotated[Path, typer.Argument(help="The folder for pipeline.yaml and penstock.yaml.")] = Path(
        "."
    ),
    source: Annotated[
        str, typer.Option(help="The server's URL, without a password.")
    ] = "mysql://repl@127.0.0.1:3306",
    tables: Annotated[str, typer.Option(help="A pattern of the tables to read.")] = "shop.*",
) -> None:
    """Write a pipeline file and a daemon's settings file, with comments on the most common settings.

    Existing files are never overwritten.
    """
    if not is_server_url(source):
        raise OptionInvalid(f"--source {source} is not a server's URL", hint="Write mysql://user@host:3306")
    texts = {"pipeline.yaml": _PIPELINE, "penstock.yaml": _DAEMON}
    existing = [name for name in texts if (directory / name).exists()]
    if existing:
        raise OptionInvalid(
            f"{directory / existing[0]} exists", hint="Name another folder: penstock init FOLDER"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        content = text.format(source=source, tables=tables, directory=directory.absolute())
        (directory / name).write_text(content)
        typer.echo(f"wrote {directory / name}")
    typer.echo(
        f"\nNext: penstock check {source}"
        f"\n      penstock run {directory / 'pipeline.yaml'} --dry-run"
        f"\n      penstock serve {directory / 'penstock.yaml'} --check"
    )
