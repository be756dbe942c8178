# SPDX-License-Identifier: Apache-2.0
"""A test run leaves no files, however it ended, and reports a disk that is too small."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools.suite.run import run_steps
from tools.suite.temporary import DiskTooSmall, remove_leftovers, temporary_folder

ROOT = Path(__file__).resolve().parents[2]

OWNER = """
import sys
from pathlib import Path
from tools.suite.temporary import temporary_folder
with temporary_folder(Path(sys.argv[1]), 0) as folder:
    (folder / "large").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folder_is_removed_at_the_end(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, 0) as folder:
        (folder / "data").mkdir()
        assert folder.parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_next_run_removes_the_folder_of_a_killed_run_and_none_of_a_live_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert remove_leftovers(tmp_path) == []
        assert (folder / "large").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert remove_leftovers(tmp_path) == [folder]
    assert not folder.exists()


def test_full_disk_is_refused_before_any_test_runs(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskTooSmall, match=r"GB free and the tests write up to 10\d+ GB: free some space"),
        temporary_folder(tmp_path, 10**20),
    ):
        pytest.fail("the tests ran")
    assert not list(tmp_path.iterdir())


def test_steps_keep_compiled_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    step = [sys.executable, "-c", "import sys; sys.exit(sys.dont_write_bytecode)"]
    assert run_steps({"tests": step}, {}) == 0


def test_terminated_run_interrupts_its_tests_and_removes_its_folder(tmp_path: Path) -> None:
    interrupted = tmp_path / "interrupted"
    child = (
        "import os, pathlib, time\n"
        "try:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        f"    pathlib.Path({str(interrupted)!r}).touch()\n"
    )
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tools.suite.run import handle_signals, run_steps\n"
        "from tools.suite.temporary import temporary_folder\n"
        "handle_signals()\n"
        f"with temporary_folder(Path({str(tmp_path)!r}), 0) as folder:\n"
        f"    run_steps({{'tests': [sys.executable, '-c', {child!r}]}}, {{'TMPDIR': str(folder)}})\n"
    )
    # A shell starts background commands with SIGINT ignored.
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child_id = int(process.stdout.readline())
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(child_id)
    assert list(tmp_path.iterdir()) == [interrupted]
