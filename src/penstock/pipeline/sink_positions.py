# SPDX-License-Identifier: Apache-2.0
"""The positions of a pipeline's sinks, and the part of each log that they still need."""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.pipeline.state import Checkpoint
from penstock.source.offsets import Offset
from penstock.source.source import place_of


def smallest_offsets(checkpoints: Iterable[Checkpoint]) -> dict[str, Mapping[str, Any]]:
    """For each source, return the smallest offset of several sinks. The log is still needed from there on."""
    smallest: dict[str, Mapping[str, Any]] = {}
    for checkpoint in checkpoints:
        for source, offset in checkpoint.offsets.items():
            known = smallest.get(source)
            if known is None or place_of_offset(offset) < place_of_offset(known):
                smallest[source] = offset
    return smallest


def place_of_offset(offset: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return a sort key for the offsets of a source."""
    return place_of(Offset.from_json(offset).position)
