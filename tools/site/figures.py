# SPDX-License-Identifier: Apache-2.0
"""Figures of Penstock and other systems from the same run, taken from the files in bench/results."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
MARK = "<!-- figures -->"

# The cases in which a system of the page was measured, how the system's lines begin, and the figure to show.
_CASES = {
    "server_to_lake": ("Debezium's engine", "changes/s"),
    "log_to_canal": ("Canal's server", "rows/s"),
}


def figures() -> str:
    """Return a table of the newest run of each case, in Markdown."""
    lines = ["| case | file | who | figure | run |", "| --- | --- | --- | --- | --- |"]
    for case, (system, unit) in _CASES.items():
        name, result = _newest(case, system)
        for line in result["lines"]:
            if unit in line["rates"] and "against" not in line["subject"]:
                figure = f"{line['rates'][unit]:,.0f} {unit}"
                run = f"[{_date(name)}](../bench/results/{name}.md)"
                lines.append(
                    f"| {result['title']} | {line['workload']} | {line['subject']} | {figure} | {run} |"
                )
    return "\n".join(lines)


def _newest(case: str, system: str) -> tuple[str, dict[str, Any]]:
    """Return the newest run of a case that measured a system, preferring the largest files: the run's name
    and result.
    """
    runs = []
    for path in RESULTS.glob("*.json"):
        run = json.loads(path.read_text())
        for result in run["cases"]:
            subjects = {line["subject"] for line in result["lines"]}
            if result["case"] == case and any(subject.startswith(system) for subject in subjects):
                runs.append(("MB" not in run["options"]["size"], run["finished_at"], path.stem, result))
    assert runs, f"bench/results has no run of {case} with {system}"
    *_, name, result = max(runs, key=lambda run: run[:3])
    return name, result


def _date(name: str) -> str:
    return name[: len("2026-11-21")]
