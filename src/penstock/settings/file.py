# SPDX-License-Identifier: Apache-2.0
"""A settings file as YAML: where each value stands, what is written twice, and how problems are told."""

import difflib
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from penstock.errors import OptionInvalid

# The path of a value: keys of mappings and indexes of lists.
Place = tuple[str | int, ...]

_VARIABLE = re.compile(r"\$(\$|\{([^{}]*)\})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, as keys and indexes, and what."""

    place: Place
    what: str


@dataclass
class Document:
    """A file as plain values, with the line on which each of them stands."""

    value: Any = None
    lines: dict[Place, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, place: Place) -> int:
        """Return the line of a value, or of the nearest one around it that is written."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def read_yaml(
    path: Path, environment: Mapping[str, str], hint: str = "Run: penstock serve penstock.yaml"
) -> Document:
    """Read a file, with `${NAME}` replaced by the environment's NAME and `$$` by `$`.

    A name that stands twice and a variable that is not set are problems of the document. Raises OptionInvalid
    where the file cannot be read, with `hint`, or is no YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionInvalid(f"the settings file {path} cannot be read: {problem}", hint=hint) from problem
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise OptionInvalid(f"{path} is no YAML: {problem.problem}", position=where) from problem
    document = Document()
    document.value = {} if root is None else _plain(root, (), document, environment)
    return document


def _plain(node: Any, place: Place, document: Document, environment: Mapping[str, str]) -> Any:
    """Return a node as plain values, noting lines and problems on the way."""
    document.lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value)
            inner = (*place, name)
            if name in found:
                document.problems.append(
                    Problem(inner, f"it stands twice, here and on line {document.lines[inner]}")
                )
            document.lines[inner] = key.start_mark.line + 1
            found[name] = _plain(value, inner, document, environment)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one, (*place, index), document, environment) for index, one in enumerate(node.value)]
    value = _scalar(node)
    return _expanded(value, place, document, environment) if isinstance(value, str) else value


def _scalar(node: Any) -> Any:
    """Return what a scalar means. Times stay text: the bounds of a log have their own reader."""
    if node.tag in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"):
        return node.value
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError):
        # A tag of somebody's own means nothing here.
        return node.value
    finally:
        loader.dispose()


def _expanded(text: str, place: Place, document: Document, environment: Mapping[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        name = match.group(2)
        if name is None:
            return "$"
        if not _NAME.fullmatch(name):
            document.problems.append(Problem(place, f"${{{name}}} names no environment variable"))
            return ""
        if name not in environment:
            document.problems.append(Problem(place, f"the environment has no variable {name}"))
            # Something must stand here, so that only the variable is told as missing.
            return f"${{{name}}}"
        return environment[name]

    return _VARIABLE.sub(value_of, text)


# --- Telling --------------------------------------------------------------------------------


def told_by_pydantic(errors: Iterable[Any], root: type[BaseModel]) -> list[Problem]:
    """Return pydantic's findings in our words: an unknown name comes with the nearest known one."""
    problems: list[Problem] = []
    meant: set[Place] = set()
    missing: list[Place] = []
    for error in errors:
        # A name of our own that is refused as a key is told at the key.
        place = tuple(step for step in error["loc"] if step != "[key]")
        if error["type"] == "missing":
            missing.append(place)
        elif error["type"] == "extra_forbidden":
            known = _names_at(root, place[:-1])
            near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.6)
            meant.update((*place[:-1], name) for name in near)
            names = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}"
            problems.append(Problem(place, f"unknown; {names}"))
        else:
            message = str(error["msg"]).removeprefix("Value error, ")
            problems.append(Problem(place, message[:1].lower() + message[1:]))
    # What is missing because its name is misspelt is told once.
    return problems + [Problem(place, "it is missing") for place in missing if place not in meant]


def _names_at(model: type[BaseModel], place: Place) -> list[str]:
    """Return the names that a section knows, the section found by its path."""
    current: Any = model
    for step in place:
        if isinstance(current, type) and issubclass(current, BaseModel):
            current = _section_in(current.model_fields[str(step)].annotation)
        elif get_origin(current) is dict:
            current = _section_in(get_args(current)[1])
        elif get_origin(current) is tuple:
            current = _section_in(get_args(current)[0])
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _section_in(annotation: Any) -> Any:
    """Return the section of an annotation that may also be None."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next((one for one in get_args(annotation) if one is not type(None)), annotation)
    return annotation


_SERVE = "Run: penstock serve --check FILE; penstock serve --schema prints what may stand in it"


def refuse(path: str, document: Document, problems: list[Problem], hint: str = _SERVE) -> OptionInvalid:
    """Return the error that tells every problem, each once, in the order of the file."""
    told = sorted({(document.line_of(one.place), _dotted(one.place), one.what) for one in problems})
    lines = [f"{path}:{line}: {f'{place}: ' if place else ''}{what}" for line, place, what in told]
    count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
    return OptionInvalid(
        "\n  ".join([f"the settings have {count}:", *lines]),
        hint=hint,
    )


def _dotted(place: Place) -> str:
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f"{'.' if text else ''}{step}"
    return text
