# SPDX-License-Identifier: Apache-2.0
"""A batch of many tables is published table by table, several of them concurrently. The batch counts as
complete once its manifest is written.
"""

import itertools
import threading
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from penstock.changes import Target
from penstock.errors import DiskFailed
from penstock.sinks.files.sink import FilesSink, Settings
from penstock.sinks.sink import BatchMark, Evolution, Receipt
from tests.support.pipeline.changes_made import changes_of, insert, target_of

TABLES = [target_of({"id": "int"}, key=("id",), name=f"shop.t{number}") for number in range(20)]
MARK = BatchMark("wide", "1", 1)


def stage(sink: FilesSink, part: int, tables: list[Target]) -> Receipt:
    writer = sink.open(MARK, part)
    for table in tables:
        writer.write(changes_of(table, insert(part + 1, id=part)))
    return writer.finish()


def rows_in(folder: Path) -> dict[str, list[int]]:
    """Return the numbers in the published files of each table."""
    return {
        target.name.table: sorted(
            number
            for file in (folder / "shop" / target.name.table).glob("[!_]*.parquet")
            for number in parquet.read_table(file).column("id").to_pylist()
        )
        for target in TABLES
    }


def test_batch_is_complete_after_a_commit_that_failed_halfway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FilesSink(Settings(path=str(tmp_path)))
    for table in TABLES:
        sink.prepare(table, Evolution.STOP)
    receipts = [stage(sink, 0, TABLES), stage(sink, 1, TABLES[::2])]
    publish, numbers, at_once = sink._publish, itertools.count(), threading.Barrier(2, timeout=60)

    def fail_once(staged: str, final: str) -> None:
        if next(numbers) < 2:
            # Passes only if two tables are published at once.
            at_once.wait()
        if "/t7/" in final:
            raise OSError(5, "input/output error", final)
        publish(staged, final)

    with monkeypatch.context() as patched:
        patched.setattr(sink, "_publish", fail_once)
        with pytest.raises(DiskFailed, match="input/output error"):
            sink.commit(MARK, receipts)
    assert sink.last_number(MARK, TABLES) is None, "nothing shows a batch that is not complete"
    sink.commit(MARK, receipts)
    sink.commit(MARK, receipts)
    assert sink.last_number(MARK, TABLES) == 1
    both = {target.name.table for target in TABLES[::2]}
    assert rows_in(tmp_path) == {
        target.name.table: [0, 1] if target.name.table in both else [0] for target in TABLES
    }
    assert not [*tmp_path.glob("shop/*/_staged/*")]


def test_commit_of_another_attempt_replaces_the_files_of_the_last_one(tmp_path: Path) -> None:
    sink = FilesSink(Settings(path=str(tmp_path)))
    for table in TABLES:
        sink.prepare(table, Evolution.STOP)
    first = [stage(sink, part, TABLES) for part in range(3)]
    manifests = tmp_path / "_penstock"
    sink.commit(MARK, first)
    [manifest] = manifests.rglob("*.json")
    # The state after a failure of the host just before the manifest.
    manifest.unlink()
    sink.commit(MARK, [stage(sink, 5, TABLES[:4])])
    expected = {target.name.table: [5] if target in TABLES[:4] else [0, 1, 2] for target in TABLES}
    assert rows_in(tmp_path) == expected
