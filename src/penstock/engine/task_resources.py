# SPDX-License-Identifier: Apache-2.0
"""Where tasks get their sources, steps and sinks from: opened for each task, or reused by the next one."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    """A resource that a task opens, such as a source or a sink."""

    def close(self) -> None:
        """Release its connections and memory."""


Resource = TypeVar("Resource", bound=Closable)


class TaskResources:
    """Opens what a task asks for, and closes it when the task gives it back."""

    def take(self, settings: Any, make: Callable[[], Resource]) -> Resource:
        """Return a resource with these settings that no other task uses, made by `make` if necessary."""
        return make()

    def give_back(self, settings: Any, resource: Closable, *, is_intact: bool) -> None:
        """Accept a resource that its task no longer uses. It is intact if the task met no error with it."""
        resource.close()


# Tasks in processes of their own keep nothing for the next task.
CLOSED_AFTER_USE = TaskResources()
