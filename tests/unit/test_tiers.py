# SPDX-License-Identifier: Apache-2.0
"""Options of a test run: an empty selection, or one too small for CI, is refused."""

import json
from pathlib import Path

import pytest

from tests.conftest import check_flavors
from tests.support.suite import tiers
from tools.suite import run


@pytest.mark.parametrize("area", ["kanal", "kanal,kafak", " , "])
def test_area_without_a_test_file_is_refused(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, area: str
) -> None:
    monkeypatch.setattr(pytestconfig.option, "area", area)
    with pytest.raises(pytest.UsageError, match="no test file has"):
        tiers.check_area(pytestconfig)


@pytest.mark.parametrize("area", [None, "canal", "kanal, canal"])
def test_area_with_a_test_file_is_accepted(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, area: str | None
) -> None:
    monkeypatch.setattr(pytestconfig.option, "area", area)
    tiers.check_area(pytestconfig)
    assert tiers.in_area("tests/integration/test_canal.py", tiers.area_filter(pytestconfig) or ["canal"])


@pytest.mark.parametrize(
    ("flavors", "ci", "message"),
    [
        ("mysql,mariadb", "true", "leaves mariadb11 out, which CI=true refuses"),
        ("mysql,oracle", "", "oracle is none of"),
        ("mysql", "", None),
        ("mysql,mariadb,mariadb11", "true", None),
    ],
)
def test_flavor_left_out_under_ci_is_refused(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, flavors: str, ci: str, message: str | None
) -> None:
    monkeypatch.setattr(pytestconfig.option, "server_flavors", flavors)
    monkeypatch.setenv("CI", ci)
    if message is None:
        assert check_flavors(pytestconfig) is None
        return
    with pytest.raises(pytest.UsageError, match=message):
        check_flavors(pytestconfig)


def test_run_of_an_area_without_tests_ends_before_its_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["--area", "kanal"])
    assert "'kanal'" in capsys.readouterr().err


def test_durations_of_tests_are_written_with_the_slowest_first(tmp_path: Path) -> None:
    reports = [
        pytest.TestReport(name, ("", 0, ""), {}, "passed", None, when, duration=seconds)
        for name, when, seconds in [("a", "setup", 1.0), ("a", "call", 0.25), ("b", "call", 2.0)]
    ]
    tiers.write_durations(reports, tmp_path / "build" / "durations.json")
    written = json.loads((tmp_path / "build" / "durations.json").read_text())
    assert list(written.items()) == [("b", 2.0), ("a", 1.25)]
