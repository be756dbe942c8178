# SPDX-License-Identifier: Apache-2.0
"""Sends pipeline parts to executors. The program's own functions are pickled by value.

Plain pickling refers to a function by its module, which may not be installed on an executor.
"""

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pyspark

from penstock.pipeline.settings import StepSettings

# `pyspark.cloudpickle` is part of Spark and has no type annotations.
_cloudpickle: Any = pyspark.cloudpickle


def pickle_for_executors(value: Any, steps: Sequence[StepSettings]) -> bytes:
    """Pickle a value, including the functions of its steps, so that `pickle.loads` can read it on any
    host.
    """
    with _pickling_by_value(steps):
        data: bytes = _cloudpickle.dumps(value)
    return data


@contextmanager
def _pickling_by_value(steps: Sequence[StepSettings]) -> Iterator[None]:
    """Inside the block, pickle a module by value if it is not installed."""
    modules = {module.__name__: module for step in steps if (module := _module_of(step)) is not None}
    for module in modules.values():
        _cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules.values():
            _cloudpickle.unregister_pickle_by_value(module)


def _module_of(step: StepSettings) -> ModuleType | None:
    """Return the module of a step's own function, None if executors have it too."""
    function = getattr(step.settings, "function", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        # Functions of an interactive or main program are pickled by value anyway.
        return None
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return None if file.startswith(installed) else module
