# SPDX-License-Identifier: Apache-2.0
"""Which server of a source's cluster answers, and the source as it is read there."""

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
    """Return the identity of the server that answers at an address, None where none does."""
    try:
        with connect(address) as connection:
            return connection.identity().key
    except PenstockError as problem:
        _log.warning("a server is of no use", server=str(address), why=str(problem))
        return None


def read_at(source: PipelineSource, address: ServerAddress) -> PipelineSource:
    """Return a source whose tables, and whose log where that is a server's, are read at an address."""
    options = source.options
    if options.address is not None:
        options = replace(options, address=address)
    return replace(source, options=options, server=address)


def at_answering_servers(
    settings: PipelineSettings, offsets: Mapping[str, Mapping[str, Any]]
) -> PipelineSettings:
    """Return the settings with a server of each source that answers: the one that the source's offset is of,
    else the first. Where none answers, the first stays, and reading it says why."""
    return replace(
        settings,
        sources=tuple(
            source if len(source.servers) < 2 else _answering(source, offsets.get(source.name, {}))
            for source in settings.sources
        ),
    )


def _answering(source: PipelineSource, offset: Mapping[str, Any]) -> PipelineSource:
    answering: list[ServerAddress] = []
    for address in source.servers:
        key = key_of_server(address)
        if key is not None and key == offset.get("server_key"):
            return read_at(source, address)
        if key is not None:
            answering.append(address)
    return read_at(source, answering[0]) if answering else source
