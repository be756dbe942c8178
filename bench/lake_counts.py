# SPDX-License-Identifier: Apache-2.0
"""The contents of a lake, counted independently of Penstock by DuckDB and deltalake."""

from dataclasses import dataclass
from pathlib import Path

import duckdb
from deltalake import DeltaTable

_PUTS = "('insert', 'update_postimage')"


@dataclass(frozen=True)
class Held:
    """The current rows of a table: how many there are, and the sum of one column."""

    rows: int
    total: str


def of_feed(files: list[str], key: str, column: str) -> tuple[int, Held]:
    """Return the number of images in a feed's Parquet files, and its current rows: each key's last image."""
    session = duckdb.connect()
    session.execute("SET TimeZone = 'UTC'")
    source = f"read_parquet({files!r})"
    [(images,)] = session.execute(f"SELECT count(*) FROM {source}").fetchall()
    last = (
        f"SELECT arg_max(struct_pack(kind := _change_type, value := {column}), (_commit_version,"
        f" _metadata.row, _change_type = 'update_postimage')) AS image FROM {source} GROUP BY {key}"
    )
    [(rows, total)] = session.execute(
        f"SELECT count(*), sum(image.value)::VARCHAR FROM ({last}) WHERE image.kind IN {_PUTS}"
    ).fetchall()
    return images, Held(rows, total)


def of_delta(folder: Path, column: str) -> Held:
    """Return the current contents of a Delta table."""
    session = duckdb.connect()
    session.register("present", DeltaTable(str(folder)).to_pyarrow_table(columns=[column]))
    [(rows, total)] = session.execute(f"SELECT count(*), sum({column})::VARCHAR FROM present").fetchall()
    return Held(rows, total)
