# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile and the systemd unit, as far as they can be tried without Docker."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock.cli
from penstock.settings.listen import PORT_DEFAULT
from tests.support.sinks.http_endpoint import HttpEndpoint
from tests.support.suite.fixture_types import MissingPart

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
COMMANDS = Path(penstock.cli.__file__).parent
SECONDS_MAX = 60.0


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with their arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line.strip()]


def argument_of(name: str) -> str:
    [argument] = [argument for instruction, argument in instructions() if instruction == name]
    return argument


def test_container_runs_the_daemon_as_a_user_without_privileges() -> None:
    # Kubernetes can verify runAsNonRoot only if the user is a number.
    assert argument_of("USER") == "10001:10001"
    assert [*json.loads(argument_of("ENTRYPOINT")), *json.loads(argument_of("CMD"))][:2] == [
        "penstock",
        "serve",
    ]
    assert json.loads(argument_of("CMD"))[0] in {path.stem for path in COMMANDS.glob("*.py")}
    assert str(PORT_DEFAULT) in argument_of("EXPOSE").split()
    assert argument_of("VOLUME") == argument_of("WORKDIR") == "/var/lib/penstock"


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1), (0, 1)])
def test_healthcheck_fails_unless_the_daemon_is_live(status: int, exit_code: int) -> None:
    words = json.loads(argument_of("HEALTHCHECK").partition(" CMD ")[2])
    assert argument_of("ENV") == f"PENSTOCK_HEALTH_URL=http://127.0.0.1:{PORT_DEFAULT}/livez"
    with HttpEndpoint() as endpoint:
        endpoint.answer(status)
        done = subprocess.run(
            [sys.executable, *words[1:]],
            env=os.environ | {"PENSTOCK_HEALTH_URL": f"{endpoint.url}/livez"},
            capture_output=True,
            timeout=SECONDS_MAX,
        )
    assert done.returncode == exit_code, done.stderr


def test_installed_extras_are_those_of_the_package() -> None:
    text = (DEPLOY.parent / "pyproject.toml").read_text()
    extras = set(
        re.findall(r"^([a-z-]+) = \[", text.partition("[project.optional-dependencies]")[2], re.MULTILINE)
    )
    assert set(argument_of("ARG").removeprefix("EXTRAS=").split(",")) <= extras


def unit_and_command() -> tuple[str, list[str]]:
    """Return the systemd unit, and the words of the command that it runs."""
    unit = (DEPLOY / "penstock.service").read_text()
    settings = configparser.ConfigParser(strict=False, interpolation=None)
    settings.optionxform = str  # type: ignore[assignment]
    settings.read_string(unit)
    assert settings["Service"]["Type"] == "notify"
    return unit, settings["Service"]["ExecStart"].split()


def test_systemd_unit_runs_the_daemon() -> None:
    _, command = unit_and_command()
    assert command[1] == "serve"


@pytest.mark.deep(guard="tests/unit/test_deploy_files.py::test_systemd_unit_runs_the_daemon")
def test_systemd_accepts_the_unit(tmp_path: Path, missing_part: MissingPart) -> None:
    unit, command = unit_and_command()
    program = shutil.which("systemd-analyze")
    if program is None:
        missing_part("systemd-analyze", "install the package systemd")
    # systemd-analyze refuses a unit whose program does not exist.
    path = tmp_path / "penstock.service"
    path.write_text(unit.replace(command[0], sys.executable))
    done = subprocess.run(
        [program, "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert (done.returncode, done.stderr) == (0, "")
