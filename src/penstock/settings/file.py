# SPDX-License-Identifier: Apache-2.0
"""Parses a settings file as YAML: keeps the line of each value, rejects duplicate names, and reports
problems.
"""

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from penstock.errors import OptionInvalid

# The path of a value: keys of mappings and indexes of lists.
ValuePath = tuple[str | int, ...]

# A reference to a variable, whose name is the second group, or an escaped dollar sign.
REFERENCE = re.compile(r"\$(\$|\{([^{}]*)\})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Problem:
    """A problem in a settings file: the path of the value, and a message."""

    path: ValuePath
    message: str


@dataclass
class Document:
    """A file as plain values, with the line of each value."""

    value: Any = None
    lines: dict[ValuePath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, path: ValuePath) -> int:
        """Return the line of a value, or of the nearest value around it that is in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


_HINT_SERVE = "Run: penstock serve penstock.yaml"


def settings_text(path: Path, hint: str = _HINT_SERVE) -> str:
    """Return the text of a file. Raises OptionInvalid, with `hint`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionInvalid(f"the settings file {path} cannot be read: {problem}", hint=hint) from problem


def read_yaml(
    path: Path,
    environment: Mapping[str, str],
    hint: str = _HINT_SERVE,
    text: str | None = None,
) -> Document:
    """Read a file, or its `text`, with `${NAME}` replaced by the environment's NAME and `$$` by `$`.

    A duplicate name and a variable that is not set are problems of the document. Raises OptionInvalid if the
    file cannot be read (with `hint`) or is not YAML.
    """
    text = settings_text(path, hint) if text is None else text
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise OptionInvalid(f"{path} is no YAML: {problem.problem}", position=where) from problem
    except (yaml.YAMLError, RecursionError) as problem:
        raise OptionInvalid(f"{path} is no YAML: {problem}", position=str(path)) from problem
    document = Document()
    document.value = {} if root is None else _plain(root, (), document, environment)
    return document


@dataclass(frozen=True)
class Scalar:
    """A text or number in a settings file: its path, its value as written, and its location in the text."""

    path: ValuePath
    value: str
    start: int
    end: int


def scalars_of(text: str) -> list[Scalar]:
    """Return the texts and numbers of a file in the order of the file, without empty ones. Raises
    OptionInvalid.
    """
    with _reading_yaml():
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    # An alias is another path to the same scalar, so identify scalars by their start.
    scalars = {} if root is None else {scalar.start: scalar for scalar in _scalars(root, ())}
    return [scalar for _, scalar in sorted(scalars.items())]


def _scalars(node: Any, value_path: ValuePath) -> Iterator[Scalar]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, (*value_path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _scalars(child, (*value_path, index))
    elif node.value:
        yield Scalar(value_path, str(node.value), node.start_mark.index, node.end_mark.index)


def yaml_documents(text: str) -> list[Any]:
    """Return the documents of a text as plain values, without empty ones. Raises OptionInvalid."""
    with _reading_yaml():
        return [document for document in yaml.safe_load_all(text) if document is not None]


@contextmanager
def _reading_yaml() -> Iterator[None]:
    try:
        yield
    except (yaml.YAMLError, RecursionError) as problem:
        raise OptionInvalid(
            f"the text is no YAML: {problem}", hint="Check it with a YAML editor"
        ) from problem


def documents_text(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return plain values as YAML documents, with text of several lines as blocks."""
    text = yaml.dump_all(
        documents, Dumper=_BlockDumper, explicit_start=True, sort_keys=False, allow_unicode=True, width=1000
    )
    return str(text)


class _BlockDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes text of several lines as a block."""


_BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def yaml_text(value: Any) -> str:
    """Return plain values as the text of a settings file. A `$` in them is written as it is."""
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False)
    return str(text)


def _plain(node: Any, value_path: ValuePath, document: Document, environment: Mapping[str, str]) -> Any:
    """Return a node as plain values, and record its lines and problems."""
    document.lines.setdefault(value_path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value)
            inner = (*value_path, name)
            if name in mapping:
                document.problems.append(
                    Problem(inner, f"it stands twice, here and on line {document.lines[inner]}")
                )
            document.lines[inner] = key.start_mark.line + 1
            mapping[name] = _plain(value, inner, document, environment)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [
            _plain(child, (*value_path, index), document, environment)
            for index, child in enumerate(node.value)
        ]
    value = _scalar(node)
    return _expanded(value, value_path, document, environment) if isinstance(value, str) else value


def _scalar(node: Any) -> Any:
    """Return the value of a scalar. Times stay text, because the bounds of a log have their own parser."""
    if node.tag in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"):
        return node.value
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError):
        # Settings give no meaning to custom tags, so keep the text.
        return node.value
    finally:
        loader.dispose()


def _expanded(text: str, value_path: ValuePath, document: Document, environment: Mapping[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        name = match.group(2)
        if name is None:
            return "$"
        if not _NAME.fullmatch(name):
            document.problems.append(Problem(value_path, f"${{{name}}} names no environment variable"))
            return ""
        if name not in environment:
            document.problems.append(Problem(value_path, f"the environment has no variable {name}"))
            # Keep a value, so that only the variable is reported as missing.
            return f"${{{name}}}"
        return environment[name]

    return REFERENCE.sub(value_of, text)


# --- Problems -------------------------------------------------------------------------------


def translate_validation_errors(errors: Iterable[Any], root: type[BaseModel]) -> list[Problem]:
    """Translate pydantic's errors into problems. Suggest the nearest known name or value.

    `errors` may contain inputs. An input is shown only for settings with a few possible values, never a
    secret.
    """
    problems: list[Problem] = []
    suggested: set[ValuePath] = set()
    missing: list[ValuePath] = []
    for error in errors:
        # If the name of a key is invalid, report the problem at that key.
        path = tuple(step for step in error["loc"] if step != "[key]")
        if error["type"] == "missing":
            missing.append(path)
        elif error["type"] == "extra_forbidden":
            known_names = _names_at(root, path[:-1])
            matches = difflib.get_close_matches(str(path[-1]), known_names, n=1, cutoff=0.6)
            suggested.update((*path[:-1], name) for name in matches)
            names = (
                f"did you mean {matches[0]}?" if matches else f"known here: {', '.join(sorted(known_names))}"
            )
            problems.append(Problem(path, f"unknown; {names}"))
        elif error["type"] in ("literal_error", "enum"):
            problems.append(Problem(path, _misfit_choice(error["ctx"]["expected"], error.get("input"))))
        else:
            message = str(error["msg"]).removeprefix("Value error, ")
            problems.append(Problem(path, message[:1].lower() + message[1:]))
    # If a name is missing because it is misspelled, report only the misspelling.
    return problems + [Problem(path, "it is missing") for path in missing if path not in suggested]


def _misfit_choice(expected: str, value: Any) -> str:
    """Return the values that a setting with a few possible values accepts, and those that may have been
    meant.
    """
    choices = re.findall(r"'([^']*)'", expected)
    matches = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.6)
    return f"input should be {expected}" + (f"; did you mean {matches[0]}?" if matches else "")


def _names_at(model: type[BaseModel], path: ValuePath) -> list[str]:
    """Return the names that a section accepts; the section is given by its path."""
    current: Any = model
    for step in path:
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
        return next((member for member in get_args(annotation) if member is not type(None)), annotation)
    return annotation


_SERVE = "Run: penstock serve --check FILE; penstock serve --schema prints what may stand in it"


def refuse(path: str, document: Document, problems: list[Problem], hint: str = _SERVE) -> OptionInvalid:
    """Return the error that lists every problem once, in the order of the file."""
    reports = sorted(
        {
            (document.line_of(problem.path), _format_path(problem.path), problem.message)
            for problem in problems
        }
    )
    lines = [
        f"{path}:{line}: {f'{value_path}: ' if value_path else ''}{message}"
        for line, value_path, message in reports
    ]
    count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
    return OptionInvalid(
        "\n  ".join([f"the settings have {count}:", *lines]),
        hint=hint,
    )


def _format_path(path: ValuePath) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f"{'.' if text else ''}{step}"
    return text
