# SPDX-License-Identifier: Apache-2.0
"""Operations: actions with a page that asks for the inputs, shows the effect, and then performs the action.

GET  PATH            shows the form, and the effect according to a dry run
POST PATH/confirm    performs the action, and writes an audit record
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.responses import Response

from penstock.console.forms import needed_field, record_action
from penstock.console.visit import Visit
from penstock.errors import OptionInvalid, PenstockError, SourceMissing

Fields = Mapping[str, str]


@dataclass(frozen=True)
class Sentence:
    """An English sentence on a page, with the values for its placeholders. The English text is the key of the
    sentence's translations.
    """

    text: str
    values: Mapping[str, object] = field(default_factory=dict)


def say(text: str, **values: object) -> Sentence:
    """Return a sentence of a page. A test looks for the translation of each text."""
    return Sentence(text, values)


@dataclass(frozen=True)
class Input:
    """A field that the user fills in.

    The value of a `check` is "1" or "". An `area` has several lines. The value of a `hidden` field comes from
    the link, or is "".
    """

    name: str
    label: str
    kind: str = "text"
    is_needed: bool = False
    example: str = ""


@dataclass(frozen=True)
class Operation:
    """An action that users can run in the console.

    `subject` lists the fields that the page gets from its link, such as the name of a job. `run` performs the
    operation. In a dry run, it returns a sentence about the effect, or None if there is no effect. `suggest`
    returns suggested values for inputs. The page `back` receives the fields in `back_fields`. `respond`
    returns what the browser gets once the operation is done, in place of that page.
    """

    path: str
    title: str
    question: str
    action: str
    subject: tuple[str, ...]
    run: Callable[[Visit, Fields, bool], Sequence[Sentence]]
    back: str
    inputs: tuple[Input, ...] = ()
    back_fields: tuple[str, ...] = ()
    prove: Callable[[Visit], None] = Visit.prove_admin
    suggest: Callable[[Visit, Fields], Mapping[str, Sequence[str]]] = lambda visit, fields: {}
    is_posted: bool = False
    is_harmless: bool = False
    respond: Callable[[Visit, Fields], Response] | None = None

    def page(self, visit: Visit) -> Response:
        """Show the page, with what will happen."""
        posted = {known.name for known in self.inputs if self.is_posted and known.kind != "hidden"}
        return self._show(visit, {name: "" if name in posted else visit.query(name) for name in self._names})

    def preview(self, visit: Visit, form: Fields) -> Response:
        """Return what will happen, using the fields of a form."""
        return self._show(visit, {name: form.get(name, "") for name in self._names})

    def confirm(self, visit: Visit, form: Fields) -> Response:
        """Perform the action, and record it even if it fails halfway.

        The record omits the text of settings. A refused action has changed nothing and is not recorded.
        """
        self.prove(visit)
        for name in (*self.subject, *(needed.name for needed in self.inputs if needed.is_needed)):
            needed_field(form, name)
        fields = {name: form.get(name, "") for name in self._names}
        areas = {known.name for known in self.inputs if known.kind == "area"}
        recorded = {name: value for name, value in fields.items() if value and name not in areas}
        try:
            self.run(visit, fields, False)
        except (OptionInvalid, SourceMissing):
            raise
        except PenstockError:
            record_action(visit, self.action, **recorded, outcome="failed")
            raise
        record_action(visit, self.action, **recorded, outcome="done")
        if self.respond is not None:
            return self.respond(visit, fields)
        return visit.redirect(self.back, **{name: fields[name] for name in self.back_fields})

    @property
    def _names(self) -> list[str]:
        return [*self.subject, *(known.name for known in self.inputs)]

    def _show(self, visit: Visit, fields: dict[str, str]) -> Response:
        self.prove(visit)
        effects: Sequence[Sentence] = ()
        suggested: Mapping[str, Sequence[str]] = {}
        problem = None
        missing = [known for known in self.inputs if known.is_needed and not fields[known.name]]
        # Ignore the error: the user can also fill in the field without suggestions.
        with suppress(PenstockError):
            suggested = self.suggest(visit, fields)
        try:
            if not missing:
                effects = self.run(visit, fields, True)
        except PenstockError as refusal:
            # Keep the form, so that the user can correct the input.
            problem = visit.without_values(refusal)
        return visit.render(
            "operation.html",
            operation=self,
            fields=fields,
            suggested=suggested,
            is_complete=not missing,
            effects=effects,
            problem=problem,
            subject=" / ".join(fields[name] for name in self.subject if name not in ("daemon", "store")),
            back={name: fields[name] for name in self.back_fields},
        )
