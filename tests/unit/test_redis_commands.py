# SPDX-License-Identifier: Apache-2.0
"""Commands of a few rows, which are encoded without Arrow's functions, equal those of many rows."""

import random
from typing import Any

import pyarrow
import pytest

from penstock.changes import Changes
from penstock.sinks.redis import commands as encoding
from penstock.sinks.redis import sink as redis_sink
from penstock.sinks.redis.sink import RedisSink, Settings
from penstock.sinks.sink import BatchMark
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "note": "varchar(20)"})


def texts(randomness: random.Random, rows: int) -> pyarrow.Array:
    return pyarrow.array(
        ["".join(randomness.choices("aé\r\n$*", k=randomness.randrange(5))) for _ in range(rows)]
    )


@pytest.mark.parametrize("seed", range(20))
def test_few_commands_are_encoded_like_many(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    randomness = random.Random(seed)
    rows = randomness.randrange(1, 9)
    many = texts(randomness, rows + 2)
    words = ["SET", many.slice(1, rows), texts(randomness, rows), "PX", "1000"]
    few = encoding.commands(words)
    monkeypatch.setattr(encoding, "FEW_ROWS_MAX", -1)
    assert encoding.commands(words).equals(few)


def test_key_that_is_invalid_text_is_sent_unchanged() -> None:
    keys = pyarrow.array([b"a\xff"]).view(pyarrow.string())
    encoded = encoding.commands(["UNLINK", keys])
    assert encoded.view(pyarrow.binary()).to_pylist() == [b"*2\r\n$6\r\nUNLINK\r\n$2\r\na\xff\r\n"]


@pytest.mark.parametrize("seed", range(40))
def test_few_rows_set_and_delete_the_same_keys_as_many(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    randomness = random.Random(seed)
    changes = changes_of(ORDERS, *(_change(randomness, version) for version in range(1, 5)))
    settings = Settings(key=randomness.choice(["o:{id}", "{note}"]), write="set")
    few = sent(settings, changes)
    monkeypatch.setattr(redis_sink, "FEW_ROWS_MAX", -1)
    assert sent(settings, changes) == few


def _change(randomness: random.Random, version: int) -> list[Made]:
    row = {"id": randomness.randrange(6), "note": randomness.choice(["a", "b", None])}
    kind = randomness.choice(["insert", "insert", "insert", "update", "delete"])
    if kind == "update":
        return update(version, row, {**row, "id": randomness.randrange(6)})
    return delete(version, **row) if kind == "delete" else insert(version, **row)


def sent(settings: Settings, changes: Changes) -> list[str]:
    """Return the commands that a writer sends."""
    encoded: list[str] = []

    class Connection:
        bytes = 0

        def send(self, commands: pyarrow.Array, keys: pyarrow.Array, answers: int = 1) -> None:
            assert len(commands) == len(keys)
            encoded.extend(commands.to_pylist())

    sink: Any = RedisSink(settings)
    sink.take_connection = Connection
    sink.open(BatchMark("p", "1", 1), 0).write(changes)
    return encoded
