# SPDX-License-Identifier: Apache-2.0
"""Objects that a `with` block closes."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A base class for objects that can be used in a `with` block, which closes them at its end."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called several times."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
