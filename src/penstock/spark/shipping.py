# SPDX-License-Identifier: Apache-2.0
"""How what a pipeline is made of reaches executors: a program's own functions travel whole.

Plain pickling names a function by its module, which an executor has only where that is installed.
"""

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pyspark

from penstock.pipeline.settings import StepSettings

# It comes with Spark, and has no types of its own.
_cloudpickle: Any = pyspark.cloudpickle


def shipped(value: Any, steps: Sequence[StepSettings]) -> bytes:
    """Return a value as bytes that `pickle.loads` reads anywhere; functions of its steps go along."""
    with _whole(steps):
        data: bytes = _cloudpickle.dumps(value)
    return data


@contextmanager
def _whole(steps: Sequence[StepSettings]) -> Iterator[None]:
    """Let modules that are not installed be pickled by value inside the block."""
    modules = {module.__name__: module for step in steps if (module := _module_of(step)) is not None}
    for module in modules.values():
        _cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules.values():
            _cloudpickle.unregister_pickle_by_value(module)


def _module_of(step: StepSettings) -> ModuleType | None:
    """Return the module of a step's own function, None where executors have it too."""
    function = getattr(step.settings, "function", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        # What was typed in, or run, is pickled by value anyhow.
        return None
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return None if file.startswith(installed) else module
