# SPDX-License-Identifier: Apache-2.0
"""Chooses a server of a source's cluster that answers, and reads the source from that server."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

from penstock.errors import PenstockError
from penstock.model import ServerAddress
from penstock.mysql.connection import connect
from penstock.pipeline.settings import PipelineSettings, PipelineSource

_log = structlog.get_logger(__name__)


def key_of_server(address: ServerAddress) -> str | None:
    """Return the identity of the server at an address, None if it does not answer."""
    try:
        with connect(address) as connection:
            return connection.identity().key
    except PenstockError as problem:
        _log.warning("a server is of no use", server=str(address), why=str(problem))
        return None


def read_at(source: PipelineSource, address: ServerAddress) -> PipelineSource:
    """Return the source with its tables read from the server at this address. If the log is also read from a
    server, it is read there too.
    """
    options = source.options
    if options.address is not None:
        options = replace(options, address=address)
    return replace(source, options=options, server=address)


def at_answering_servers(
    settings: PipelineSettings, offsets: Mapping[str, Mapping[str, Any]]
) -> PipelineSettings:
    """Return the settings with an answering server for each source.

    The server that the source's offset refers to is preferred, otherwise the first that answers. If none
    answers, the first server is kept, so that reading it raises the error.
    """
    return replace(
        settings,
        sources=tuple(
            source if len(source.servers) < 2 else _choose_server(source, offsets.get(source.name, {}))
            for source in settings.sources
        ),
    )


def _choose_server(source: PipelineSource, offset: Mapping[str, Any]) -> PipelineSource:
    answering: list[ServerAddress] = []
    for address in source.servers:
        key = key_of_server(address)
        if key is not None and key == offset.get("server_key"):
            return read_at(source, address)
        if key is not None:
            answering.append(address)
    return read_at(source, answering[0]) if answering else source
