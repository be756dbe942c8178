# SPDX-License-Identifier: Apache-2.0
"""Converts rows of an outbox table to events: one column is the message's payload, and other columns become
its key and headers.

The columns have the names that Debezium's outbox event router expects by default
(debezium.io/documentation/reference/stable/transformations/outbox-event-router.html).
"""

from typing import Literal

import numpy
import pyarrow
import pyarrow.compute as pc
from pydantic import Field

from penstock.changes import Changes
from penstock.errors import EventUnsupported, OptionInvalid
from penstock.settings.values import Section
from penstock.sinks.images import refuse_partial
from penstock.sinks.messages import Messages
from penstock.sinks.template import column_texts

INSERT = 0


class Outbox(Section):
    """The columns of an outbox table. Its inserts become events; its deletes are ignored."""

    id: str = Field(
        default="id", description="the column of the header id, by which consumers drop duplicates"
    )
    key: str = Field(default="aggregateid", description="the column of the message key")
    payload: str = Field(default="payload", description="the column of the message; null becomes a tombstone")
    headers: dict[str, str] = Field(
        default_factory=dict, description="further columns as headers: header name to column"
    )
    updates: Literal["stop", "skip"] = Field(
        default="stop", description="an update of the outbox table: stop the pipeline, or ignore it"
    )

    def events_of(self, changes: Changes) -> Changes:
        """Return only the inserts, which are the outbox's events.

        Raises EventUnsupported for an update, unless updates are ignored, and ServerUnsupported for an insert
        that was logged without columns.
        """
        kinds = changes.rows.column("_change_type")
        if self.updates == "stop" and pc.any(pc.equal(kinds, "update_postimage")).as_py():
            raise EventUnsupported(
                f"{changes.source} has an update, and an outbox has inserts and deletes alone",
                hint="Fix the writer of the outbox, or set outbox.updates: skip",
            )
        events = changes.with_rows(changes.rows.filter(pc.equal(kinds, "insert")))
        refuse_partial(events)
        return events

    def messages_of(self, changes: Changes) -> Messages:
        """Return the event of each insert. Raises OptionInvalid for an unknown column."""
        rows = numpy.arange(len(changes), dtype=numpy.int64)
        return Messages(
            value=_bytes_of(changes, self.payload),
            key=_bytes_of(changes, self.key),
            row=pyarrow.array(rows),
            kind=pyarrow.array(numpy.full(len(changes), INSERT, dtype=numpy.int8)),
        )

    def headers_of(self, changes: Changes) -> list[list[tuple[str, bytes]]]:
        """Return the headers of each event. Null values have no header."""
        columns = {"id": self.id} | self.headers
        values = {name: _bytes_of(changes, column).to_pylist() for name, column in columns.items()}
        return [
            [(name, of_name[row]) for name, of_name in values.items() if of_name[row] is not None]
            for row in range(len(changes))
        ]


def _bytes_of(changes: Changes, name: str) -> pyarrow.Array:
    """Return a column as bytes: binary columns as they are, others as the server's client shows them."""
    if name not in changes.target.column_names:
        raise OptionInvalid(
            f"{changes.target.name} has no column {name!r} for the events of its outbox",
            hint=f"It has {', '.join(changes.target.column_names)}: see outbox of the kafka sink",
        )
    column = changes.rows.column(name)
    kind = column.type
    if not (pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)):
        column = column_texts(changes, name)
    return column.cast(pyarrow.large_binary())
