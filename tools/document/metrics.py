# SPDX-License-Identifier: Apache-2.0
"""The page of metrics: name, type, labels and meaning of each."""

from penstock.telemetry.canal_names import ALIASES
from penstock.telemetry.definitions import GROUPS, Definition, Kind, Origin
from penstock.telemetry.otlp import otlp_name
from tools.document.markdown import document, table

_COLUMNS = ("metric", "type", "labels", "meaning")
_ORIGINS: dict[Origin, str] = {
    "daemon": "From a daemon.",
    "pipeline": "From `penstock run --metrics` and `penstock worker --metrics`, for each sink of a pipeline.",
    "subscriber": "From a program that publishes the metrics of its subscriber.",
    "holder": "From a daemon that is a member of a fleet, and from the run of a pipeline.",
    "any": "From every process.",
}


def page() -> str:
    """Return the page."""
    head = (
        "`GET /metrics` of a daemon or a pipeline returns these metrics as Prometheus text or OpenMetrics.\n"
        "With `telemetry.otlp`, or `penstock run --otlp`, they are pushed to an OpenTelemetry collector:\n"
        "[the guide](../guides/operating.md#metrics). A counter starts at 0 with its process. A metric is\n"
        "missing while its value is unknown."
    )
    parts = [head]
    for group in GROUPS:
        parts += [f"## {group.title}", _ORIGINS[group.origin], table(_COLUMNS, map(_row, group.definitions))]
    parts += [
        "## Canal's names",
        "With `metrics.alias: canal`, these are reported in addition, with the label `destination`.",
        table(("metric", "same as"), [(f"`{alias.name}`", f"`{alias.source}`") for alias in ALIASES]),
        "## OpenTelemetry names",
        "The names in OpenTelemetry have dots, and the unit as a field:"
        f" `{otlp_name(_example())}` with the unit `s` is `{_example().name}`.",
    ]
    return document("Metrics", "src/penstock/telemetry/definitions.py", *parts)


def _example() -> Definition:
    return next(
        definition
        for group in GROUPS
        for definition in group.definitions
        if definition.kind is Kind.GAUGE and definition.unit == "seconds"
    )


def _row(definition: Definition) -> tuple[str, str, str, str]:
    labels = ", ".join(
        f"`{label}`" + (" (optional)" if label in definition.optional else "") for label in definition.labels
    )
    return f"`{definition.name}`", definition.kind.value, labels, definition.help
