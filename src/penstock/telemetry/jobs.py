# SPDX-License-Identifier: Apache-2.0
"""The metrics of the jobs of a worker: each job serves its own, and the worker queries them."""

import json
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import structlog

from penstock.telemetry.definitions import GROUPS
from penstock.telemetry.publish import READINGS_PATH
from penstock.telemetry.readings import Readings

_log = structlog.get_logger(__name__)

# A job that hangs must not hold up the others for longer than a scrape may take.
_SECONDS_MAX = 2.0
# A worker shows these metrics of its jobs. Metrics of the process are left out, because a job has them under
# the same names as its worker.
_NAMES = {
    definition.name
    for group in GROUPS
    if group.origin in ("pipeline", "holder")
    for definition in group.definitions
}


def read_jobs(readings: Readings, folder: Path, file_name: str) -> None:
    """Add the metrics of every job below a folder. A job that does not answer has none."""
    for file in sorted(folder.glob(f"*/{file_name}")):
        try:
            _read_job(readings, file.read_text(encoding="utf-8"))
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as problem:
            # The job is ending, or is just starting.
            _log.debug("a job has no metrics", job=file.parent.name, why=repr(problem))


def _read_job(readings: Readings, address: str) -> None:
    connection = HTTPConnection(address, timeout=_SECONDS_MAX)
    try:
        connection.request("GET", READINGS_PATH)
        readings.add_json(json.loads(connection.getresponse().read()), _NAMES)
    finally:
        connection.close()
