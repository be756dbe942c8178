# SPDX-License-Identifier: Apache-2.0
"""A batch of a lake that is spilled gives the same rows as a batch in memory, for keys of any type."""

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pytest

from penstock.changes import Changes, Origin, Target
from penstock.sinks.sink import BatchMark, Evolution, make_sink, settings_of
from tests.support.pipeline.changes_made import Made, changes_of, target_of

# None is the zero date. The other values include some that a collation, a sign or padding could confuse.
KEYS: dict[str, list[Any]] = {
    "bigint unsigned": [0, 2**63, 2**64 - 1, *range(5, 12)],
    "decimal(20,3)": [Decimal(number) / 8 for number in range(-6, 6)],
    "double": [0.0, -0.0, 1.1, -1.1, 1e300, 5e-324],
    "date": [None, date(1000, 1, 1), *(date(2026, 2, day) for day in range(1, 9))],
    "timestamp(6)": [None, *(datetime(2026, 1, 1, 0, 0, 0, step, UTC) for step in range(9))],
    "time(6)": [timedelta(microseconds=step) for step in range(-5, 5)],
    "varchar(500)": ["", " ", "a", "A", "a ", "ä", "a\u0308", "1", "\u0661", "x" * 400, "x" * 400 + "y"],
    "varbinary(64)": [b"", b"\0", b"\0\0", b"a" * 40, b"b" + b"a" * 39, b"\xff"],
}
MEMORY_BYTES = (3_000, 12_000, 1 << 20)
Key = dict[str, Any]
# A number is the version at which the table is emptied.
Step = Changes | int


class Source:
    """Draws changes of a table from a seed. Commits have even versions, and loads odd ones."""

    def __init__(self, target: Target, seed: str) -> None:
        self.target = target
        self._chance = random.Random(seed)
        self._version = 100

    def batch(self) -> list[Step]:
        """Return the steps of a batch."""
        steps: list[Step] = []
        for _ in range(6):
            rows = [row for _ in range(self._chance.randrange(1, 30)) for row in self._change()]
            steps.append(changes_of(self.target, rows))
            self._version += 2
            if self._chance.random() < 0.2:
                steps.append(self._version)
                self._version += 2
            if self._chance.random() < 0.3:
                steps.append(self._load())
        return steps

    def _change(self) -> list[Made]:
        self._version += self._chance.choice([0, 2])
        kind = self._chance.choice(["insert", "insert", "delete", "update"])
        if kind != "update":
            return [self._row(kind, self._key())]
        return [self._row("update_preimage", self._key()), self._row("update_postimage", self._key())]

    def _load(self) -> Changes:
        keys = {str(key).replace("-0.0", "0.0"): key for key in (self._key() for _ in range(8))}
        behind = self._chance.choice([-1, 39])
        rows = [self._row("insert", key, behind) for key in keys.values()]
        return changes_of(self.target, rows, origin=Origin.LOAD)

    def _key(self) -> Key:
        types = {column.name: column.type_text for column in self.target.columns}
        return {name: self._chance.choice(KEYS[types[name]]) for name in self.target.primary_key}

    def _row(self, kind: str, key: Key, behind: int = 0) -> Made:
        zero_dates = {name: "0000-00-00" for name, value in key.items() if value is None}
        note = f"{kind} {self._version} {self._chance.random()}"
        return Made(kind, self._version - behind, {**key, "note": note}, 0, zero_dates or None)


@pytest.mark.deep(keep=("varchar(500)+double",))
@pytest.mark.parametrize("mode", ["mirror", "history"])
@pytest.mark.parametrize(
    "types", [*((kind,) for kind in KEYS), ("date", "varchar(500)", "double")], ids="+".join
)
def test_spilled_batch_has_the_same_rows(
    types: tuple[str, ...], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {f"k{number}": kind for number, kind in enumerate(types)}
    target = target_of({**columns, "note": "varchar(80)"}, key=tuple(columns))
    source, sinks = Source(target, f"{types} {mode}"), []
    for memory_bytes in MEMORY_BYTES:
        options = {"path": str(tmp_path / str(memory_bytes)), "mode": mode, "file_bytes": 1 << 16}
        sink: Any = make_sink("delta", settings_of("delta").model_validate(options))
        monkeypatch.setattr(sink, "memory_for", lambda mark, memory_bytes=memory_bytes: memory_bytes)
        sink.prepare(target, Evolution.EVOLVE)
        sinks.append(sink)
    for number in (1, 2, 3):
        steps = source.batch()
        spilled, nearly, whole = (rows_after(sink, target, number, steps) for sink in sinks)
        assert spilled == nearly == whole


def rows_after(sink: Any, target: Target, number: int, steps: list[Step]) -> list[str]:
    """Write a batch; return the rows of the table, sorted."""
    mark = BatchMark("shop", "g", number)
    writer = sink.open(mark, 0)
    for step in steps:
        if isinstance(step, int):
            writer.empty(target, step)
        else:
            writer.write(step)
    sink.commit(mark, [writer.finish()])
    table = deltalake.DeltaTable(sink.location(target)).to_pyarrow_table()
    return sorted(map(str, table.to_pylist()))
