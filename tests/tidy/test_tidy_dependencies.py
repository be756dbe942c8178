# SPDX-License-Identifier: Apache-2.0
"""The dependency lists are exact: every import is required, and every requirement is imported."""

import re
import sys
import tomllib

from tests.tidy.test_tidy_imports import outside_imports
from tests.tidy.tree import ROOT, files, rust_code

OURS = {"penstock", "pyspark_penstock", "tests", "tools", "bench", "demo", "examples"}

# The distribution name of a package, if it differs from the import name.
DISTRIBUTIONS = {
    "bson": "pymongo",
    "clickhouse_connect": "clickhouse-connect",
    "confluent_kafka": "confluent-kafka",
    "elastic_transport": "elastic-transport",
    "google": "protobuf",
    "grpc": "grpcio",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "kubernetes_validate": "kubernetes-validate",
    "mysql_event_stream": "mysql-event-stream",
    "py4j": "pyspark",
    "pymysqlreplication": "mysql-replication",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}

# These packages are imported by programs that run in a separate interpreter.
ELSEWHERE = {"canal", "cosmic_ray", "coverage", "parso"}

# Required but not imported: plugins of pytest, programs, and dependencies of other packages.
WORK_UNSEEN = {
    "opentelemetry-exporter-otlp-proto-http",
    "pytest-timeout",
    "ruff",
    "mypy",
    "pandas",
    "ziglang",
    "mkdocs-material",
    "moto",
    "s3fs",
}

# Extras for the project's developers.
FOR_WORK = ("test", "check", "bench", "package")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_product_requires_exactly_its_imports() -> None:
    imported = distributions("src")
    always = names(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    chosen = {name for extra in extras if extra not in FOR_WORK for name in names(extras[extra])}
    assert imported - (chosen - always) == always
    assert "pyspark" in names(extras["spark"])


def test_extras_contain_the_imports_of_tests_tools_and_demo() -> None:
    required = names(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        required |= names(extra)
    imported = distributions("src", "tests", "tools", "bench", "demo")
    assert imported - required == set()
    assert required - imported - WORK_UNSEEN == set()


def test_versions_of_rust_dependencies_stand_in_the_workspace_alone() -> None:
    used = set()
    for crate in ("kernel", "bridge"):
        dependencies = tomllib.loads((ROOT / "native" / crate / "Cargo.toml").read_text())["dependencies"]
        assert all(isinstance(wanted, dict) and wanted.get("workspace") for wanted in dependencies.values())
        used |= set(dependencies)
    assert used == set(tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["dependencies"])


def test_crate_requires_exactly_its_imports() -> None:
    for crate in ("kernel", "bridge"):
        folder = ROOT / "native" / crate
        required = set(tomllib.loads((folder / "Cargo.toml").read_text())["dependencies"])
        code = "\n".join(rust_code(path) for path in files(".rs", below=f"native/{crate}"))
        idle = {name for name in required if not re.search(rf"\b{name.replace('-', '_')}\s*::", code)}
        assert idle == set()


def distributions(*folders: str) -> set[str]:
    """Return the distributions that the Python files of some folders import."""
    modules = {
        name for folder in folders for path in files(".py", below=folder) for name in outside_imports(path)
    }
    modules -= set(sys.stdlib_module_names) | OURS | ELSEWHERE
    return {DISTRIBUTIONS.get(name, name) for name in modules}


def names(requirements: list[str]) -> set[str]:
    """Return the names of requirements without versions and extras."""
    return {re.split(r"[\[<>=! ]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
