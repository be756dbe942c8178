# SPDX-License-Identifier: Apache-2.0
"""A misspelled value of a setting is rejected, and the error suggests the value that was probably meant."""

from pathlib import Path

import pytest

from penstock.errors import OptionInvalid
from penstock.pipeline.settings import load_pipeline
from penstock.settings.daemon import load_settings


@pytest.mark.parametrize(
    ("value", "suggestion"), [("ful", "; did you mean full?"), ("NONE", "; did you mean none?"), ("xyz", "")]
)
def test_pipeline_suggests_the_nearest_value(tmp_path: Path, value: str, suggestion: str) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"source: {{path: /logs, tables: [shop.*]}}\nload: {{mode: {value}}}\nsink: stdout\n")
    with pytest.raises(OptionInvalid) as refusal:
        load_pipeline(file)
    accepted = "load.mode: input should be 'full', 'consistent' or 'none'"
    assert f"{accepted}{suggestion}" in refusal.value.message.splitlines()[1]
    assert refusal.value.message.count("did you mean") == bool(suggestion)


def test_daemon_suggests_the_nearest_value_and_shows_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "log: {fsync: second}\ninstances: {shop: {source: 'mysql://repl@db1', password: [hush]}}\n"
    )
    with pytest.raises(OptionInvalid) as refusal:
        load_settings(file, {})
    assert "log.fsync: input should be 'block', 'seconds' or 'never'; did you mean seconds?" in str(
        refusal.value
    )
    assert "hush" not in str(refusal.value)
