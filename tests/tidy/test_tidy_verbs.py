# SPDX-License-Identifier: Apache-2.0
"""The verbs of the Makefile are the whole interface to the project, for developers and for CI."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.suite.patience import WAIT_SECONDS_MAX
from tests.tidy.tree import ROOT, files, name_of

TEST_VERBS = {"test", "test-all", "test-long", "test-stress", "mutants"}
VERBS = TEST_VERBS | {"setup", "build", "check", "miri", "bench", "docs", "site", "demo", "package", "clean"}


def test_make_help_describes_every_target() -> None:
    done = subprocess.run(
        ["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, timeout=WAIT_SECONDS_MAX
    )
    listed = dict(re.findall(r"^  make ([\w-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert done.returncode == 0, done.stderr
    assert set(listed) == VERBS | {"help"}


def test_ci_runs_the_commands_of_a_user() -> None:
    assert re.search(r"^timeout .*\bmake\b.* test\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", [*files(".sh"), ROOT / ".ci/run"], ids=name_of)
def test_shell_script_is_executable_and_parses(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-n", path], capture_output=True, text=True, timeout=WAIT_SECONDS_MAX)
    assert done.returncode == 0, done.stderr
