# SPDX-License-Identifier: Apache-2.0
"""`penstock export`: print instances, jobs and subscriptions in the form that penstock apply reads."""

from typing import Annotated

import typer

from penstock.cli.shared.fleet_store import opened_store
from penstock.cli.shared.options import Coordination, MemberConfig, parse_pairs


def run(
    label: Annotated[
        list[str] | None, typer.Option(help="Only what has this label, name=value. May be repeated.")
    ] = None,
    config: MemberConfig = None,
    coordination: Coordination = None,
) -> None:
    """Print instances, jobs and subscriptions as YAML, which penstock apply reads.

    ${NAME} and the names of files stay as written. A secret in plain text is replaced by a variable, which
    standard error names. Progress, checkpoints and targets are not exported.
    """
    from penstock.cli.shared.units import export_documents
    from penstock.settings.file import documents_text, settings_text, yaml_documents

    labels = parse_pairs("--label", label)
    with opened_store(config, coordination) as store:
        sections = {} if config is None else yaml_documents(settings_text(config))[0]["instances"]
        exported = list(export_documents(store, labels, sections))
    for document in exported:
        for remark in document.remarks:
            typer.echo(remark, err=True)
    documents = [document.values for document in exported if document.values is not None]
    if documents:
        typer.echo(documents_text(documents), nl=False)
    else:
        typer.echo("nothing has these labels" if label else "there is nothing to export", err=True)
