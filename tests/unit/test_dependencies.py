# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

from tests.support.suite.patience import WAIT_SECONDS_MAX


def test_missing_pyspark_error_names_the_install_command() -> None:
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from penstock.errors import DependencyMissing\n"
        "try:\n    import penstock.spark\n"
        "except DependencyMissing as problem:\n    print(problem.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS_MAX,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "pip install 'penstock[spark]'"), done.stderr
