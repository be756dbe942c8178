# SPDX-License-Identifier: Apache-2.0
"""Statements of any structure are parsed without an exception and in bounded memory.

`make test-long` reads a million; `PENSTOCK_FUZZ_STATEMENTS` sets the number.
"""

import os
import random
import tracemalloc
from pathlib import Path

import pytest

from penstock.model import Position
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.statement import effects_of
from penstock.schema.statements.tokens import ServerSpelling
from tests.support.suite.sweep_seed import sweep_seed

STATEMENTS = int(
    os.environ.get("PENSTOCK_FUZZ_STATEMENTS", 1_000_000 if os.environ.get("PENSTOCK_LONG") else 2_000)
)
SPELLINGS = (ServerSpelling(version=(9, 7, 4)), ServerSpelling(mariadb=True, version=(11, 8, 6)))
_FILE = Path(__file__).parent.parent / "integration" / "ddl_statements.sql"
CORPUS = [statement for statement in _FILE.read_text().split(";\n") if statement.strip()]
PIECES = (
    "/*!", "/*M!", "/*!99999 ", "/*", "*/", "(", ")", "(((", "SET STATEMENT a=1 FOR ", "-- \n", "#\n",
    "'", '"', "`", "\\", "ALTER TABLE t ", "ADD c INT,", "ADD (", "CREATE TABLE d.z ", "DROP a,", "CHECK (",
    "DEFAULT (", "ENUM(", ",", "UNIQUE (a", "CONVERT TO CHARACTER SET ", "RENAME TO ", "COMMENT ''",
    "PARTITION BY ", "é", "\0", "1", ";", ".", "=",
)  # fmt: skip
# The memory that a statement may use for each of its characters.
BYTES_A_CHARACTER_MAX = 1_000


def statement_of(chance: random.Random) -> str:
    """Return a statement of the corpus with structural parts removed, repeated, nested or exchanged."""
    text = chance.choice(CORPUS)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice((1, 3, 20)))
        piece = chance.choice((*PIECES, text[start:end]))
        times = 1 << chance.randrange(8) if chance.random() < 0.1 else 1
        match chance.randrange(5):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = piece * times + text
            case 2:
                text = f"{text[:start]}{'(' * times}{text[start:end]}{')' * times}{text[end:]}"
            case 3:
                text = text[:start] + chance.choice(CORPUS)[: chance.randrange(80)] + text[end:]
            case _:
                text = text[:start] + piece * times + text[start:]
    return text


@pytest.mark.timeout(6 * 3600)
def test_any_statement_structure_is_followed_or_put_in_doubt() -> None:
    first = sweep_seed(0)
    histories = [SchemaHistory(ServerDefaults(spelling, "utf8mb4", {}, False)) for spelling in SPELLINGS]
    known = 0
    for seed in range(first, first + STATEMENTS):
        chance = random.Random(seed)
        text = statement_of(chance)
        if seed % 1000 == 0:
            histories = [
                SchemaHistory(ServerDefaults(spelling, "utf8mb4", {}, False)) for spelling in SPELLINGS
            ]
        position = Position(0, "bin.000001", 100 * (seed - first + 1))
        try:
            known += bool(chance.choice(histories).apply(text, "d", position))
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {text!r}") from problem
    assert known > STATEMENTS // 10


def test_memory_of_a_statement_is_proportional_to_its_length() -> None:
    peaks = []
    for piece in PIECES:
        text = f"ALTER TABLE t {piece * (2_000 // len(piece))} ADD c INT"
        tracemalloc.start()
        effects_of(text, "d", SPELLINGS[1])
        peaks.append((tracemalloc.get_traced_memory()[1] / len(text), piece))
        tracemalloc.stop()
    assert len(peaks) == len(PIECES)
    assert max(peaks)[0] < BYTES_A_CHARACTER_MAX, max(peaks)
