# SPDX-License-Identifier: Apache-2.0
"""The sources, steps and sinks that the tasks of successive batches reuse.

For a small batch, opening connections, step databases and the sink would take longer than processing the
rows.
"""

import threading
from collections.abc import Callable
from typing import Any, cast

from penstock.engine.task_resources import Closable, Resource, TaskResources


class ReusedResources(TaskResources):
    """Keeps returned resources for later tasks with the same settings. Safe for threads.

    Each resource is used by one task at a time, so it keeps at most as many resources as were ever in use at
    the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Any, Closable]] = []

    def take(self, settings: Any, make: Callable[[], Resource]) -> Resource:
        """Return an idle resource with these settings, or a new one."""
        with self._lock:
            for number, (known, resource) in enumerate(self._idle):
                if known == settings:
                    del self._idle[number]
                    return cast(Resource, resource)
        return make()

    def give_back(self, settings: Any, resource: Closable, *, is_intact: bool) -> None:
        """Keep an intact resource for the next task, and close any other."""
        if not is_intact:
            resource.close()
            return
        with self._lock:
            self._idle.append((settings, resource))

    def close(self) -> None:
        """Close all idle resources. More may be taken afterwards."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, resource in idle:
            resource.close()
