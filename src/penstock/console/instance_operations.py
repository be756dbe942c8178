# SPDX-License-Identifier: Apache-2.0
"""The operations for instances in the coordination store: adding, changing, removing, forgetting."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from penstock.console.operation import Fields, Input, Operation, Sentence, say
from penstock.console.visit import Visit
from penstock.errors import OptionInvalid
from penstock.settings.file import yaml_documents, yaml_text

_SUBJECT = ("daemon", "instance")

# The maximum number of values in the settings of an instance. Real settings have a few dozen.
_VALUES_MAX = 10_000

_EXAMPLE = """\
instance: shop
settings:
  source: mysql://repl@db1:3306
  password_file: /run/secrets/repl
"""


def _apply(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    document = _document(fields["text"])
    name = str(document.pop("instance"))
    call = f"instances/{quote(name, safe='')}"
    answer = visit.fleet.change(fields["daemon"], call, {**document, "dry_run": dry_run}, "PUT")
    return [
        say("{instance} is stored as version {version}.", instance=name, version=answer["version"]),
        *_effects(answer),
    ]


def _document(text: str) -> dict[str, Any]:
    """Return the document of an instance. Raises OptionInvalid."""
    documents = yaml_documents(text)
    if len(documents) != 1 or not isinstance(documents[0], dict) or "instance" not in documents[0]:
        raise OptionInvalid(
            "the text is not the document of one instance",
            hint="Write instance and settings, as penstock export prints them",
        )
    _prove_small(documents[0])
    # Turn the dates and other values that YAML parses back into text.
    document: dict[str, Any] = json.loads(json.dumps(documents[0], default=str))
    return document


def _prove_small(document: Any) -> None:
    """Raise OptionInvalid for a text whose aliases expand to a very large number of values."""
    waiting, count = [document], 0
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += 1
        if count + len(waiting) > _VALUES_MAX:
            raise OptionInvalid(
                f"the text stands for more than {_VALUES_MAX} values", hint="Write it without aliases"
            )


def _stored(visit: Visit, fields: Fields) -> Mapping[str, Sequence[str]]:
    """Return the document of the instance that the link names, if the store contains the instance."""
    name = visit.query("instance")
    known = visit.fleet.ask_daemon(fields["daemon"], "stored-instances")["instances"] if name else ()
    for instance in known:
        if instance["instance"] == name and instance["document"] is not None:
            return {"text": [yaml_text(instance["document"])]}
    return {}


def _remove(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    call = f"instances/{quote(fields['instance'], safe='')}"
    url = fields["daemon"]
    readers = (
        visit.fleet.ask_instance(url, fields["instance"], "status").get("subscribers", 0) if dry_run else 0
    )
    answer = visit.fleet.change(url, f"{call}?dry_run={int(dry_run)}", {}, "DELETE")
    sentences = [*_effects(answer), say("Its log and its subscriptions stay.")]
    if readers:
        sentences.append(say("Connected readers that lose it: {count}", count=readers))
    return sentences


def _forget(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    call = f"instances/{quote(fields['instance'], safe='')}/forget"
    answer = visit.fleet.change(fields["daemon"], call, {"dry_run": dry_run})
    return [
        say("What is stored is deleted: the settings file of each daemon decides again."),
        *_effects(answer),
    ]


def _effects(answer: Mapping[str, Any]) -> list[Sentence]:
    """Return the effect of a settings change on this daemon. The other daemons of the store follow."""
    added, changed, removed, other_log = (
        ", ".join(answer[what]) for what in ("added", "changed", "removed", "with_other_log")
    )
    sentences = []
    if added:
        sentences.append(say("Captured from now on: {names}", names=added))
    if changed:
        sentences.append(
            say("The capture ends, and starts again with the new settings: {names}", names=changed)
        )
    if other_log:
        sentences.append(
            say("It gets another log, so readers lose their positions: {names}", names=other_log)
        )
    if removed:
        sentences.append(say("No longer captured: {names}", names=removed))
    return sentences or [say("This daemon captures what it captured before.")]


OPERATIONS = (
    Operation(
        "/instances/apply",
        "Store the instance",
        "What happens if this instance is added or changed?",
        "set instance",
        ("daemon",),
        _apply,
        "/fleet",
        (
            Input(
                "text",
                "Instance, as penstock export prints it",
                kind="area",
                is_needed=True,
                example=_EXAMPLE,
            ),
        ),
        suggest=_stored,
        is_posted=True,
    ),
    Operation(
        "/instance/remove",
        "Remove the instance",
        "What happens if this instance is removed?",
        "remove instance",
        _SUBJECT,
        _remove,
        "/fleet",
    ),
    Operation(
        "/instance/forget",
        "Forget what is stored",
        "What happens if the settings files decide about this instance?",
        "forget instance",
        _SUBJECT,
        _forget,
        "/fleet",
    ),
)
