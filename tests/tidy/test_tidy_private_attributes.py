# SPDX-License-Identifier: Apache-2.0
"""The code uses private attributes of other libraries only if they are listed here, exist, and are pinned by
an upper bound on the library's version.

A library may change a private attribute in any release. Because each of them is listed below, a new release
fails this test, which names the attribute, instead of failing in production.
"""

import ast
import inspect
import itertools
import re
import tomllib
from pathlib import Path

import pytest
import redis
import uvicorn
from deltalake.fs import DeltaStorageHandler
from pymysql.connections import Connection
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.tidy.tree import ROOT, files, python_functions, python_nodes

PYMYSQL = {
    "_sock",
    "_rfile",
    "_read_timeout",
    "_affected_rows",
    "_execute_command",
    "_read_query_result",
    "_read_ok_packet",
}
REDIS = {"_sock"}
DELTALAKE = {"_handler"}
# Underscore names that libraries document: error codes of librdkafka, and the end of a process.
DOCUMENTED = {"_PARTITION_EOF", "_AUTO_OFFSET_RESET", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "_exit"}
UVICORN_PROTOCOL = {
    "connection_made",
    "connection_lost",
    "data_received",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
    "send_400_response",
}
UVICORN_PROTOCOL_STATE = {"app_state", "client", "conn", "cycle", "loop", "transport"}
PINNED = ("PyMySQL", "redis", "uvicorn", "sqlglot", "deltalake")


def test_every_private_attribute_of_a_library_is_listed() -> None:
    paths = files(".py", below="src/penstock")
    own = {name for path in paths for name in own_names(path)}
    used = {
        node.attr
        for path in paths
        for node in python_nodes(path, ast.Attribute)
        if re.match("_[^_]", node.attr) and node.attr not in own
    }
    assert used == PYMYSQL | REDIS | DELTALAKE | DOCUMENTED


def own_names(path: Path) -> set[str]:
    """Return the names that a module defines: functions, classes, class attributes and attributes of self."""
    definitions = [*python_functions(path), *python_nodes(path, ast.ClassDef)]
    variables = [node for node in python_nodes(path, ast.Name) if isinstance(node.ctx, ast.Store)]
    attributes = [
        node
        for node in python_nodes(path, ast.Attribute)
        if isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    ]
    return {
        *(node.name for node in definitions),
        *(node.id for node in variables),
        *(node.attr for node in attributes),
    }


@pytest.mark.parametrize("name", sorted(PYMYSQL))
def test_pymysql_connection_has_the_attribute(name: str) -> None:
    assert hasattr(Connection(defer_connect=True), name)


def test_redis_connection_has_its_socket() -> None:
    assert redis.connection.Connection()._sock is None


def test_deltalake_file_system_opens_output_streams(tmp_path: Path) -> None:
    assert callable(DeltaStorageHandler(tmp_path.as_uri())._handler.open_output_stream)


@pytest.mark.parametrize("name", sorted(UVICORN_PROTOCOL))
def test_uvicorn_protocol_has_the_method(name: str) -> None:
    assert callable(getattr(H11Protocol, name))


@pytest.mark.parametrize("name", sorted(UVICORN_PROTOCOL_STATE))
def test_uvicorn_protocol_sets_the_attribute(name: str) -> None:
    assert re.search(rf"self\.{name}\b.*=", inspect.getsource(H11Protocol.__init__))


def test_uvicorn_server_starts_and_stops_as_the_listener_expects() -> None:
    for method in (uvicorn.Server.startup, uvicorn.Server.shutdown):
        assert list(inspect.signature(method).parameters) == ["self", "sockets"]
    server = uvicorn.Server(uvicorn.Config(None))
    assert not server.started
    assert not server.should_exit
    assert inspect.isgeneratorfunction(inspect.unwrap(uvicorn.Server.capture_signals))
    assert {"servers", "lifespan"} <= set(re.findall(r"self\.(\w+)\b", inspect.getsource(uvicorn.Server)))


@pytest.mark.parametrize("package", PINNED)
def test_library_with_used_internals_has_an_upper_bound(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(itertools.chain(project["dependencies"], *project["optional-dependencies"].values()))
    bounds = [text for text in requirements if re.match(rf"{package}\b", text)]
    assert bounds
    assert all(re.search(r"<\d", text) for text in bounds)
