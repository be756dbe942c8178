# SPDX-License-Identifier: Apache-2.0
"""Imports run one way, and an outside part is known in one place only."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import ROOT, files, name_of, python_tree

LEAVES = {"errors", "limits", "commit_versions", "model", "gtid_sets", "fingerprint", "_native"}

# What each part may import, besides itself. `model` stands on the leaves before it.
MAY_IMPORT = {
    "errors": set(),
    "limits": set(),
    "commit_versions": {"errors", "limits"},
    "model": {"errors", "limits", "commit_versions", "_native"},
    "gtid_sets": {"_native"},
    "fingerprint": set(),
    "mysql_dial": {"model"},
    "settings_file": {"errors", "limits", "model"},
    "settings_values": {"errors", "model"},
    "settings_listen": {"model", "settings_values"},
    "settings": {"limits", "model", "settings_file", "settings_listen", "settings_values"},
    "logstore": LEAVES | {"settings"},
    "capture": LEAVES | {"mysql_dial", "settings", "logstore"},
    "source": LEAVES | {"settings", "logstore", "capture", "changes"},
    "coordinate": LEAVES,
    "serve": LEAVES | {"settings", "logstore", "capture", "source", "coordinate"},
    "client": LEAVES | {"source", "coordinate"},
    "binlog": LEAVES | {"capture", "source"},
    # What moves through a pipeline; the sinks and steps below know nothing of Spark.
    "changes": {"errors", "model", "_native"},
    "sinks": LEAVES | {"mysql_dial", "settings_values", "changes"},
    "pipeline": LEAVES
    | {
        "settings_file",
        "settings_values",
        "logstore",
        "capture",
        "source",
        "coordinate",
        "client",
        "changes",
        "sinks",
    },
    # How a pipeline runs, wherever its tasks do.
    "engine": LEAVES | {"capture", "source", "coordinate", "changes", "sinks", "pipeline"},
    "local": LEAVES | {"pipeline", "engine"},
    "spark": LEAVES | {"capture", "source", "changes", "sinks", "pipeline", "engine"},
    # The only one that builds everything.
    "daemon": LEAVES | {"settings", "logstore", "capture", "source", "serve", "coordinate"},
    "admin": LEAVES
    | {
        "settings",
        "settings_values",
        "logstore",
        "capture",
        "source",
        "binlog",
        "daemon",
        "coordinate",
        "client",
    }
    | {"changes", "sinks", "pipeline", "engine", "local", "spark"},
    # A pipeline in a program, with Spark or without.
    "pipelines": LEAVES | {"pipeline", "engine", "local", "spark"},
    "__init__": LEAVES | {"capture", "source", "binlog", "pipelines"},
}

# Where an outside part may be imported: a file, or a folder.
HOMES = {
    "pymysql": (
        "src/penstock/mysql_dial.py",
        "src/penstock/capture/connection.py",
        "src/penstock/capture/server_errors.py",
        "src/penstock/sinks/mysql_connection.py",
    ),
    "sqlglot": (
        "src/penstock/serve/predicate.py",
        "src/penstock/pipeline/expressions.py",
    ),
    "zstandard": ("src/penstock/logstore/cold.py",),
    "fsspec": ("src/penstock/logstore/object_store.py",),
    "urllib3": (
        "src/penstock/source/daemon_client.py",
        "src/penstock/client/",
        "src/penstock/sinks/targets/http.py",
    ),
    "kazoo": ("src/penstock/coordinate/backends/zookeeper.py",),
    "yaml": ("src/penstock/settings_file.py",),
    "pydantic": (
        "src/penstock/settings.py",
        "src/penstock/settings_",
        "src/penstock/serve/changes_request.py",
        "src/penstock/pipeline/",
        "src/penstock/sinks/",
    ),
    "starlette": ("src/penstock/serve/",),
    "uvicorn": ("src/penstock/serve/listener.py", "src/penstock/serve/connections.py"),
    "pyspark": ("src/penstock/spark/", "src/pyspark_penstock/", "src/penstock/pipelines.py"),
    "py4j": ("src/penstock/spark/",),
    "typer": ("src/penstock/admin/",),
    "rich": ("src/penstock/admin/",),
    "deltalake": ("src/penstock/sinks/",),
    "pyiceberg": ("src/penstock/sinks/",),
    "psycopg": ("src/penstock/sinks/",),
    "clickhouse_connect": ("src/penstock/sinks/",),
    "redis": ("src/penstock/sinks/",),
    "pymongo": ("src/penstock/sinks/",),
    "elasticsearch": ("src/penstock/sinks/",),
    "confluent_kafka": ("src/penstock/sinks/",),
    "duckdb": ("src/penstock/pipeline/",),
    "pandas": (),
    "polars": (),
}


def test_every_part_imports_only_what_lies_below_it() -> None:
    wrong = [
        f"{name_of(path)} imports penstock.{target}"
        for path in files(".py", below="src/penstock")
        for target in penstock_imports(path)
        if target != part_of(path) and target not in MAY_IMPORT[part_of(path)]
        # The one thing that the command line takes from the top is the version it prints.
        if not (part_of(path) == "admin" and target == "__version__")
    ]
    assert not wrong, wrong


def test_every_part_of_the_package_has_its_rule() -> None:
    parts = {part_of(path) for path in files(".py", below="src/penstock")}
    assert parts == set(MAY_IMPORT)


def test_outside_parts_are_imported_in_their_own_places_only() -> None:
    wrong = [
        f"{name_of(path)} imports {package}"
        for path in files(".py", below="src")
        for package in outside_imports(path)
        if package in HOMES and not name_of(path).startswith(HOMES[package] or "nowhere")
    ]
    assert not wrong, wrong


def test_the_product_imports_nothing_of_its_tests_and_tools() -> None:
    wrong = [
        f"{name_of(path)} imports {package}"
        for path in files(".py", below="src")
        for package in outside_imports(path)
        if package in ("tests", "tools", "bench", "demo")
    ]
    assert not wrong, wrong


def test_the_kernel_knows_no_python_and_touches_nothing_outside() -> None:
    forbidden = (
        "pyo3",
        "std::fs",
        "std::net::Tcp",
        "std::net::Udp",
        "std::thread",
        "std::time",
        "std::process",
        "std::env",
    )
    wrong = [
        f"{name_of(path)}: {word}"
        for path in files(".rs", below="native/kernel/src")
        if path.stem != "tests" and "/tests/" not in name_of(path)
        for word in forbidden
        if word in path.read_text()
    ]
    assert not wrong, wrong


def test_unsafe_code_is_allowed_by_name_and_says_why_it_holds() -> None:
    assert "unsafe_code" in (ROOT / "native/kernel/src/lib.rs").read_text(), "the kernel denies unsafe code"
    for path in files(".rs"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if "unsafe {" in line:
                above = lines[max(0, number - 5) : number]
                assert any("SAFETY:" in line for line in above), f"{name_of(path)}:{number + 1}"


def part_of(path: Path) -> str:
    """Return the part of the package that a file belongs to."""
    first = path.relative_to(ROOT / "src" / "penstock").parts[0]
    return first.removesuffix(".py")


def penstock_imports(path: Path) -> Iterator[str]:
    """Yield the first name below `penstock` of each import."""
    for node in ast.walk(python_tree(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are absolute"
            if node.module == "penstock":
                yield from (name.name for name in node.names)
            elif node.module is not None and node.module.startswith("penstock."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("penstock."):
                    yield name.name.split(".")[1]


def outside_imports(path: Path) -> Iterator[str]:
    """Yield the top package of each import."""
    for node in ast.walk(python_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
