# SPDX-License-Identifier: Apache-2.0
"""Imports run in one direction, and each third-party package is imported in one place only."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import ROOT, files, name_of, python_nodes
from tools.miri import SOURCES, unsafe_files

# The files with unsafe code. Each has a fuzz target, and a call in it that reaches the unsafe code.
FUZZ_TARGETS = {
    "native/bridge/src/blocks.rs": ("tests/fuzz/attack.py", "Cutting("),
    "native/bridge/src/convert.rs": ("tests/fuzz/attack.py", "row_hashes("),
    "native/bridge/src/socket.rs": ("tests/fuzz/attack.py", ".drain("),
    "native/kernel/src/column/store.rs": ("native/kernel/tests/mutations.rs", "valid_rows("),
    "native/kernel/src/emit/system.rs": ("native/kernel/tests/mutations.rs", "valid_rows("),
}

LEAVES = {
    "errors",
    "limits",
    "closing",
    "commit_versions",
    "durations",
    "sizes",
    "model",
    "narrowed_patterns",
    "gtid_sets",
    "fingerprint",
    "retry",
    "predicate",
    "protobuf",
    "kafka_library",
    "_native",
}

# The parts that each part may import, from the bottom layer up.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "limits": set(),
    "closing": set(),
    "commit_versions": {"errors", "limits"},
    "durations": set(),
    "sizes": set(),
    "gtid_sets": {"_native"},
    "fingerprint": set(),
    "retry": {"errors", "limits"},
    "predicate": {"errors", "durations"},
    "protobuf": {"errors"},
    "kafka_library": {"errors"},
    "model": {"errors", "limits", "commit_versions", "_native"},
    "narrowed_patterns": {"model"},
    # The data in a pipeline.
    "changes": {"errors", "model", "_native"},
    "coordinate": LEAVES,
    # The daemon's settings, and the basis of every settings file.
    "settings": {"errors", "limits", "model", "predicate", "coordinate"},
    "telemetry": {"errors", "model", "settings"},
    # The connections to a server, and the columns of its rows.
    "mysql": LEAVES,
    "schema": LEAVES | {"mysql"},
    "check": LEAVES | {"mysql", "schema"},
    "logstore": LEAVES | {"settings", "telemetry"},
    "capture": LEAVES | {"settings", "telemetry", "mysql", "schema", "logstore"},
    # TiDB's own protocols: its cluster, and the Pumps and Drainers of its binlog.
    "tidb": LEAVES | {"settings", "telemetry", "mysql", "schema", "check", "logstore", "capture"},
    "ticdc": LEAVES | {"settings", "mysql", "check", "logstore", "capture", "tidb"},
    "source": LEAVES | {"changes", "settings", "mysql", "schema", "logstore"},
    "serve": LEAVES | {"settings", "telemetry", "logstore", "capture", "source", "coordinate"},
    # Instances that join the logs of other instances.
    "merge": LEAVES | {"settings", "mysql", "logstore", "capture", "source", "serve"},
    "client": LEAVES | {"source", "coordinate", "telemetry"},
    # Daemons that share the capture of instances.
    "fleet": LEAVES | {"logstore", "capture", "source", "coordinate"},
    "binlog": LEAVES | {"schema", "source"},
    # The sinks and steps do not depend on Spark.
    "sinks": LEAVES | {"changes", "settings", "mysql"},
    "pipeline": LEAVES
    | {
        "changes",
        "settings",
        "telemetry",
        "mysql",
        "schema",
        "logstore",
        "source",
        "coordinate",
        "client",
        "sinks",
    },
    # Settings of other systems. Their files are checked by the readers of settings and pipelines.
    "migrate": LEAVES | {"settings", "mysql", "serve", "source", "binlog", "coordinate", "sinks", "pipeline"},
    "engine": LEAVES | {"changes", "mysql", "schema", "source", "coordinate", "sinks", "pipeline"},
    "local": LEAVES | {"pipeline", "engine"},
    # The local driver runs readers of a target in the session of this process.
    "spark": LEAVES | {"changes", "mysql", "schema", "source", "sinks", "pipeline", "engine", "local"},
    # A client of the daemons' control API, and of the pipelines' state stores.
    "console": LEAVES
    | {"changes", "settings", "telemetry", "coordinate", "source", "serve", "client", "pipeline"},
    # The listeners of one process.
    "listeners": LEAVES | {"settings", "coordinate", "serve"},
    # The captures of one process, and the processes that a daemon has for them.
    "captures": LEAVES
    | {"settings", "telemetry", "mysql", "logstore", "capture", "source", "tidb", "ticdc", "merge"},
    "processes": LEAVES | {"settings", "telemetry", "logstore", "capture", "captures", "listeners", "serve"},
    # The settings of a daemon that change while it runs.
    "desired": LEAVES | {"settings", "coordinate", "fleet"},
    # The only part that builds all others.
    "daemon": LEAVES
    | {
        "check",
        "desired",
        "settings",
        "telemetry",
        "mysql",
        "logstore",
        "capture",
        "captures",
        "listeners",
        "processes",
        "source",
        "coordinate",
        "fleet",
        "pipeline",
        "serve",
        "tidb",
    },
    "cli": LEAVES
    | {
        "changes",
        "settings",
        "telemetry",
        "mysql",
        "schema",
        "check",
        "logstore",
        "capture",
        "source",
        "coordinate",
        "fleet",
        "client",
        "binlog",
        "sinks",
        "pipeline",
        "migrate",
        "engine",
        "local",
        "spark",
        "tidb",
        "console",
        "ticdc",
        "desired",
        "daemon",
    },
    # Pipelines inside a program, with Spark or without.
    "pipelines": LEAVES | {"pipeline", "engine", "local", "spark"},
    "__init__": LEAVES | {"source", "binlog", "pipelines"},
}

# Folders whose variants must not depend on each other, and the folders that several variants share.
VARIANTS = {"sinks": {"document", "search", "lake", "sql"}, "serve": set[str]()}

# The file or folder in which a third-party package may be imported.
HOMES = {
    "pymysql": (
        "src/penstock/mysql/dial.py",
        "src/penstock/mysql/connection.py",
        "src/penstock/mysql/server_errors.py",
        "src/penstock/sinks/mysql/connection.py",
    ),
    "sqlglot": (
        "src/penstock/predicate.py",
        "src/penstock/pipeline/expressions.py",
    ),
    "zstandard": ("src/penstock/logstore/cold.py",),
    "fsspec": ("src/penstock/logstore/object_store.py",),
    "urllib3": (
        "src/penstock/source/daemon_client.py",
        "src/penstock/client/",
        "src/penstock/sinks/http/sink.py",
        "src/penstock/sinks/kafka/registry.py",
        "src/penstock/telemetry/channel.py",
    ),
    "grpc": ("src/penstock/tidb/",),
    "kazoo": ("src/penstock/coordinate/backends/zookeeper.py", "src/penstock/migrate/zookeeper.py"),
    "yaml": ("src/penstock/settings/file.py",),
    "pydantic": (
        "src/penstock/settings/",
        "src/penstock/serve/http/as_of.py",
        "src/penstock/serve/http/changes_request.py",
        "src/penstock/serve/http/definitions.py",
        "src/penstock/serve/http/fleet_control.py",
        "src/penstock/serve/http/history.py",
        "src/penstock/serve/http/json_request.py",
        "src/penstock/serve/http/pumps.py",
        "src/penstock/serve/http/subscription_changes.py",
        "src/penstock/serve/http/subscription_reset.py",
        "src/penstock/pipeline/",
        "src/penstock/sinks/",
    ),
    "starlette": (
        "src/penstock/serve/",
        "src/penstock/console/",
        "src/penstock/processes/listener_process.py",
    ),
    "jinja2": ("src/penstock/console/rendering.py",),
    "uvicorn": (
        "src/penstock/serve/listener.py",
        "src/penstock/serve/connections.py",
        "src/penstock/console/serving.py",
    ),
    "prometheus_client": ("src/penstock/telemetry/",),
    "opentelemetry": ("src/penstock/telemetry/otlp.py",),
    "pyspark": (
        "src/penstock/spark/",
        "src/penstock/sinks/spark/catalog.py",
        "src/pyspark_penstock/",
        "src/penstock/pipelines.py",
    ),
    "py4j": ("src/penstock/spark/", "src/penstock/sinks/spark/catalog.py"),
    "typer": ("src/penstock/cli/",),
    "rich": ("src/penstock/cli/",),
    "deltalake": ("src/penstock/sinks/delta/",),
    "pyiceberg": ("src/penstock/sinks/iceberg/",),
    "psycopg": ("src/penstock/sinks/postgres/",),
    "clickhouse_connect": ("src/penstock/sinks/clickhouse/",),
    "redis": ("src/penstock/sinks/redis/",),
    "pymongo": ("src/penstock/sinks/mongodb/",),
    "elastic_transport": ("src/penstock/sinks/search/",),
    "confluent_kafka": ("src/penstock/kafka_library.py",),
    "pika": ("src/penstock/sinks/rabbitmq/",),
    "duckdb": ("src/penstock/pipeline/", "src/penstock/sinks/duckdb/"),
    "pandas": (),
    "polars": (),
}


def test_every_part_imports_only_lower_layers() -> None:
    wrong = [
        f"{name_of(path)} imports penstock.{target}"
        for path in files(".py", below="src/penstock")
        for target in penstock_imports(path)
        if target != part_of(path) and target not in MAY_IMPORT[part_of(path)]
        # The command line may import the version from the top-level package, and nothing else.
        if not (part_of(path) == "cli" and target == "__version__")
    ]
    assert not wrong, wrong


def test_every_part_of_the_package_has_its_rule() -> None:
    parts = {part_of(path) for path in files(".py", below="src/penstock")}
    assert parts == set(MAY_IMPORT)


def test_part_may_import_only_parts_listed_before_it() -> None:
    order = list(MAY_IMPORT)
    wrong = [
        f"{part} may import {target}"
        for number, part in enumerate(order)
        for target in MAY_IMPORT[part] - {"_native"}
        if target not in order[:number]
    ]
    assert not wrong, wrong


def test_variant_imports_no_other_variant() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for folder, shared in VARIANTS.items()
        for path in files(".py", below=f"src/penstock/{folder}")
        if len(path.relative_to(ROOT / "src/penstock" / folder).parts) > 1
        for module in modules_imported(path)
        if module.startswith(f"penstock.{folder}.")
        and (ROOT / "src/penstock" / folder / module.split(".")[2]).is_dir()
        and module.split(".")[2] not in {path.relative_to(ROOT / "src/penstock" / folder).parts[0], *shared}
    ]
    assert not wrong, wrong


def test_files_outside_name_no_single_sink() -> None:
    sinks = ROOT / "src/penstock/sinks"
    kinds = {path.parent.name for path in sinks.glob("*/sink.py")}
    assert len(kinds) > 15
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in files(".py", below="src")
        if not path.is_relative_to(sinks)
        for module in modules_imported(path)
        if module.startswith("penstock.sinks.") and module.split(".")[2] in kinds
    ]
    assert not wrong, wrong


def test_third_party_packages_are_imported_only_where_allowed() -> None:
    wrong = [
        f"{name_of(path)} imports {package}"
        for path in files(".py", below="src")
        for package in outside_imports(path)
        if package in HOMES and not name_of(path).startswith(HOMES[package] or "nowhere")
    ]
    assert not wrong, wrong


def test_product_imports_no_tests_or_tools() -> None:
    wrong = [
        f"{name_of(path)} imports {package}"
        for path in files(".py", below="src")
        for package in outside_imports(path)
        if package in ("tests", "tools", "bench", "demo")
    ]
    assert not wrong, wrong


def test_kernel_does_no_python_and_no_io() -> None:
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


def test_unsafe_code_is_justified_and_covered_by_a_fuzz_target() -> None:
    assert "#![deny(unsafe_code)]" in (ROOT / "native/kernel/src/lib.rs").read_text(), (
        "the kernel denies unsafe code"
    )
    assert [name_of(path) for path in unsafe_files(ROOT / "native")] == sorted(FUZZ_TARGETS)
    for name, (target, call) in FUZZ_TARGETS.items():
        assert call in (ROOT / target).read_text(), f"{target} no longer covers {name}"
        lines = (ROOT / name).read_text().splitlines()
        for number, line in enumerate(lines):
            if "unsafe {" in line:
                above = lines[max(0, number - 5) : number]
                assert any("SAFETY:" in line for line in above), f"{name}:{number + 1}"


def test_kernel_files_with_unsafe_code_have_unit_tests_for_miri() -> None:
    kernel_files = unsafe_files(SOURCES)
    assert kernel_files
    for path in kernel_files:
        assert "#[cfg(test)]\nmod tests" in path.read_text(), (
            f"{name_of(path)}: `make miri` has no test to run"
        )


def part_of(path: Path) -> str:
    """Return the part of the package that a file belongs to."""
    first = path.relative_to(ROOT / "src" / "penstock").parts[0]
    return first.removesuffix(".py")


def penstock_imports(path: Path) -> Iterator[str]:
    """Yield the first name below `penstock` of each import."""
    for node in python_nodes(path, ast.ImportFrom):
        assert node.level == 0, f"{name_of(path)}: imports are absolute"
        if node.module == "penstock":
            yield from (name.name for name in node.names)
        elif node.module is not None and node.module.startswith("penstock."):
            yield node.module.split(".")[1]
    for name in plain_imports(path):
        if name.startswith("penstock."):
            yield name.split(".")[1]


def modules_imported(path: Path) -> Iterator[str]:
    """Yield the dotted name of each imported module."""
    for node in python_nodes(path, ast.ImportFrom):
        if node.module is not None:
            yield from (f"{node.module}.{name.name}" for name in node.names)
    yield from plain_imports(path)


def outside_imports(path: Path) -> Iterator[str]:
    """Yield the top-level package of each third-party import."""
    for node in python_nodes(path, ast.ImportFrom):
        if node.module and not node.level:
            yield node.module.split(".")[0]
    yield from (name.split(".")[0] for name in plain_imports(path))


def plain_imports(path: Path) -> Iterator[str]:
    """Yield the dotted names of `import a.b` statements."""
    for node in python_nodes(path, ast.Import):
        yield from (name.name for name in node.names)
