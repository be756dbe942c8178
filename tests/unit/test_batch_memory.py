# SPDX-License-Identifier: Apache-2.0
"""The rows that a task buffers follow the size of a batch."""

from pathlib import Path

import pytest

from penstock.engine.batch_plan import buffered_bytes_max
from penstock.limits import MIB
from penstock.pipeline.settings import pipeline_of_values
from penstock.sinks.lake.lake_sink import LakeSink
from penstock.sinks.sink import BatchMark


@pytest.mark.parametrize(
    ("batch_mib", "settings_mib", "task_mib", "writer_mib"),
    [(512, 256, 256, 256), (64, 256, 128, 128), (1, 256, 32, 32), (64, 16, 128, 16)],
)
def test_buffered_rows_follow_the_batch_and_the_sinks_settings(
    tmp_path: Path, batch_mib: int, settings_mib: int, task_mib: int, writer_mib: int
) -> None:
    settings = pipeline_of_values(
        {
            "name": "test",
            "source": {"url": "mysql://repl@127.0.0.1:3306", "tables": "shop.*"},
            "sink": {"delta": {"path": "/lake", "memory_bytes": settings_mib * MIB}},
            "batch": {"bytes": batch_mib * MIB},
        },
        tmp_path,
    )
    sink = settings.make_sink()
    assert isinstance(sink, LakeSink)
    assert buffered_bytes_max(settings) == task_mib * MIB
    mark = BatchMark("test", "g", 1, buffered_bytes_max=buffered_bytes_max(settings))
    assert sink.memory_for(mark) == writer_mib * MIB
