# SPDX-License-Identifier: Apache-2.0
"""Options and arguments that several verbs share.

This module imports only what help texts need, so that `--help` prints immediately.
"""

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import OptionInvalid

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# --- A daemon --------------------------------------------------------------------------------

Instance = Annotated[str, typer.Argument(help="The daemon's instance.")]
Url = Annotated[str | None, typer.Option(help="The daemon's URL. Default: http://127.0.0.1:7070.")]
DaemonConfig = Annotated[
    Path | None,
    typer.Option(help="The daemon's settings file, which provides its address and token."),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Connect over TLS, and trust the certificate authorities of this PEM file.",
    ),
]

# --- A log's folder --------------------------------------------------------------------------

LogName = Annotated[
    str | None,
    typer.Argument(metavar="LOG", help="The log's folder, or with --config the name of an instance."),
]
LogConfig = Annotated[
    Path | None, typer.Option(help="The daemon's settings file, which locates the instance's log.")
]

# --- A fleet ---------------------------------------------------------------------------------

MemberConfig = Annotated[
    Path | None, typer.Option(help="A member's settings file, which names the coordination store.")
]
Coordination = Annotated[
    str | None,
    typer.Option(help="The coordination store: sqlite:///path or zookeeper://host:2181/path."),
]

# --- A subscription --------------------------------------------------------------------------

SubscriptionName = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription: NAME or INSTANCE/NAME.")
]
StoreConfig = Annotated[
    Path | None,
    typer.Option(
        help="The daemon's settings file, which provides the coordination store and the daemon's address."
    ),
]

# --- A pipeline ------------------------------------------------------------------------------

PipelineFile = Annotated[Path, typer.Argument(metavar="pipeline.yaml", help="The pipeline file.")]
EachSink = Annotated[str | None, typer.Option(help="The sink, if the pipeline has several. Default: all.")]


def parse_pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """Parse a repeatable name=value option. Raises OptionInvalid."""
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise OptionInvalid(f"{option} {text!r} has no value", hint=f"Write {option} team=orders")
        pairs[name] = value
    return pairs
