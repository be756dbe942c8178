# SPDX-License-Identifier: Apache-2.0
"""Statements as servers logged them, and their effects on definitions."""

import json

import pytest

from penstock.schema.statements.statement import effects_of
from tests.ddl_machine.corpus import FILE, spelling_of, summary

CORPUS = json.loads(FILE.read_text())


@pytest.mark.parametrize("server", CORPUS)
def test_logged_statements_have_the_same_effects_as_on_servers(server: str) -> None:
    expected = [(text, effects) for _, text, effects in CORPUS[server]]
    spelling = spelling_of(server)
    actual = [
        (text, [summary(effect) for effect in effects_of(text, database, spelling)])
        for database, text, _ in CORPUS[server]
    ]
    assert len(expected) > 100
    assert actual == expected


@pytest.mark.parametrize("server", CORPUS)
def test_logged_statements_are_parsed_to_their_end(server: str) -> None:
    unread = [text for _, text, effects in CORPUS[server] if any("Unread" in effect for effect in effects)]
    # A sequence is a table whose CREATE statement does not list the columns.
    assert [text for text in unread if "sequence" not in text.lower()] == []
