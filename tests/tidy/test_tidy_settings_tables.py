# SPDX-License-Identifier: Apache-2.0
"""The tables of settings in the guides: every setting exists, and has the default that its table shows."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.settings.console import ConsoleSection
from penstock.settings.daemon import Settings
from penstock.settings.listen import AccountSettings
from penstock.settings.values import bytes_of, seconds_of
from penstock.sinks.kafka.registry import Registry
from penstock.sinks.sink import settings_of
from tests.tidy.tree import ROOT

HEAD = re.compile(r"^\| setting[^|]* \| default \| meaning \|$")
# The settings classes of a page's tables, in order. Every other page has one table, for the sink with the
# page's name.
CLASSES: dict[str, list[type[BaseModel]]] = {
    "console.md": [ConsoleSection],
    "fleet.md": [Settings],
    "operating.md": [Settings, Settings],
    "serve.md": [Settings, AccountSettings],
    "sinks/kafka.md": [settings_of("kafka"), Registry],
}


def rows() -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield each row of the tables of settings, with its page and the class of its settings."""
    guides = ROOT / "docs/guides"
    for path in sorted(guides.rglob("*.md")):
        page, lines, number = path.relative_to(guides).as_posix(), path.read_text().splitlines(), 0
        for start, line in enumerate(lines):
            if HEAD.match(line):
                section = CLASSES[page][number] if page in CLASSES else settings_of(path.stem)
                number += 1
                for row in lines[start + 2 :]:
                    if not row.startswith("|"):
                        break
                    yield page, section, row


def fields_of(section: type[BaseModel], cell: str) -> list[FieldInfo]:
    """Return the fields that the first cell of a row names. Later names may leave out the parents of the
    first name.
    """
    names = re.findall(r"`([\w.]+)`", cell)
    parents = names[0].split(".")[:-1]
    fields = []
    for name in names:
        ways = [[*parents[:depth], *name.split(".")] for depth in range(len(parents), -1, -1)]
        field = next(filter(None, (field_at(section, way) for way in ways)), None)
        assert field is not None, f"{section.__name__} has no {name}"
        fields.append(field)
    return fields


def field_at(section: type[BaseModel], path: list[str]) -> FieldInfo | None:
    """Return the field at a path below a section, None if missing. NAME in the path stands for any key."""
    field = section.model_fields.get(path[0])
    if field is None or len(path) == 1:
        return field
    rest = path[2:] if path[1] == "NAME" else path[1:]
    return next(filter(None, (field_at(inner, rest) for inner in sections_in(field.annotation))), None)


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of settings in a type, such as a class or None, or a mapping to them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


def shown_in(cell: str) -> list[str]:
    """Return the values and words in the second cell of a row, without spaces."""
    return [part.strip("` ").replace(" ", "") for part in cell.split(", ")]


def values_of(default: Any) -> set[Any]:
    """Return the texts that stand for a default, if a table has to show the default."""
    if isinstance(default, tuple) and len(default) == 1:
        return values_of(default[0])
    if isinstance(default, bool):
        return {"true"} if default else set()
    return {default} if default != "" and isinstance(default, str | int | float) else set()


def value_in(shown: str) -> Any:
    """Return the value of a text in a table: a number (also of seconds or bytes), or the text itself."""
    if shown == "UTC":
        return "+00:00"
    if re.fullmatch(r"[\d.]+(ms|s|m|h|d)?", shown):
        return seconds_of(shown)
    return bytes_of(shown) if re.fullmatch(r"[\d.]+\w+", shown) else shown


@pytest.mark.parametrize("page", sorted({page for page, _, _ in rows()}))
def test_settings_exist_and_have_the_defaults_of_the_table(page: str) -> None:
    wrong = []
    for _, section, row in filter(lambda row: row[0] == page, rows()):
        _, cell, shown, meaning, _ = re.split(r"(?<!\\)\|", row)
        defaults = [field.get_default(call_default_factory=True) for field in fields_of(section, cell)]
        expected = set().union(*map(values_of, defaults))
        values = {value_in(text) for text in shown_in(shown)}
        described_elsewhere = not shown.strip() and meaning.strip().startswith("[")
        claimed = {value for value in values if value in ("true", "false") or isinstance(value, float | int)}
        allowed = expected | {"false" for default in defaults if default is False}
        if not (described_elsewhere or expected <= values) or not claimed <= allowed:
            wrong.append(f"{row}\n  defaults: {defaults}")
    assert not wrong, "\n".join(wrong)
