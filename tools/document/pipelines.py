# SPDX-License-Identifier: Apache-2.0
"""The page of a pipeline's settings: its sections, every step and every sink."""

import inspect
import re
import textwrap
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from penstock.pipeline import settings_sections as sections
from penstock.pipeline import step, steps
from penstock.settings.values import Section
from penstock.sinks import sink
from tools.document.markdown import document, table

_SECTIONS: dict[str, type[Section]] = {
    "source": sections.SourceSection,
    "source.tls": sections.TlsSection,
    "load": sections.LoadSettings,
    "batch": sections.BatchSettings,
    "errors": sections.ErrorSettings,
    "loops": sections.LoopSettings,
}
# Top-level settings that a separate part describes.
_DESCRIBED_SEPARATELY = {
    "source": "see below",
    "sources": "a list of sources, each with the settings of `source`",
    "load": "a section (see below), or just its mode",
    "steps": "a list of [steps](#steps), applied in order",
    "sink": "one of the [sinks](#sinks)",
    "sinks": "several [sinks](#sinks) by name, instead of `sink`; each also accepts `tables` and `exclude`",
    "batch": "see below",
    "errors": "see below",
    "loops": "see below",
}
# The value types of amounts with a unit, by their type in a schema.
_AMOUNTS = {("string", "integer"): "bytes: `64MiB`", ("string", "number"): "a time: `30s`"}


def page() -> str:
    """Return the page."""
    head = (
        "The settings of `pipeline.yaml`, which are also the arguments of `penstock.Pipeline`. `${NAME}`\n"
        "in a value is replaced from the environment. `penstock run --json-schema` prints the JSON Schema\n"
        "for editors. The guide: [pipelines](../guides/pipelines.md)."
    )
    parts = [head, _first_level()]
    for name, section in _SECTIONS.items():
        parts += [f"## {name}", _doc(section), _fields(section)]
    parts += [
        "## Steps",
        "Every step also accepts `tables` and `exclude`: patterns for the table names as they reach the\n"
        "step. A step that can fail on single rows accepts `on_error`: `stop`, `skip` or `dead_letter`.\n"
        "The default is `errors.rows`.",
    ]
    for verb in step.verbs():
        module = import_module(f"{steps.__name__}.{verb}")
        parts += [f"### {verb}", *_prose(module), _fields(module.Settings, {"tables", "exclude", "on_error"})]
    parts += [
        "## Sinks",
        "Below `sinks` every sink has a name, and also accepts these settings:",
        _fields(sections.SinkTablesSection),
    ]
    for kind in sink.kinds():
        module = import_module(f"penstock.sinks.{kind}.sink")
        needs = f"Needs `pip install 'penstock[{module.EXTRA}]'`." if module.EXTRA else ""
        parts += [f"### {kind}", *_prose(module), *([needs] if needs else []), _fields(module.Settings)]
    return document("Pipelines", "src/penstock/pipeline/settings_sections.py", *filter(None, parts))


def _first_level() -> str:
    rows = []
    for name, field in sections.PipelineSection.model_fields.items():
        if name in _DESCRIBED_SEPARATELY:
            rows.append((f"`{name}`", "", "", _sentence(field.description, _DESCRIBED_SEPARATELY[name])))
        else:
            rows.append(_row(sections.PipelineSection, name))
    return table(("setting", "value", "default", "meaning"), rows)


def _sentence(description: str | None, more: str) -> str:
    return f"{description}; {more}" if description else more


def _fields(section: type[BaseModel], left_out: set[str] | None = None) -> str:
    rows = [_row(section, name) for name in section.model_fields if name not in (left_out or set())]
    return table(("setting", "value", "default", "meaning"), rows) if rows else ""


def _row(section: type[BaseModel], name: str) -> tuple[str, str, str, str]:
    schema = section.model_json_schema()
    schema_part = schema["properties"][name]
    needed = name in schema.get("required", ())
    default = "required" if needed else _default(schema_part)
    return f"`{name}`", _kind(schema_part, schema.get("$defs", {})), default, _meaning(schema_part)


def _meaning(schema_part: dict[str, Any]) -> str:
    return re.sub(r"\s+", " ", str(schema_part.get("description", "")))


def _default(schema_part: dict[str, Any]) -> str:
    value = schema_part.get("default")
    if value in (None, "", (), [], {}) or isinstance(value, dict | list):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if schema_part.get("type") == ["string", "integer"]:
        return f"`{value >> 20}MiB`" if value % (1 << 20) == 0 else f"`{value}`"
    if schema_part.get("type") == ["string", "number"]:
        return f"`{value:g}s`"
    return f"`{value}`"


def _kind(schema_part: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe the type of a value in a word or two."""
    if "$ref" in schema_part:
        target = definitions[schema_part["$ref"].rpartition("/")[2]]
        return _kind(target, definitions) if "enum" in target else "a section"
    if "enum" in schema_part:
        return ", ".join(f"`{member}`" for member in schema_part["enum"])
    if "const" in schema_part:
        return f"`{schema_part['const']}`"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema_part:
            kinds = [
                _kind(alternative, definitions)
                for alternative in schema_part[several]
                if alternative.get("type") != "null"
            ]
            return " or ".join(dict.fromkeys(kinds))
    if schema_part.get("type") == "array":
        inner = schema_part.get("items") or {}
        return f"list of {_kind(inner, definitions)}" if inner else "list"
    if schema_part.get("type") == "object":
        inner = schema_part.get("additionalProperties")
        return f"mapping to {_kind(inner, definitions)}" if isinstance(inner, dict) else "mapping"
    kind = schema_part.get("type", "text")
    words = {"string": "text", "integer": "number", "number": "number", "boolean": "`true`, `false`"}
    if isinstance(kind, list):
        return _AMOUNTS[tuple(kind)]
    return words.get(kind, str(kind))


def _doc(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _prose(module: Any) -> list[str]:
    """Return a module's docstring as paragraphs, without its leading name and with examples as code."""
    text = inspect.getdoc(module) or ""
    parts = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        is_code = lines[0].startswith(("- ", "    "))
        code = textwrap.dedent(paragraph).rstrip()
        parts.append(f"```yaml\n{code}\n```" if is_code else " ".join(paragraph.split()))
    first = re.sub(r"^`\w+`: ", "", parts[0])
    return [first[:1].upper() + first[1:], *parts[1:]]
