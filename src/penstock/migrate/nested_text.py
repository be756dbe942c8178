# SPDX-License-Identifier: Apache-2.0
"""Reads JSON and TOML files of other systems as plain values, with a limit on the nesting depth."""

import json
import tomllib
from collections.abc import Callable
from typing import Any

# The maximum nesting depth. The files of these systems are never nested nearly this deeply, and code that
# walks a value may recurse up to this depth.
_DEPTH_MAX = 100


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not valid or nested too deep."""
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text. Raises ValueError if it is not valid or nested too deep."""
    document: dict[str, Any] = _parse(tomllib.loads, text)
    return document


def _parse(parse: Callable[[str], Any], text: str) -> Any:
    try:
        value = parse(text)
    except RecursionError as problem:
        raise ValueError("it is nested too deep") from problem
    level = [value]
    for _ in range(_DEPTH_MAX):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {_DEPTH_MAX} levels")


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
