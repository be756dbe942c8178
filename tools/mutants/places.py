# SPDX-License-Identifier: Apache-2.0
"""The folders of mutation testing and the code that it mutates.

All paths of mutants are relative to the repository.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build/mutants"
# Copies of the repository whose files are mutated. Each language has its own copy, so that both may run at
# the same time. The repository's own files are never changed.
TREE = WORK / "tree"
KERNEL_TREE = WORK / "kernel-tree"
CARGO_TARGET = WORK / "target"
# Environment variables of a process in a copy: the copy that it must import, and the file for its records.
TREE_VARIABLE = "PENSTOCK_MUTANTS_TREE"
RECORD_VARIABLE = "PENSTOCK_MUTANTS_RECORD"
# Tools used only for mutation testing.
PYTHON_TOOLS = ROOT / "build/tools/python"
CARGO_TOOLS = ROOT / "build/tools"
CARGO_MUTANTS_VERSION = "27.1.0"

# The files of each area. Errors in these areas could lose, duplicate or change rows.
KERNEL_AREAS = {
    "stream": ("native/kernel/src/stream/*.rs",),
    "event": ("native/kernel/src/event/*.rs",),
    "gtid": ("native/kernel/src/gtid.rs",),
}
PYTHON_AREAS = {
    "logstore": ("src/penstock/logstore/*.py",),
    "capture": ("src/penstock/capture/*.py", "src/penstock/mysql/*.py", "src/penstock/schema/**/*.py"),
    "pipeline state": ("src/penstock/pipeline/state*.py",),
    "lake sinks": (
        "src/penstock/sinks/lake/*.py",
        "src/penstock/sinks/delta/*.py",
        "src/penstock/sinks/iceberg/*.py",
        "src/penstock/sinks/files/*.py",
    ),
}


def sources(patterns: tuple[str, ...], root: Path = ROOT) -> list[str]:
    """Return the files that match the patterns, relative to the root and sorted.

    Raises FileNotFoundError for a pattern that matches no files, because an area whose files have moved would
    silently go untested.
    """
    paths: set[str] = set()
    for pattern in patterns:
        matches = [path.relative_to(root).as_posix() for path in root.glob(pattern)]
        if not matches:
            raise FileNotFoundError(f"{pattern}: no file matches; correct the areas in {__file__}")
        paths.update(matches)
    return sorted(paths)


# The tests whose coverage is recorded. Tests of Spark, of clients and of other sinks are excluded, because
# they run the same lines through more layers.
PYTHON_TESTS = (
    "tests/unit/test_*.py",
    "tests/conformance/test_log_modes.py",
    "tests/fault/test_log_*.py",
    "tests/integration/test_log*.py",
    "tests/integration/test_capture_*.py",
    "tests/integration/test_sink_files.py",
    "tests/integration/test_sink_lakes.py",
    "tests/integration/test_source_log.py",
    "tests/integration/test_memory.py",
    "tests/integration/test_cli_log.py",
    "tests/integration/test_cli_position.py",
    "tests/integration/test_relay_logs.py",
    "tests/integration/test_pipeline_restarts.py",
    "tests/integration/test_pipeline_definitions.py",
)

# The decoding tests, which judge those mutants of the kernel that `cargo test` does not kill.
DECODING_TESTS = (
    "tests/unit/test_decoding_commit_time.py",
    "tests/unit/test_decoding_ranges.py",
    "tests/unit/test_decoding_statements.py",
    "tests/unit/test_gtid_encoding.py",
    "tests/unit/test_block_cutter.py",
    "tests/unit/test_block_streams.py",
    "tests/unit/test_segment_head.py",
    "tests/unit/test_locate.py",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_events.py",
    "tests/integration/test_types.py",
    "tests/integration/test_read_binlog.py",
)
