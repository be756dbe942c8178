# SPDX-License-Identifier: Apache-2.0
"""The metrics of the process itself."""

import gc
import json
import os
import platform
import resource
import time
from importlib.metadata import distribution, version
from pathlib import Path

from penstock.telemetry.readings import Readings

_PAGE_BYTES = resource.getpagesize()
_STARTED = time.time()


def _revision() -> dict[str, str]:
    """Return the commit that the package was installed from, if an installer has recorded it (PEP 610)."""
    recorded = distribution("penstock").read_text("direct_url.json")
    commit = json.loads(recorded or "{}").get("vcs_info", {}).get("commit_id")
    return {} if commit is None else {"revision": str(commit)}


_REVISION = _revision()


def read_process(readings: Readings) -> None:
    """Add version, processor time, memory, descriptors and garbage collections of this process."""
    build = {"version": version("penstock"), "python": platform.python_version()}
    readings.add("penstock_build_info", 1, **build, **_REVISION)
    readings.add("process_cpu_seconds_total", time.process_time())
    readings.add("process_start_time_seconds", _STARTED)
    readings.add("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for generation, statistics in enumerate(gc.get_stats()):
        readings.add("python_gc_collections_total", statistics["collections"], generation=str(generation))
    # These values are unknown on systems other than Linux.
    if os.path.isdir("/proc/self"):
        virtual, resident = Path("/proc/self/statm").read_text().split()[:2]
        readings.add("process_virtual_memory_bytes", int(virtual) * _PAGE_BYTES)
        readings.add("process_resident_memory_bytes", int(resident) * _PAGE_BYTES)
        readings.add("process_open_fds", len(os.listdir("/proc/self/fd")))
