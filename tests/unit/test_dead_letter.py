# SPDX-License-Identifier: Apache-2.0
import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.errors import DiskFailed, OptionInvalid, SourceMissing, StepFailed
from penstock.pipeline.dead_letter import (
    DeadLetterPart,
    dead_letters,
    purgeable_letters,
    replay,
    rows_of_letter,
)
from penstock.pipeline.dead_letter import purge as purge_letters
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import PipelineState
from penstock.pipeline.step import Rejected, run_steps
from penstock.sinks.sink import BatchMark
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.pipeline.rejected_rows import MARK, put_aside

ORDERS = target_of({"id": "bigint", "status": "varchar(20)", "took": "time(6)"})


def settings(folder: Path, sink: Any = "stdout", **cast: str) -> PipelineSettings:
    return pipeline_of_values(
        {
            "name": "shop",
            "source": {"url": "mysql://repl@127.0.0.1:1", "name": "test"},
            "steps": [{"map": {"rename": {"status": "number"}, "cast": cast}}],
            "sink": sink,
            "errors": {"rows": "dead_letter"},
        },
        folder,
    )


POISONED = (
    insert(1, id=1, status="1"),
    update(2, {"id": 2, "status": "2"}, {"id": 2, "status": "two"}, row=5),
    insert(2, row=6, id=3, status="3"),
    delete(3, id=4, status="four"),
)


def test_dead_letter_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    told = settings(tmp_path, status="int")
    folder = Path(told.dead_letter)
    put_aside(told, changes_of(ORDERS, *POISONED))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    entries = list(folder.iterdir())
    assert entries
    assert {stat.S_IMODE(one.stat().st_mode) for one in entries} == {0o600}
    # A killed attempt has left a file that others may read.
    half = entries[0].with_name(f"{entries[0].name}.part")
    half.write_bytes(b"")
    half.chmod(0o644)
    put_aside(told, changes_of(ORDERS, *POISONED))
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {0o600}


def test_rejected_rows_are_stored_as_logged_with_position_and_reason(tmp_path: Path) -> None:
    told = settings(tmp_path, status="int")
    assert put_aside(told, changes_of(ORDERS, *POISONED)) == 3
    first, second = dead_letters(told)
    assert (str(first.table), first.step, first.error, first.rows) == ("shop.orders", "map", "StepFailed", 2)
    assert (first.position, second.position) == ("mysql-bin.000001:32", "mysql-bin.000001:48")
    assert "two" in first.message
    exact = rows_of_letter(told, first.name)
    assert (exact.target, exact.source) == (ORDERS, ORDERS.name)
    wanted = changes_of(ORDERS, POISONED[1]).rows
    assert exact.rows.equals(wanted)
    assert json.loads(json.dumps(first.to_json()))["rows"] == 2


def test_retried_batch_writes_its_rejected_rows_once(tmp_path: Path) -> None:
    told = settings(tmp_path, status="int")
    changes = changes_of(ORDERS, *POISONED)
    put_aside(told, changes)
    before = [one.name for one in dead_letters(told)]
    put_aside(told, changes)
    assert [one.name for one in dead_letters(told)] == before
    put_aside(told, changes_of(ORDERS, POISONED[3]))
    assert [one.name for one in dead_letters(told)] == before[:1]
    put_aside(told, changes, part=4)
    put_aside(told, changes, BatchMark("shop", "abc", 8))
    assert len(dead_letters(told)) == 5


def test_rejected_rows_that_are_only_counted_are_not_stored(tmp_path: Path) -> None:
    told = settings(tmp_path)
    aside = DeadLetterPart(told.dead_letter, MARK, 0)
    changes = changes_of(ORDERS, insert(1, id=1))
    aside.add(Rejected(changes, "map", StepFailed("no"), kept=False), changes)
    aside.finish()
    assert dead_letters(told) == []
    assert not Path(told.dead_letter).exists()


def test_replayed_rows_reach_the_feed_once_the_steps_accept_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_aside(settings(tmp_path, status="int"), changes_of(ORDERS, *POISONED))
    mended = settings(tmp_path)
    one, other = dead_letters(mended)
    assert [(done.written, done.rejected) for done in replay(mended, [other.name])] == [(1, 0)]
    assert [left.name for left in dead_letters(mended)] == [one.name]
    assert [done.written for done in replay(mended)] == [2]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"four", "two"} <= set(json.dumps(lines).replace('"', " ").split())
    assert dead_letters(mended) == []
    assert len(list(Path(mended.dead_letter, "replayed").iterdir())) == 2


def test_rows_that_fail_again_are_stored_again(tmp_path: Path) -> None:
    told = settings(tmp_path, status="int")
    put_aside(told, changes_of(ORDERS, POISONED[3]))
    (done,) = replay(told)
    assert (done.written, done.rejected) == (0, 1)
    (again,) = dead_letters(told)
    assert again.name != done.name
    assert rows_of_letter(told, again.name).rows.column("id").to_pylist() == [4]


@pytest.mark.parametrize(
    "sink",
    [
        {"mysql": {"url": "mysql://writer@127.0.0.1:1"}},
        {"redis": {"url": "redis://127.0.0.1:1", "key": "{id}"}},
    ],
    ids=["mysql", "redis"],
)
def test_replay_into_a_stateful_target_reads_the_keys_again(tmp_path: Path, sink: Any) -> None:
    told = settings(tmp_path, sink, status="int")
    put_aside(told, changes_of(ORDERS, *POISONED))
    with pytest.raises(OptionInvalid, match="never ran"):
        list(replay(told))
    assert len(dead_letters(told)) == 2
    state = PipelineState.open(told.state, "shop")
    try:
        state.take()
        assert [done.read_again for done in replay(told)] == [2, 1]
        wishes = state.requests()
    finally:
        state.close()
    assert [(one.source, str(one.table), one.state) for one in wishes] == [
        ("test", "shop.orders", "asked")
    ] * 2
    assert {one.where for one in wishes} == {"(`id`=2) OR (`id`=2)", "(`id`=4)"}


def test_replay_of_a_row_without_a_key_gives_a_hint(tmp_path: Path) -> None:
    told = settings(tmp_path, {"mysql": {"url": "mysql://writer@127.0.0.1:1"}}, status="int")
    keyless = target_of({"id": "bigint", "status": "varchar(20)"}, ())
    put_aside(told, changes_of(keyless, insert(1, id=1, status="one")))
    with pytest.raises(OptionInvalid) as refused:
        list(replay(told))
    assert "penstock resnapshot" in (refused.value.hint or "")


def test_missing_dead_letter_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing):
        list(replay(settings(tmp_path), ["nothing.arrow"]))


def test_dead_letter_folder_may_be_a_url(tmp_path: Path) -> None:
    told = replace(settings(tmp_path, status="int"), dead_letter=f"file://{tmp_path}/letters")
    put_aside(told, changes_of(ORDERS, *POISONED))
    assert [one.rows for one in dead_letters(told)] == [2, 1]
    assert len(list((tmp_path / "letters").glob("*.arrow"))) == 2
    with pytest.raises(OptionInvalid):
        dead_letters(replace(told, dead_letter="nowhere://bucket/letters"))


def test_large_dead_letter_is_written_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.dead_letter._BUFFERED_BYTES_MAX", 1)
    told = settings(tmp_path, status="int")
    aside = DeadLetterPart(told.dead_letter, MARK, 0)
    changes = changes_of(ORDERS, *POISONED)
    for made in run_steps(told.make_steps(), changes):
        if isinstance(made, Rejected):
            aside.add(made, changes)
            assert aside.rows == sum(one.rows for one in dead_letters(told))
    aside.finish()
    assert len(dead_letters(told)) == 2


def test_command_lists_and_replays_rejected_rows(tmp_path: Path) -> None:
    told = settings(tmp_path, status="int")
    put_aside(told, changes_of(ORDERS, *POISONED))
    file = tmp_path / "shop.yaml"
    file.write_text(
        "{name: shop, source: {url: 'mysql://repl@127.0.0.1:1', name: test}, sink: stdout,"
        " errors: {rows: dead_letter}}"
    )
    run = CliRunner()
    listed = run.invoke(make_app(), ["pipelines", "dead-letters", str(file), "--json"])
    assert [json.loads(line)["rows"] for line in listed.stdout.splitlines()] == [2, 1]
    shown = run.invoke(make_app(), ["pipelines", "dead-letters", str(file), "--rows"]).stdout
    assert "map at mysql-bin.000001:32: StepFailed" in shown
    assert '"status": "two"' in shown
    assert shown.endswith("3 rows in 2 entries\n")
    sent = run.invoke(make_app(), ["pipelines", "replay", str(file)])
    assert sent.exit_code == 0, sent.output
    assert "2 rows written, 0 put aside once more" in sent.stdout
    assert "0 rows in 0 entries" in run.invoke(make_app(), ["pipelines", "dead-letters", str(file)]).stdout


def purge(*words: Any) -> list[dict[str, Any]]:
    """Run `penstock pipelines purge` with --json; return what it printed."""
    done = CliRunner().invoke(make_app(), ["pipelines", "purge", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def file_of(folder: Path) -> Path:
    """Write the pipeline file that matches the dead-letter `settings`."""
    file = folder / "shop.yaml"
    file.write_text("{name: shop, source: {url: 'mysql://repl@127.0.0.1:1', name: test}, sink: stdout}")
    return file


def test_purge_deletes_the_selected_entries_and_records_who_did(tmp_path: Path) -> None:
    told, file = settings(tmp_path, status="int"), file_of(tmp_path)
    put_aside(told, changes_of(ORDERS, *POISONED))
    first, second = dead_letters(told)
    nothing = CliRunner().invoke(make_app(), ["pipelines", "purge", str(file)])
    assert (nothing.exit_code, "--before TIME" in nothing.output) == (2, True), nothing.output
    assert purge(file, "--before", "2026-01-01") == []
    would_go = purge(file, first.name, "--dry-run")
    assert ([entry["name"] for entry in would_go], dead_letters(told)) == ([first.name], [first, second])
    assert not (Path(told.dead_letter) / "purged").exists()

    assert purge(file, first.name, "--reason", "a test order") == [first.to_json() | {"dry_run": False}]
    assert dead_letters(told) == [second]
    (record,) = (Path(told.dead_letter) / "purged").iterdir()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    written = json.loads(record.read_text())
    entries = [(entry["name"], entry["table"], entry["rows"]) for entry in written["entries"]]
    assert (written["reason"], entries) == ("a test order", [(first.name, "shop.orders", 2)])
    assert "two" not in record.read_text(), "the message quotes a value"
    with pytest.raises(SourceMissing, match="has no entry"):
        purgeable_letters(told, [first.name])


def test_purge_of_replayed_entries_keeps_the_others(tmp_path: Path) -> None:
    sink, file = {"files": {"path": str(tmp_path / "feed")}}, file_of(tmp_path)
    told = settings(tmp_path, sink, status="int")
    put_aside(told, changes_of(ORDERS, *POISONED))
    first, second = dead_letters(told)
    list(replay(settings(tmp_path, sink), [first.name]))
    assert [letter.name for letter in dead_letters(told, replayed=True)] == [first.name]
    assert [entry["name"] for entry in purge(file, "--replayed")] == [first.name]
    assert (dead_letters(told, replayed=True), dead_letters(told)) == ([], [second])


def test_no_entry_goes_before_its_purge_is_recorded(tmp_path: Path) -> None:
    told = settings(tmp_path, status="int")
    put_aside(told, changes_of(ORDERS, *POISONED))
    letters = dead_letters(told)
    (Path(told.dead_letter) / "purged").write_text("a file where the folder has to be")
    with pytest.raises(DiskFailed):
        purge_letters(told, letters, user="me")
    assert dead_letters(told) == letters


OUTSIDE_NAMES = (
    "../other/{name}",
    "{folder}/../other/{name}",
    "./{name}",
    "replayed/../{name}",
    "replayed/{name}",
    "{name}/",
    "{name}\0",
    "*",
    "..",
    "",
)


@pytest.mark.parametrize("template", OUTSIDE_NAMES)
def test_only_names_of_own_entries_are_read_replayed_and_purged(tmp_path: Path, template: str) -> None:
    shop = settings(tmp_path, status="int")
    other = replace(shop, dead_letter=str(Path(shop.dead_letter).with_name("other")))
    for owner in (shop, other):
        put_aside(owner, changes_of(ORDERS, *POISONED))
    own = dead_letters(shop)
    assert dead_letters(other)
    name = template.format(name=own[0].name, folder=Path(shop.dead_letter).resolve())
    forged = [replace(own[0], name=name)]
    for attempt in (
        lambda: rows_of_letter(shop, name),
        lambda: list(replay(shop, [name])),
        lambda: purgeable_letters(shop, [name]),
        lambda: purge_letters(shop, forged, user="ann"),
    ):
        with pytest.raises(SourceMissing, match="no entry"):
            attempt()
    assert (dead_letters(shop), len(dead_letters(other))) == (own, len(own))
