# SPDX-License-Identifier: Apache-2.0
"""A Spark run with availableNow ends where the log ended when the run began, even if another server took over
in between.
"""

import pickle
from pathlib import Path

from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.model import TablePatterns
from penstock.source.read_settings import ReadSettings
from penstock.source.source import SourceOptions
from penstock.spark.admission import AdmissionStreamReader
from tests.support.binlog.mariadb_log import keep_mariadb_file
from tests.support.logstore.folders import open_log

CONSUMED = ["0-1-1", "0-1-2", "0-1-3"]


def append(folder: Path, server: int, before: str, transactions: list[str], number: int = 1) -> None:
    log = open_log(folder)
    keep_mariadb_file(log, 0, server, before, transactions, number)
    log.close()


def test_end_of_a_run_is_settled_again_on_another_server(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    append(folder, 1, "", CONSUMED)
    settings = ReadSettings(SourceOptions.parse(folder), TablePatterns(), "typed", start="earliest")
    reader = AdmissionStreamReader(settings, None)
    reader.prepareForTriggerAvailableNow()
    consumed = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert consumed["gtid_set"] == CONSUMED[-1]
    folder.rename(tmp_path / "old")
    append(folder, 2, "", [*CONSUMED, "0-2-4"])
    reader = pickle.loads(pickle.dumps(reader))
    end = reader.latestOffset(consumed, ReadAllAvailable())
    assert end["gtid_set"] == "0-1-3,0-2-4"
    append(folder, 2, "0-1-3,0-2-4", ["0-2-5"], number=2)
    reader = pickle.loads(pickle.dumps(reader))
    assert reader.latestOffset(end, ReadAllAvailable()) == end, "a later transaction belongs to the next run"
