# SPDX-License-Identifier: Apache-2.0
"""The page of costs is computed from the newest full run of each benchmark."""

import json
from pathlib import Path
from typing import Any

from tools.document.costs import measurements, missed_targets, rows


def _write(folder: Path, name: str, size: str, finished_at: str, cpu: float) -> None:
    rates = {"MB/s": 500.0, "rows/s": 1_000_000.0, "CPU s per GB": cpu}
    lines: list[dict[str, Any]] = [
        {"workload": "narrow", "subject": "Penstock", "rates": rates},
        {"workload": "narrow", "subject": "mysqlbinlog --raw", "rates": rates | {"CPU s per GB": 99.0}},
        {"workload": "narrow", "subject": "Penstock", "rates": rates | {"CPU s per GB": 98.0}},
    ]
    run = {
        "finished_at": finished_at,
        "options": {"size": size},
        "machine": {"commit": name},
        "cases": [{"case": "server_to_log", "lines": lines}],
    }
    (folder / f"{name}.json").write_text(json.dumps(run))


def test_figure_that_a_run_did_not_measure_is_empty(tmp_path: Path) -> None:
    _write(tmp_path, "lakes", "1GB", "2026-01-01T00:00:00+00:00", 4.0)
    run = json.loads((tmp_path / "lakes.json").read_text())
    rates = {"rows/s": 10.0, "bytes written per row": 40.0}
    lines = [
        {"workload": "delta", "subject": "Penstock", "rates": rates},
        {"workload": "iceberg", "subject": "Penstock", "rates": rates | {"µs of CPU per row": 3.0}},
    ]
    run["cases"] = [{"case": "changes_to_lake", "lines": lines}]
    (tmp_path / "lakes.json").write_text(json.dumps(run))
    link = "[lakes](../../bench/results/lakes.md)"
    assert list(rows(measurements(tmp_path))) == [
        ("updates → mirror in Delta or Iceberg", "delta", "", "0", "40", "", link),
        ("updates → mirror in Delta or Iceberg", "iceberg", "3,000", "0", "40", "", link),
    ]


def test_costs_are_those_of_the_newest_full_run(tmp_path: Path) -> None:
    _write(tmp_path, "older", "1GB", "2026-01-01T00:00:00+00:00", 4.0)
    _write(tmp_path, "newer", "1GB", "2026-01-02T00:00:00+00:00", 2.0)
    _write(tmp_path, "small", "100MB", "2026-01-03T00:00:00+00:00", 3.0)
    # A billion changes of 500 bytes are 500 GB of log, at 2 CPU seconds per GB.
    assert list(rows(measurements(tmp_path))) == [
        (
            "live server → durable log",
            "narrow",
            "1,000",
            "500",
            "500",
            "0",
            "[newer](../../bench/results/newer.md)",
        )
    ]


def test_missed_targets_are_those_of_the_newest_run(tmp_path: Path) -> None:
    def write(name: str, finished_at: str, ratios: dict[str, float]) -> None:
        _write(tmp_path, name, "1GB", finished_at, 4.0)
        run = json.loads((tmp_path / f"{name}.json").read_text())
        run["cases"][0]["lines"] = [
            {
                "workload": "narrow",
                "subject": subject,
                "rates": {},
                "ratio": ratio,
                "target": {"ratio": 2, "aim": subject == "aim"},
                "note": "",
            }
            for subject, ratio in ratios.items()
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps(run))

    write("older", "2026-01-01T00:00:00+00:00", {"slow": 0.5, "fast": 1.0})
    write("newer", "2026-01-02T00:00:00+00:00", {"slow": 1.0, "fast": 2.0, "aim": 0.1})
    assert list(missed_targets(measurements(tmp_path))) == [
        ("`server_to_log`", "narrow", "slow", "0.50", "", "[newer](../../bench/results/newer.md)")
    ]
