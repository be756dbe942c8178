# SPDX-License-Identifier: Apache-2.0
"""Spilled runs of a batch: the last row of each key counts, however few keys fit into memory."""

import random

import numpy
import pyarrow
import pytest

from penstock.sinks.lake.parquet_files import DataFile
from penstock.sinks.lake.spill_file import SpillFile
from penstock.sinks.lake.spilled_runs import SpilledRuns

Key = tuple[int | None, str]


@pytest.mark.parametrize("memory_bytes", [1, 128 * 100, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_last_version_of_each_key_remains_whatever_fits_into_memory(memory_bytes: int, seed: int) -> None:
    chance = random.Random(seed)
    file = SpillFile()
    runs = SpilledRuns(file, memory_bytes)
    last: dict[Key, tuple[int, int]] = {}
    rows: list[tuple[int, Key, bool]] = []
    for run in range(8):
        keys = list({(chance.choice([None, *range(20)]), chance.choice("ab")) for _ in range(25)})
        versions = [chance.randrange(10) for _ in keys]
        puts = [chance.random() < 0.7 for _ in keys]
        for key, version, is_put in zip(keys, versions, puts, strict=True):
            last[key] = max(last.get(key, (-1, -1)), (version, run))
            rows.append((run, key, is_put))
        columns = [
            pyarrow.array([key[0] for key in keys], pyarrow.int32()),
            pyarrow.array([key[1] for key in keys]),
        ]
        half = sum(puts) // 2
        files = [DataFile(f"{run}-a", half, 1), DataFile(f"{run}-b", sum(puts) - half, 1)]
        runs.add(
            pyarrow.table(columns, names=["id", "name"]), numpy.array(versions), numpy.array(puts), files
        )
    visits = []
    assert runs.find_superseded(lambda index: visits.append(index.count)) == len(last)
    assert sum(visits) == len(rows)
    assert len(visits) == (8 if memory_bytes == 1 else 1 if memory_bytes == 1 << 20 else len(visits))
    masks = [
        numpy.zeros(file.rows, bool) if mask is None else numpy.unpackbits(mask, count=file.rows).astype(bool)
        for file, mask in zip(runs.files, runs.masks(), strict=True)
    ]
    superseded = [last[key][1] != run for run, key, is_put in rows if is_put]
    assert numpy.concatenate(masks).tolist() == superseded
    runs.clear()
    file.close()
    assert runs.files == []
