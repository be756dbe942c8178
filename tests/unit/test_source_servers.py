# SPDX-License-Identifier: Apache-2.0
"""A comparison reads from a server that is reachable in the cluster of its source."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.pipeline import source_servers
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.source_servers import at_answering_servers
from penstock.pipeline.state import PipelineState
from penstock.pipeline.verify import verify as verify_module


class Stopped(Exception):
    """Ends a comparison once the comparison has chosen its server."""


@pytest.fixture
def settings(tmp_path: Path) -> PipelineSettings:
    source = {"url": "mysql://nobody@127.0.0.1:1", "name": "shop", "servers": ["127.0.0.1:2", "127.0.0.1:3"]}
    values = {"name": "test", "source": source, "sink": {"delta": {"path": str(tmp_path)}}}
    return pipeline_of_values(values, tmp_path)


def port_of(settings: PipelineSettings) -> int:
    (source,) = settings.sources
    assert source.server is not None
    assert source.options.address == source.server
    return source.server.port


@pytest.mark.parametrize(
    ("answering", "offset", "port"),
    [
        ({1: "mysql:a", 2: "mysql:b"}, {}, 1),
        ({2: "mysql:b", 3: "mysql:c"}, {}, 2),
        ({1: "mysql:a", 3: "mysql:c"}, {"server_key": "mysql:c"}, 3),
        ({2: "mysql:b"}, {"server_key": "mysql:a"}, 2),
        ({}, {"server_key": "mysql:a"}, 1),
    ],
)
def test_server_of_the_position_is_read_or_else_the_first_reachable_one(
    settings: PipelineSettings,
    monkeypatch: pytest.MonkeyPatch,
    answering: dict[int, str],
    offset: dict[str, str],
    port: int,
) -> None:
    monkeypatch.setattr(source_servers, "key_of_server", lambda address: answering.get(address.port))
    assert port_of(at_answering_servers(settings, {"shop": offset})) == port


def test_comparison_reads_a_reachable_server(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        source_servers, "key_of_server", lambda address: "mysql:b" if address.port == 2 else None
    )

    def compare(settings: PipelineSettings, *_: object) -> None:
        assert port_of(settings) == 2
        raise Stopped

    monkeypatch.setattr(verify_module, "compared_tables", compare)
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        state.write(replace(state.take(), offsets={"shop": {"server_key": "mysql:a"}}))
    with pytest.raises(Stopped):
        verify_module.verify(settings)
