# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from penstock.sinks.lake.parquet_files import local_folder


def test_deletion_continues_after_a_missing_file(tmp_path: Path) -> None:
    for name in ("first.parquet", "last.parquet", "kept.parquet"):
        (tmp_path / name).touch()
    local_folder(str(tmp_path), make=False).delete(["first.parquet", "gone.parquet", "last.parquet"])
    assert [path.name for path in tmp_path.iterdir()] == ["kept.parquet"]
