# SPDX-License-Identifier: Apache-2.0
"""`penstock check` on a storage sink reports in advance what would stop an instance."""

from pathlib import Path

import pytest

from tests.support.logstore.kept_log import penstock
from tests.support.ticdc.sink import KEY, NAME, Sink, column, inserted, message


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    """A sink with one table and its rows."""
    sink = Sink(tmp_path / "sink")
    sink.table("t", 100, [KEY, NAME])
    sink.rows("t/100/CDC000001.json", inserted(110, 1))
    sink.checkpoint(150)
    return sink


def test_sound_sink_has_no_findings(sink: Sink) -> None:
    done = penstock("check", sink.source)
    assert done.code == 0, done.err
    assert "rows of shop.t can be read" in done.out


def test_what_would_stop_an_instance_is_an_error(sink: Sink, tmp_path: Path) -> None:
    sink.table("z", 101, [KEY, column("at", "TIMESTAMP")])
    sink.rows(
        "z/101/CDC000001.json", message(120, "INSERT", {"id": "1", "at": "2026-11-23 00:00:00"}, table="z")
    )
    sink.table("k", 102, [NAME])
    sink.write("notes.txt", "")
    config = tmp_path / "penstock.yaml"
    config.write_text(f"instances: {{shop: {{source: '{sink.source}'}}}}")
    done = penstock("check", sink.source, "--config", str(config))
    assert done.code == 1
    report = " ".join(done.out.split())
    for text in ("notes.txt", "ticdc.time_zone", "shop.k has no primary key"):
        assert text in report
    config.write_text(f"instances: {{shop: {{source: '{sink.source}', ticdc: {{time_zone: UTC}}}}}}")
    (sink.folder / "notes.txt").unlink()
    assert penstock("check", sink.source, "--config", str(config)).code == 0
    (sink.folder / "metadata").unlink()
    assert "metadata" in penstock("check", sink.source).out
