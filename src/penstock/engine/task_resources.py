# SPDX-License-Identifier: Apache-2.0
"""Provides tasks with sources, steps and sinks, which are opened for each task or reused by later tasks."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    """A resource that a task opens, such as a source or a sink."""

    def close(self) -> None:
        """Release the task's connections and memory."""


Resource = TypeVar("Resource", bound=Closable)


class TaskResources:
    """Opens the resources that a task requests, and closes them when the task returns them."""

    def take(self, settings: Any, make: Callable[[], Resource]) -> Resource:
        """Return a resource with these settings that no other task uses, created with `make` if necessary."""
        return make()

    def give_back(self, settings: Any, resource: Closable, *, is_intact: bool) -> None:
        """Accept a resource that its task no longer uses. The resource is `intact` if the task had no error
        while using it.
        """
        resource.close()


# Tasks in separate processes keep no resources for later tasks.
CLOSED_AFTER_USE = TaskResources()
