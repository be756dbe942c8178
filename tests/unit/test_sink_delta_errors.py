# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pyarrow
import pyarrow.fs
import pyarrow.parquet
import pytest

from penstock.errors import OptionInvalid
from penstock.sinks.delta.table import ObjectStorage, create_delta, open_delta

SCHEMA = pyarrow.schema([pyarrow.field("id", pyarrow.int64())])
FIRST_COMMIT = "_delta_log/00000000000000000000.json"


def write_log(folder: Path, text: str) -> None:
    (folder / "_delta_log").mkdir()
    (folder / FIRST_COMMIT).write_text(text)


def test_folder_without_a_log_has_no_table(tmp_path: Path) -> None:
    assert open_delta(str(tmp_path), {}) is None


def test_table_is_opened_with_its_schema(tmp_path: Path) -> None:
    create_delta(str(tmp_path), {}, "t", SCHEMA, {})
    table = open_delta(str(tmp_path), {})
    assert table is not None
    assert table.schema.names == ["id"]


def test_damaged_table_is_refused_by_its_path(tmp_path: Path) -> None:
    write_log(tmp_path, "{this is not JSON")
    with pytest.raises(OptionInvalid, match=f"the table {tmp_path} cannot be used"):
        open_delta(str(tmp_path), {})


def test_parquet_file_is_written_where_deltalake_stores_it(tmp_path: Path) -> None:
    rows = pyarrow.table({"id": list(range(100_000))})
    filesystem = pyarrow.fs.PyFileSystem(ObjectStorage(tmp_path.as_uri()))
    with filesystem.open_output_stream("rows.parquet") as stream:
        pyarrow.parquet.write_table(rows, stream)
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").equals(rows)
