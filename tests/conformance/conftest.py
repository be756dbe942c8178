# SPDX-License-Identifier: Apache-2.0
"""Run each test of the sinks' conformance suite on every backend to which the test applies, discovered by
name.

Some backends are tested only in the deep tier. Everyday runs cover the shared behaviour by running the same
tests on the other backends.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.changes import Target
from penstock.sinks.sink import Sink
from tests.conformance.batches import COLUMNS, MakeTarget
from tests.support.pipeline.changes_made import target_of
from tests.support.sinks.backends import SinkBackend, SqlBackend, running_backend, sink_backends
from tests.support.suite.fixture_types import MissingPart
from tools.servers import Server

_databases = itertools.count(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the backends of a test, and with `variant` the settings of each."""
    if "sink_backend" not in metafunc.fixturenames:
        return
    runs_on = getattr(metafunc.function, "runs_on", lambda backend: backend.MIRRORS)
    backends = {name: backend for name, backend in sink_backends().items() if runs_on(backend)}
    test = f"{metafunc.definition.nodeid.partition('::')[0]}::{metafunc.function.__name__}"
    if all(backend.DEEP for backend in backends.values()):
        raise pytest.UsageError(f"{test} runs on no backend of the everyday tier")
    deep = [pytest.mark.deep(guard=test)]
    if "variant" in metafunc.fixturenames:
        names = ["sink_backend", "variant"]
        cases = [
            pytest.param(
                name,
                settings,
                id=f"{name}-{variant}",
                marks=deep if backend.DEEP or variant in backend.DEEP_VARIANTS else [],
            )
            for name, backend in backends.items()
            if issubclass(backend, SqlBackend)
            for variant, settings in backend.VARIANTS.items()
        ]
    else:
        names = ["sink_backend"]
        cases = [
            pytest.param(name, id=name, marks=deep if backend.DEEP else [])
            for name, backend in backends.items()
        ]
    metafunc.parametrize(names, cases, indirect=["sink_backend"], scope="module")


@pytest.fixture(scope="module")
def sink_backend(
    request: pytest.FixtureRequest, server_of: Callable[[str], Server], missing_part: MissingPart
) -> SinkBackend:
    """Yield each of the test's backends while it runs."""
    return running_backend(request.param, request.config, server_of, missing_part)


@pytest.fixture
def backend(sink_backend: SinkBackend) -> SinkBackend:
    """The backend of the test."""
    return sink_backend


@pytest.fixture
def sink(backend: SinkBackend) -> Iterator[Sink]:
    """A sink that mirrors tables."""
    sink = backend.sink()
    yield sink
    sink.close()


@pytest.fixture
def table() -> MakeTarget:
    """Return a function that creates targets in the test's own database."""
    database = f"conform_{next(_databases)}"

    def make(
        columns: Any = None, key: Sequence[str] = ("id",), *, table: str = "orders", **more: Any
    ) -> Target:
        return target_of(columns or COLUMNS, key, name=f"{database}.{table}", **more)

    return make
