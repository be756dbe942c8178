# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from penstock.changes import Target
from penstock.model import Column, TableName
from penstock.sinks.files.sink import FilesSink, Settings
from penstock.sinks.sink import Evolution

TARGET = Target(TableName("shop", "orders"), (Column("id", "int", None, False),), ("id",))


@pytest.mark.parametrize("form", ["{folder}", "file://{folder}", "feed"])
def test_feed_starts_in_the_folder_named_by_a_path_or_url(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = FilesSink(Settings(path=form.format(folder=tmp_path / "feed")))
    assert sink.check() == []
    sink.prepare(TARGET, Evolution.STOP)
    assert [path.name for path in tmp_path.iterdir()] == ["feed"]
    assert (tmp_path / "feed/shop/orders").is_dir()
