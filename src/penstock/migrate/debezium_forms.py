# SPDX-License-Identifier: Apache-2.0
"""The message formats of a connector: its handling modes, and flattening by ExtractNewRecordState."""

from typing import Any, get_args

from penstock.migrate.report import OriginalProperties
from penstock.sinks.messages import DebeziumForms, FlatField

_UNWRAP = "io.debezium.transforms.ExtractNewRecordState"
_MODES = {
    "decimal.handling.mode": "decimal",
    "time.precision.mode": "time",
    "bigint.unsigned.handling.mode": "bigint_unsigned",
    "binary.handling.mode": "binary",
}
# The names of the property, since Debezium 2.5 and before it. Each maps the property's values to choices of
# the setting.
_DELETES = {
    "delete.tombstone.handling.mode": {
        "tombstone": "tombstone",
        "rewrite": "rewrite",
        "rewrite-with-tombstone": "rewrite-with-tombstone",
        "delete-to-tombstone": "tombstone",
        "drop": "drop",
    },
    "delete.handling.mode": {"rewrite": "rewrite", "drop": "tombstone", "none": "tombstone"},
}


def transforms_of(properties: OriginalProperties) -> list[str]:
    """Return the names of the transformations, in their order."""
    return [name.strip() for name in properties.get("transforms").split(",") if name.strip()]


def flat_transforms(properties: OriginalProperties) -> set[str]:
    """Return the names of the transformations that make rows flat."""
    return {
        name for name in transforms_of(properties) if properties.get(f"transforms.{name}.type") == _UNWRAP
    }


def forms_of(properties: OriginalProperties) -> dict[str, Any]:
    """Return the section `debezium` of the kafka sink; {} for the connector's defaults."""
    forms: dict[str, Any] = {}
    for name, setting in _MODES.items():
        value = properties.get(name).lower()
        choices = get_args(DebeziumForms.model_fields[setting].annotation)
        if value in choices:
            forms[setting] = value
            properties.carried(name)
        elif value:
            properties.not_carried(name, remark=f"{value} is none of {', '.join(choices)}")
    unwraps = flat_transforms(properties)
    if len(unwraps) == 1:
        [unwrap] = unwraps
        forms |= _flat(properties, f"transforms.{unwrap}.")
        if transforms_of(properties) == [unwrap]:
            properties.carried("transforms", remark="sink.kafka.debezium.flat")
    return forms


def _flat(properties: OriginalProperties, prefix: str) -> dict[str, Any]:
    forms: dict[str, Any] = {"flat": True}
    properties.carried(f"{prefix}type", remark="sink.kafka.debezium.flat")
    known = get_args(FlatField)
    fields = [name.strip() for name in properties.get(f"{prefix}add.fields").split(",") if name.strip()]
    forms["fields"] = [name for name in fields if name in known]
    if left_out := [name for name in fields if name not in known]:
        remark = f"sink.kafka.debezium.fields, without {', '.join(left_out)}"
        properties.changed(f"{prefix}add.fields", remark=remark, attention=True)
    properties.carried(f"{prefix}add.fields", remark="sink.kafka.debezium.fields")
    for name, choices in _DELETES.items():
        value = properties.get(prefix + name).lower()
        if value in choices:
            forms["deletes"] = choices[value]
            properties.carried(prefix + name, remark="sink.kafka.debezium.deletes")
    if properties.get(f"{prefix}drop.tombstones").lower() == "false" and forms.get("deletes") == "rewrite":
        forms["deletes"] = "rewrite-with-tombstone"
    properties.carried(f"{prefix}drop.tombstones", remark="sink.kafka.debezium.deletes")
    return forms
