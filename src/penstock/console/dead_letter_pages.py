# SPDX-License-Identifier: Apache-2.0
"""The pages of rejected rows: which rows a step rejected and why, and what a replay or a purge would do.

These pages also hide values that the pipeline's `mask` steps hide from the target, and values that are masked
for the account.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from penstock.changes import Changes, Target
from penstock.console.pipeline_files import hidden_columns
from penstock.console.visit import Visit
from penstock.model import TableName
from penstock.pipeline.dead_letter import (
    DeadLetter,
    dead_letters,
    overwrites,
    purgeable_letters,
    rows_of_letter,
)
from penstock.pipeline.settings import PipelineSettings
from penstock.source.row_history import plain_value, python_rows

# The maximum numbers of entries and of rows on one page.
_ENTRIES_MAX = 200
_ROWS_MAX = 100


@dataclass(frozen=True)
class LetterGroup:
    """The entries that one step rejected with one class of error, for one table."""

    table: str
    step: str
    error: str
    entries: int
    rows: int
    newest_us: int


@dataclass(frozen=True)
class ShownLetter:
    """A dead-letter entry. `message` is None if the error message may contain a hidden value."""

    letter: DeadLetter
    message: str | None


def list_letters(visit: Visit) -> Response:
    """Show which rows a step rejected, and why."""
    visit.prove_sees_pipelines()
    store, name, sink = visit.pipeline_query()
    settings = visit.files.settings(store, name, sink)
    letters = dead_letters(settings)
    letters.sort(key=lambda letter: letter.noted_us, reverse=True)
    wanted = tuple(visit.query(field) for field in ("table", "step", "error"))
    replayed = {count: visit.query(count) for count in ("written", "read_again", "rejected")}
    shown = [letter for letter in letters if not any(wanted) or _group_key(letter) == wanted]
    return visit.render(
        "dead_letters.html",
        **_address(store, name, sink),
        groups=_groups(letters),
        wanted=wanted if any(wanted) else None,
        letters=[_shown(visit, settings, letter) for letter in shown[:_ENTRIES_MAX]],
        count=len(shown),
        replayed=replayed if all(rows.isdecimal() for rows in replayed.values()) else None,
        purged=visit.query("purged") if visit.query("purged").isdecimal() else None,
    )


def show_letter(visit: Visit) -> Response:
    """Show the rows of an entry as the source sent them."""
    visit.prove_sees_pipelines()
    store, name, sink = visit.pipeline_query()
    settings = visit.files.settings(store, name, sink)
    entry = visit.query("entry")
    changes = rows_of_letter(settings, entry)
    letter = next((known for known in dead_letters(settings) if known.name == entry), None)
    return visit.render(
        "dead_letter.html",
        **_address(store, name, sink),
        shown=None if letter is None else _shown(visit, settings, letter),
        columns=list(changes.target.column_names),
        hidden=_hidden(visit, settings, changes.source, changes.target),
        rows=_rows(changes),
        count=len(changes),
    )


def preview_replay(visit: Visit) -> Response:
    """Show what happens if these rows are replayed."""
    visit.prove_sees_pipelines()
    store, name, sink = visit.pipeline_query()
    settings = visit.files.settings(store, name, sink)
    entry = visit.query("entry")
    letters = [letter for letter in dead_letters(settings) if entry in ("", letter.name)]
    return visit.render(
        "replay.html",
        **_address(store, name, sink),
        entry=entry,
        letters=letters,
        until_us=max((letter.noted_us for letter in letters), default=0),
        rows=sum(letter.rows for letter in letters),
        tables=sorted({str(letter.table) for letter in letters}),
        is_read_again=overwrites(settings.make_sink()),
    )


def preview_purge(visit: Visit) -> Response:
    """Show what is lost if these rows are deleted."""
    visit.prove_sees_pipelines()
    store, name, sink = visit.pipeline_query()
    settings = visit.files.settings(store, name, sink)
    entry = visit.query("entry")
    letters = purgeable_letters(settings, [entry] if entry else ())
    return visit.render(
        "purge.html",
        **_address(store, name, sink),
        entry=entry,
        letters=letters,
        until_us=max((letter.noted_us for letter in letters), default=0),
        rows=sum(letter.rows for letter in letters),
        tables=sorted({str(letter.table) for letter in letters}),
    )


def _address(store: int, name: str, sink: str) -> dict[str, Any]:
    return {"store": store, "name": name, "sink": sink}


def _group_key(letter: DeadLetter) -> tuple[str, str, str]:
    return str(letter.table), letter.step, letter.error


def _groups(letters: list[DeadLetter]) -> list[LetterGroup]:
    """Return the groups, the group with the most rows first."""
    members: dict[tuple[str, str, str], list[DeadLetter]] = {}
    for letter in letters:
        members.setdefault(_group_key(letter), []).append(letter)
    groups = [
        LetterGroup(
            *key,
            len(entries),
            sum(letter.rows for letter in entries),
            max(letter.noted_us for letter in entries),
        )
        for key, entries in members.items()
    ]
    return sorted(groups, key=lambda group: (-group.rows, group.table))


def _shown(visit: Visit, settings: PipelineSettings, letter: DeadLetter) -> ShownLetter:
    """Return an entry without a message that may contain a hidden value."""
    hidden = _hidden(visit, settings, letter.table, letter.target)
    # The message may quote a column that an earlier step has removed from the target.
    is_hidden = bool(hidden or visit.masking.columns(letter.table))
    return ShownLetter(letter, None if is_hidden else letter.message)


def _hidden(visit: Visit, settings: PipelineSettings, source: TableName, target: Target) -> frozenset[str]:
    """Return the columns of a source table whose values the pipeline or the account hides."""
    masked = visit.masking.hidden_among(source, target.column_names)
    return masked | hidden_columns(settings, target)


def _rows(changes: Changes) -> list[dict[str, str | None]]:
    """Return the first rows as text, with their change types."""
    names = [*changes.target.column_names, "_change_type"]
    return [
        {column: None if value is None else str(plain_value(value)) for column, value in row.items()}
        for row in python_rows(changes.rows.slice(0, _ROWS_MAX).select(names))
    ]


PAGES: dict[str, Callable[[Visit], Response]] = {
    "/dead-letters": list_letters,
    "/dead-letters/entry": show_letter,
    "/dead-letters/replay": preview_replay,
    "/dead-letters/purge": preview_purge,
}
