# SPDX-License-Identifier: Apache-2.0
"""Every test can fail, and no test sleeps if it can wait for an event."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

from tests.tidy import checks
from tests.tidy.tree import Function, files, name_of, python_functions, python_nodes

# Files with `time.sleep`, and the reason. All other tests wait with tests/support/suite/patience.py.
SLEEPS = {
    "tests/support/canal/clients/follow.py": "Canal's client polls as its manual shows",
    "tests/support/capture/captured_log.py": "the interval at which it looks at a condition",
    "tests/support/programs/record.py": "a program that pauses between tries, as an application does",
    "tests/conformance/test_coordination.py": "the interval at which it looks at a condition",
    "tests/conformance/test_log_modes.py": "the interval at which it looks at a condition, and a slow reader",
    "tests/support/coordinate/process.py": "the interval at which it looks at a condition",
    "tests/support/daemon/process.py": "the interval at which it looks at a condition",
    "tests/chaos/machine.py": "how long a fault lasts is drawn from a seed",
    "tests/fault/test_daemon_kills.py": "the moment of a kill is drawn from a seed",
    "tests/fault/test_failover_drills.py": "the interval at which it looks at a condition; a paced writer",
    "tests/fault/test_pipeline_faults.py": "the moment of a kill is drawn from a seed",
    "tests/fault/test_pipeline_network.py": "the moment of a failure is drawn from a seed",
    "tests/fault/test_subscriber_kills.py": "the moment of a kill is drawn from a seed",
    "tests/integration/test_canal_access.py": "a client that sends a byte at a time",
    "tests/integration/test_capture_run.py": "a capture that is held takes nothing while it looks again",
    "tests/integration/test_membership.py": "a member that has to wait gains nothing meanwhile",
    "tests/integration/test_pipeline_daemon.py": "a run whose target is away tries again meanwhile",
    "tests/integration/test_serve.py": "processor time is measured over a second",
    "tests/integration/test_sink_kafka.py": "the broker answers before or after the next call",
    "tests/integration/test_sink_mysql.py": "a transaction is held while another one waits for its lock",
    "tests/support/suite/patience.py": "the interval at which it looks at a condition",
    "tests/support/pipeline/workload.py": "the interval between tries to connect",
    "tests/support/spark/cluster.py": "the interval at which it looks at a condition",
    "tests/unit/test_checkpoints.py": "notes come for longer than the writer's interval",
}


@functools.cache
def all_tests() -> list[tuple[Path, Function]]:
    return list(checks.functions_of_tests())


def where(path: Path, node: ast.stmt | ast.expr | ast.excepthandler) -> str:
    return f"{name_of(path)}:{node.lineno}"


def test_every_test_checks_something() -> None:
    assert len(all_tests()) > 1000, "the scan finds hardly any test"
    idle = [where(path, test) for path, test in all_tests() if not checks.checks_something(path, test)]
    assert not idle, idle


def test_no_test_passes_because_a_collection_is_empty() -> None:
    vacuous = [where(path, test) for path, test in all_tests() if checks.checks_only_in_loops(path, test)]
    assert not vacuous, f"wrap the collection in tests.support.suite.nonempty.each: {vacuous}"


def test_no_two_test_files_share_a_name() -> None:
    # pytest imports test files by their name alone: of two files with the same name, it runs only one.
    names = Counter(path.name for path in files(".py", below="tests") if path.name.startswith("test_"))
    assert len(names) > 100, "the scan finds hardly any file"
    assert max(names.values()) == 1, names.most_common(5)


def test_no_assertion_always_holds() -> None:
    constant = [
        where(path, node)
        for path in files(".py", below="tests")
        for node in python_nodes(path, ast.Assert)
        if checks.always_holds(node.test)
    ]
    assert not constant, constant


def test_no_failed_assertion_is_swallowed() -> None:
    swallowed = [
        where(path, node)
        for path in files(".py", below="tests")
        for node in (*python_nodes(path, ast.ExceptHandler), *python_nodes(path, ast.Call))
        if checks.swallows_assertions(node)
    ]
    assert not swallowed, swallowed


def test_tests_sleep_only_where_a_reason_is_given() -> None:
    sleeping = {
        name_of(path)
        for path in files(".py", below="tests")
        for node in python_nodes(path, ast.Call)
        if calls_sleep(node)
    }
    assert sleeping <= SLEEPS.keys(), "wait for an event, with tests/support/suite/patience.py"
    assert sleeping >= SLEEPS.keys(), "no sleep is left there: delete the entry"


def calls_sleep(call: ast.Call) -> bool:
    """Return whether a call is `time.sleep(...)` or `sleep(...)`."""
    match call.func:
        case ast.Name(id="sleep") | ast.Attribute(value=ast.Name(id="time"), attr="sleep"):
            return True
    return False


# --- The scan itself ------------------------------------------------------------------------


def scanned(tmp_path: Path, code: str) -> tuple[Path, Function]:
    path = tmp_path / "test_sample.py"
    path.write_text(code)
    (test,) = (node for node in python_functions(path) if node.name.startswith("test_"))
    return path, test


@pytest.mark.parametrize(
    "code",
    [
        "def test_a(rows):\n    for row in rows():\n        assert row",
        "def test_a(rows):\n    for row in rows():\n        with raises(ValueError):\n            row()",
        "def test_a(rows):\n    assert all(row for row in rows())",
        "def test_a(rows):\n    assert not any(row for row in rows())",
        "def test_a(rows):\n    for n in range(len(rows)):\n        assert rows[n]",
        "def test_a(rows):\n    for row in sorted(rows):\n        for n in (1, 2):\n            assert n",
        "def test_a():\n    some = [n for n in (1, 2) if n > 5]\n    for n in some:\n        assert n",
        "def test_a(rows):\n    def f(row):\n        assert row\n    for row in rows:\n        f(row)",
        "def test_a(rows):\n    while rows:\n        for row in rows:\n            assert row",
    ],
)
def test_scan_refuses_checks_in_loops_over_computed_collections(tmp_path: Path, code: str) -> None:
    assert checks.checks_only_in_loops(*scanned(tmp_path, code))


@pytest.mark.parametrize(
    "code",
    [
        "def test_a(rows):\n    for row in each(rows()):\n        assert row",
        "def test_a(rows):\n    assert rows\n    for row in rows:\n        assert row",
        "def test_a(rows):\n    assert all(row for row in each(rows))",
        "ROWS = {'a': 1}\ndef test_a():\n    for row in ROWS.items():\n        assert row",
        "def test_a():\n    for n in range(1, 9):\n        assert n",
        "@parametrize('rows', [[1]])\ndef test_a(rows):\n    for row in rows:\n        assert row",
        "@given(st.lists())\ndef test_a(rows):\n    for row in rows:\n        assert row",
        "def test_a(rows):\n    def holds():\n        assert rows\n    wait_until(holds)",
        "def check(rows) -> None:\n    assert rows\ndef test_a(rows):\n    check(rows)",
    ],
)
def test_scan_accepts_checks_that_are_reached(tmp_path: Path, code: str) -> None:
    path, test = scanned(tmp_path, code)
    assert not checks.checks_only_in_loops(path, test)
    assert checks.checks_something(path, test)


@pytest.mark.parametrize(
    "code", ["def test_a(rows):\n    rows()", "def rows():\n    return 1\ndef test_a():\n    rows()"]
)
def test_scan_refuses_tests_without_a_check(tmp_path: Path, code: str) -> None:
    assert not checks.checks_something(*scanned(tmp_path, code))


@pytest.mark.parametrize(
    ("condition", "always"),
    [
        ("a or True", True),
        ("(a, 'why')", True),
        ("'why'", True),
        ("a == a", True),
        ("(row for row in a)", True),
        ("[a, b]", True),
        ("a() == a()", False),
        ("a or b", False),
        ("a and True", False),
        ("()", False),
    ],
)
def test_scan_recognizes_conditions_that_always_hold(condition: str, always: bool) -> None:
    assert checks.always_holds(ast.parse(condition, mode="eval").body) is always


@pytest.mark.parametrize(
    ("code", "swallows"),
    [
        ("try:\n    a()\nexcept Exception:\n    pass", True),
        ("try:\n    a()\nexcept (OSError, AssertionError):\n    b = 1", True),
        ("try:\n    a()\nexcept:\n    pass", True),
        ("with suppress(Exception):\n    a()", True),
        ("try:\n    a()\nexcept Exception as problem:\n    failed.append(problem)", False),
        ("try:\n    a()\nexcept BaseException:\n    b()\n    raise", False),
        ("try:\n    a()\nexcept OSError:\n    pass", False),
    ],
)
def test_scan_detects_swallowed_assertion_failures(code: str, swallows: bool) -> None:
    assert any(map(checks.swallows_assertions, ast.walk(ast.parse(code)))) is swallows
