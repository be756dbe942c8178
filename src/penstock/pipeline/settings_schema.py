# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of pipeline files, for editors."""

from collections.abc import Sequence
from typing import Any

from penstock.pipeline import step as step_seam
from penstock.pipeline.settings_sections import PipelineSection, SinkTablesSection
from penstock.sinks import sink as sink_seam


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a pipeline file, with every step and sink."""
    whole = PipelineSection.model_json_schema()
    definitions = whole.setdefault("$defs", {})
    whole["properties"]["load"] = {
        "anyOf": [{"enum": ["full", "consistent", "none"]}, {"$ref": "#/$defs/LoadSettings"}]
    }
    step = _choice(step_seam.verbs(), step_seam.settings_of, "step", definitions)
    sink = _choice(sink_seam.kinds(), sink_seam.settings_of, "sink", definitions)
    whole["properties"]["steps"] = {"type": "array", "items": step, "description": "in the order written"}
    whole["properties"]["sink"] = sink | {"description": "where changes go"}
    tables = SinkTablesSection.model_json_schema()["properties"]
    named = {"oneOf": [_with_properties(choice, tables) for choice in sink["oneOf"]]}
    whole["properties"]["sinks"] = {
        "type": "object",
        "additionalProperties": named,
        "description": "several sinks by name, instead of `sink`",
    }
    whole["oneOf"] = [{"required": ["sink"]}, {"required": ["sinks"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def _with_properties(choice: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a variant that accepts further properties beside its name."""
    if "properties" not in choice:
        return choice
    return {**choice, "properties": {**properties, **choice["properties"]}}


def _choice(names: Sequence[str], settings_of: Any, what: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a choice between variants, and add their schemas to the definitions."""
    choices: list[dict[str, Any]] = [{"enum": list(names)}]
    for name in names:
        prefix = f"{what}_{name}"
        own = settings_of(name).model_json_schema(ref_template=f"#/$defs/{prefix}_{{model}}")
        for inner, schema in own.pop("$defs", {}).items():
            definitions[f"{prefix}_{inner}"] = schema
        definitions[prefix] = own
        choices.append(
            {
                "type": "object",
                "properties": {name: {"anyOf": [{"$ref": f"#/$defs/{prefix}"}, {"type": "null"}]}},
                "required": [name],
                "additionalProperties": False,
            }
        )
    return {"oneOf": choices}
