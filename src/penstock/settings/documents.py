# SPDX-License-Identifier: Apache-2.0
"""The documents of `penstock export` and `penstock apply`, several to a file, as YAML."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from penstock.errors import OptionInvalid
from penstock.settings.daemon import InstanceName, InstanceSettings
from penstock.settings.exported import ExportedText, without_secrets
from penstock.settings.file import (
    Document,
    read_yaml,
    refuse,
    translate_validation_errors,
    yaml_documents,
    yaml_text,
)
from penstock.settings.values import Section, secrets_unread

_HINT = "Write documents as penstock export prints them, or a pipeline file"


# Values of variables by name. The name in ${NAME} must be one that an environment can contain.
_Values = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Annotated[str, Field(pattern=r"^[^\x00]*$")]
]


class JobDocument(Section):
    """A job: the pipeline file's `text`, and how the fleet runs it."""

    job: str
    labels: dict[str, str] = Field(default_factory=dict)
    verb: Literal["run", "relay"] = "run"
    options: tuple[str, ...] = ()
    weight: float = Field(default=1.0, gt=0)
    zone: str | None = None
    values: _Values = Field(default_factory=dict, description="what ${NAME} in the text stands for")
    text: str


class SelectionDocument(Section):
    """The selection that an operator has set for a subscription."""

    tables: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    changes: tuple[str, ...] | None = None
    where: str | None = None
    columns: tuple[str, ...] | None = None


class SubscriptionDocument(Section):
    """A subscription without its checkpoints."""

    subscription: str = Field(pattern=r"^[^/]+/.+$")
    labels: dict[str, str] = Field(default_factory=dict)
    tables: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shard_count: int = Field(default=1, ge=1)
    shard_columns: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    selection: SelectionDocument = Field(default_factory=SelectionDocument)
    paused: bool = False


class InstanceDocument(Section):
    """An instance: its section of a settings file."""

    instance: InstanceName
    values: _Values = Field(default_factory=dict, description="what ${NAME} in the settings stands for")
    settings: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the section."""
        labels: dict[str, str] = self.settings.get("labels", {})
        return labels

    def text(self) -> str:
        """Return the section as the text of a file. Raises OptionInvalid if it contains a secret in plain
        text.
        """
        text = yaml_text(self.settings)
        if hidden := without_secrets(text, self.instance).hidden:
            raise OptionInvalid(
                f"instance {self.instance}: a secret is written out in its settings",
                hint=f"Write password_file, password_env, or a variable such as ${{{hidden[0]}}}",
            )
        return text


_DOCUMENTS: dict[str, type[Section]] = {
    "job": JobDocument,
    "instance": InstanceDocument,
    "subscription": SubscriptionDocument,
}


def read_section(
    name: str, text: str, values: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the section of an instance as plain values. Raises OptionInvalid if no daemon can use it.

    `${NAME}` is looked up in `values`, then in `environment`. Without an environment, neither variables nor
    secrets are needed.
    """
    document = read_yaml(Path(f"instance {name}"), {**(environment or {}), **values}, text=text)
    problems = [] if environment is None else list(document.problems)
    instance = None
    try:
        with secrets_unread() if environment is None else nullcontext():
            instance = InstanceSettings.model_validate(document.value)
    except ValidationError as error:
        problems += translate_validation_errors(error.errors(include_url=False), InstanceSettings)
    if problems or instance is None:
        raise refuse(f"instance {name}", document, problems, hint=_HINT)
    if instance.is_tidb or instance.is_ticdc:
        raise OptionInvalid(
            f"instance {name} is a TiDB cluster", hint="Name it in the settings file, and restart the daemon"
        )
    section: dict[str, Any] = document.value
    return section


def read_documents(path: Path, text: str) -> list[Section] | None:
    """Return the documents of a text, None if it is a pipeline file. Raises OptionInvalid."""
    documents = yaml_documents(text)
    if not documents:
        raise OptionInvalid(f"{path} is empty", hint=_HINT)
    kinds = [
        next((kind for kind in _DOCUMENTS if isinstance(document, dict) and kind in document), None)
        for document in documents
    ]
    if kinds == [None]:
        return None
    sections: list[Section] = []
    for number, (document, kind) in enumerate(zip(documents, kinds, strict=True), 1):
        if kind is None:
            raise OptionInvalid(f"document {number} of {path} is of no kind that is known", hint=_HINT)
        sections.append(_document(kind, document, f"{path}, {kind} {document[kind]!s:.100}"))
    return sections


def exported_instance(name: str, text: str, values: Mapping[str, str]) -> tuple[dict[str, Any], ExportedText]:
    """Return the document of an instance as plain values without its secrets, and its exported text."""
    exported = without_secrets(text, name)
    (section,) = yaml_documents(exported.text)
    shown = {variable: value for variable, value in values.items() if variable not in exported.references}
    return {"instance": name, "values": shown, "settings": section}, exported


def instance_document(values: Mapping[str, Any]) -> InstanceDocument:
    """Return an instance from plain values. Raises OptionInvalid."""
    document: InstanceDocument = _document("instance", values, f"instance {values['instance']!s:.100}")
    return document


def _document(kind: str, values: Any, shown: str) -> Any:
    try:
        document = _DOCUMENTS[kind].model_validate(values)
    except ValidationError as error:
        problems = translate_validation_errors(error.errors(include_url=False), _DOCUMENTS[kind])
        raise refuse(shown, Document(values), problems, hint=_HINT) from error
    if isinstance(document, InstanceDocument):
        read_section(document.instance, document.text(), document.values)
    return document
