# SPDX-License-Identifier: Apache-2.0
"""The console's comparisons of a target with its source: their process, their pages, and the repair."""

import csv
import io
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.cli import console
from penstock.console.comparison_files import export_differences
from penstock.console.comparisons import REPAIRED_KEYS_MAX, Comparison, Comparisons
from penstock.errors import OptionInvalid, QuotaReached
from penstock.pipeline.state import PipelineState
from penstock.pipeline.verification_record import (
    VerificationRecord,
    read_verification,
    record_verification,
)
from penstock.pipeline.verify.verify import Verification
from penstock.settings.console import ConsoleSection
from tests.support.daemon.console import ANYWHERE, console_of, masked_for_visitors
from tests.support.logstore.kept_log import penstock
from tests.support.pipeline.local_runs import notes_pipeline, run_here
from tests.support.suite.patience import wait_until

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ADDRESS = {"store": "0", "name": "notes", "sink": ""}
KEY = (0, "notes", "")

COUNTS = {
    "table": "shop.notes",
    "equal": False,
    "source_rows": 3,
    "target_rows": 2,
    "missing": 1,
    "extra": 0,
    "changed": 1,
    "unsettled": 0,
    "beyond": 0,
    "open": None,
    "not_compared": [],
}
DIFFERENCES: list[dict[str, Any]] = [
    {
        "table": "shop.notes",
        "kind": "changed",
        "key": '{"id": 7}',
        "columns": ["note"],
        "source": json.dumps({"id": 7, "note": HOSTILE}),
        "target": json.dumps({"id": 7, "note": "old"}),
    },
    {
        "table": "shop.notes",
        "kind": "missing",
        "key": '{"id": 8}',
        "columns": [],
        "source": json.dumps({"id": 8, "note": None}),
        "target": None,
    },
]
# A command line that records its arguments, and finds the differences once the file `go` exists.
PROGRAM = """
import json, pathlib, sys, time
folder, *words = sys.argv[1:]
folder = pathlib.Path(folder)
with (folder / "words").open("a") as file: file.write(json.dumps(words) + "\\n")
while not (folder / "go").exists(): time.sleep(0.01)
sys.stderr.write((folder / "go").read_text())
if (folder / "go").read_text(): sys.exit(4)
pathlib.Path(words[words.index("--output") + 1]).write_text((folder / "differences").read_text())
print((folder / "counts").read_text())
if "--repair" in words: print((folder / "repair").read_text())
sys.exit(1)
"""


def command_in(
    folder: Path, counts: Mapping[str, Any] = COUNTS, repaired: int = 2, requests: Sequence[str] = ()
) -> tuple[str, ...]:
    (folder / "counts").write_text(json.dumps(counts))
    (folder / "repair").write_text(json.dumps({"repaired": repaired, "requests": list(requests)}))
    (folder / "differences").write_text("".join(json.dumps(row) + "\n" for row in DIFFERENCES))
    return (sys.executable, "-I", "-S", "-c", PROGRAM, str(folder))


def words_of(folder: Path) -> list[list[str]]:
    file = folder / "words"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ended(comparisons: Comparisons) -> Comparison:
    def newest() -> Comparison | None:
        comparison = comparisons.newest(KEY)
        return comparison if comparison is not None and comparison.ended_us is not None else None

    wait_until(lambda: newest() is not None)
    comparison = newest()
    assert comparison is not None
    return comparison


def test_one_comparison_runs_at_a_time(tmp_path: Path) -> None:
    comparisons = Comparisons(command_in(tmp_path))
    comparisons.start(KEY, tmp_path / "notes.yaml", repair=False)
    with pytest.raises(QuotaReached):
        comparisons.start((0, "other", ""), tmp_path / "other.yaml", repair=False)
    (tmp_path / "go").touch()
    first = ended(comparisons)
    assert (first.error, list(first.tables), list(first.differences)) == ("", [COUNTS], DIFFERENCES)
    comparisons.start((0, "notes", "lake"), tmp_path / "notes.yaml", repair=True)
    wait_until(lambda: len(words_of(tmp_path)) == 2)
    assert words_of(tmp_path)[0][:2] == ["verify", str(tmp_path / "notes.yaml")]
    assert "--repair" not in words_of(tmp_path)[0]
    assert words_of(tmp_path)[1][-3:] == ["--sink", "lake", "--repair"]
    limits = [int(words[words.index("--limit") + 1]) for words in words_of(tmp_path)]
    assert limits == [1000, REPAIRED_KEYS_MAX]


def test_failed_comparison_says_why_and_another_one_may_start(tmp_path: Path) -> None:
    (tmp_path / "go").write_text("ConnectionLost: the target does not answer")
    comparisons = Comparisons(command_in(tmp_path))
    comparisons.start(KEY, tmp_path / "notes.yaml", repair=False)
    assert "does not answer" in ended(comparisons).error
    lost = Comparisons([str(tmp_path / "nothing")])
    for _ in range(2):
        lost.start(KEY, tmp_path / "notes.yaml", repair=False)
        assert "No such file" in ended(lost).error
    with pytest.raises(OptionInvalid):
        Comparisons([]).start(KEY, tmp_path / "notes.yaml", repair=False)


def test_comparison_that_cannot_start_or_whose_result_is_strange_does_not_block_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "go").touch()
    comparisons = Comparisons(command_in(tmp_path))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            comparisons.start(KEY, tmp_path / "notes.yaml", repair=False)
    assert comparisons.newest(KEY) is None
    (tmp_path / "repair").write_text("{}")
    comparisons.start(KEY, tmp_path / "notes.yaml", repair=True)
    assert "repaired" in ended(comparisons).error


def test_pages_compare_side_by_side_and_repair_after_a_preview(tmp_path: Path) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    file = tmp_path / "notes.yaml"
    file.write_text(f"name: notes\nstate: {settings.state}\n")
    command = command_in(tmp_path)
    with (
        console_of(stores=(settings.state,), pipeline_files=(file,), command=command) as browser,
        capture_logs() as logs,
    ):
        page = browser.get("/compare", **ADDRESS)
        assert "has not compared this target" in page.words
        fields = {**ADDRESS, "csrf": page.field("csrf")}
        assert browser.post("/compare/start", fields | {"csrf": ""}).status == 403
        assert browser.get("/compare/start", **ADDRESS).status == 405
        started = browser.post("/compare/start", fields)
        running = browser.follow(started)
        assert "The comparison has run for" in running.words
        assert "every 2s" in running.text
        assert browser.post("/compare/start", fields).status == 429
        (tmp_path / "go").touch()
        wait_until(lambda: "Differing rows" in browser.get("/compare", **ADDRESS).words)
        page = browser.get("/compare", **ADDRESS)
        assert HOSTILE in page.words
        assert "<script>alert" not in page.text
        assert page.text.count("<article") == 2
        assert "format=csv" in page.text
        rows = json.loads(browser.get("/compare/rows", **ADDRESS, format="json").text)
        assert [(row["table"], row["kind"], json.dumps(row["key"])) for row in rows] == [
            (row["table"], row["kind"], row["key"]) for row in DIFFERENCES
        ]
        file = browser.get("/compare/rows", **ADDRESS, format="csv")
        assert file.headers["content-disposition"] == 'attachment; filename="differing-rows.csv"'
        lines = list(csv.DictReader(io.StringIO(file.text, newline="")))
        assert [(line["column"], line["source"], line["target"], line["is_different"]) for line in lines] == [
            ("id", "7", "7", "false"),
            ("note", HOSTILE, "old", "true"),
            ("id", "8", "", "true"),
            ("note", "NULL", "", "true"),
        ]
        assert browser.get("/compare/rows", **ADDRESS, format="xlsx").status == 400
        assert browser.get("/compare/rows", **{**ADDRESS, "name": HOSTILE}, format="csv").status == 404
        preview = browser.get("/compare/repair", **ADDRESS)
        assert "found 2 differing rows" in preview.words
        assert len(words_of(tmp_path)) == 1, "a preview starts nothing"
        browser.post("/compare/repair/confirm", fields)
        wait_until(lambda: "The last repair" in browser.get("/compare", **ADDRESS).words)
        assert browser.get("/compare", **{**ADDRESS, "name": HOSTILE}).status == 404
    assert "--repair" in words_of(tmp_path)[1]
    audit = [entry["action"] for entry in logs if entry["event"] == "audit"]
    assert audit == ["compare target", "repair target"]


def test_file_of_differing_rows_has_no_formulas() -> None:
    rows = [
        {
            "table": "shop.t",
            "kind": "different",
            "key": '{"id": 1}',
            "source": '{"note": "=1+1"}',
            "target": None,
        }
    ]
    lines = list(
        csv.DictReader(io.StringIO(bytes(export_differences("x", rows, "csv").body).decode(), newline=""))
    )
    assert [(line["key"], line["column"], line["source"]) for line in lines] == [
        ('{"id": 1}', "note", "'=1+1")
    ]


@pytest.mark.parametrize(
    ("steps", "hidden", "shown"),
    [
        ("[]", ["old", "alert(1)"], ['{"id": 7}', "(masked)"]),
        ("[{map: {rename: {a: b}}}]", ["old", '"id": 7'], []),
    ],
    ids=["by-name", "after-a-renaming-step"],
)
@pytest.mark.parametrize(
    "rights", [({"any.*": ["NOTE"]}, {}), ({}, {"any.*": ["Id"]})], ids=["masked", "listed"]
)
def test_values_that_are_masked_for_the_account_are_hidden(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: str,
    hidden: list[str],
    shown: list[str],
    rights: tuple[dict[str, list[str]], dict[str, list[str]]],
) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    file = tmp_path / "notes.yaml"
    source = f"{{path: {tmp_path}/log, name: shop}}"
    file.write_text(f"name: notes\nstate: {settings.state}\nsource: {source}\nsteps: {steps}\nsink: stdout\n")
    masked, listed = rights
    masked_for_visitors(monkeypatch, masked, columns=listed)
    command = command_in(tmp_path, COUNTS | {"open": "the value 'old' of note"})
    (tmp_path / "go").touch()
    with console_of(ANYWHERE, stores=(settings.state,), pipeline_files=(file,), command=command) as browser:
        fields = {**ADDRESS, "csrf": browser.get("/compare", **ADDRESS).field("csrf")}
        browser.post("/compare/start", fields)
        wait_until(lambda: "The last comparison" in browser.get("/compare", **ADDRESS).words)
        page = browser.get("/compare", **ADDRESS).words
        files = [browser.get("/compare/rows", **ADDRESS, format=each).text for each in ("json", "csv")]
    assert [value for value in hidden if value in page] == []
    assert [value for value in shown if value not in page] == []
    assert [(value, text) for text in files for value in hidden if value.strip('"') in text] == []


@pytest.mark.parametrize(
    ("beyond", "repaired", "requests", "said"),
    [
        (0, 2, (), ["2 rows were corrected.", "Compare again"]),
        (4000, 10_000, (), ["10,000 rows were corrected.", "4,000 more rows may differ"]),
        (0, 0, ("1", "2"), ["It was asked to read the differing rows again", "Requests: 2."]),
    ],
    ids=["corrected", "corrected-in-part", "asked-for"],
)
def test_page_of_a_repair_says_what_was_done(
    tmp_path: Path, beyond: int, repaired: int, requests: Sequence[str], said: Sequence[str]
) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    file = tmp_path / "notes.yaml"
    file.write_text(f"name: notes\nstate: {settings.state}\n")
    command = command_in(tmp_path, COUNTS | {"beyond": beyond}, repaired, requests)
    (tmp_path / "go").touch()
    with console_of(stores=(settings.state,), pipeline_files=(file,), command=command) as browser:
        fields = {**ADDRESS, "csrf": browser.get("/compare", **ADDRESS).field("csrf")}
        browser.post("/compare/start", fields)
        wait_until(lambda: "The last comparison" in browser.get("/compare", **ADDRESS).words)
        assert " differs " in browser.get("/compare", **ADDRESS).words
        assert f"at most {REPAIRED_KEYS_MAX:,} rows" in browser.get("/compare/repair", **ADDRESS).words
        browser.post("/compare/repair/confirm", fields)
        wait_until(lambda: "The last repair" in browser.get("/compare", **ADDRESS).words)
        page = browser.get("/compare", **ADDRESS).words
    assert [text for text in said if text not in page] == []
    assert " differs " not in page, "the counts are from before the repair"


def test_verify_prints_what_a_repair_did_as_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "notes.yaml"
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    monkeypatch.setattr("penstock.pipeline.settings.load_pipeline", lambda _: settings)
    outcome = Verification([], {}, running=True, requests=["4-1"])
    monkeypatch.setattr("penstock.pipeline.verify.verify.verify_shards", lambda *_, **__: outcome)
    assert penstock("verify", file, "--json").out == ""
    done = penstock("verify", file, "--json", "--repair")
    assert json.loads(done.out) == {"repaired": 0, "requests": ["4-1"]}


def test_comparison_of_all_tables_is_recorded_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "notes.yaml"
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    file.write_text(
        f"name: notes\nstate: {settings.state}\nsource: {{path: {tmp_path}/log, name: shop}}\nsink: stdout\n"
    )
    monkeypatch.setattr("penstock.pipeline.settings.load_pipeline", lambda _: settings)
    outcome = Verification([], {}, running=False)
    monkeypatch.setattr("penstock.pipeline.verify.verify.verify_shards", lambda *_, **__: outcome)

    def recorded() -> VerificationRecord | None:
        with closing(PipelineState.of(settings)) as state:
            return read_verification(state)

    for part in (["shop.notes"], ["--leave-out", "body"]):
        assert penstock("verify", file, *part).code == 0
        assert recorded() is None, "only a part was compared"
    assert penstock("verify", file).code == 0
    record = recorded()
    assert record is not None
    assert (record.differences, record.complete, record.equal_us == record.time_us) == (0, True, True)
    with console_of(stores=(settings.state,), pipeline_files=(file,)) as browser:
        assert "The last comparison: " in browser.get("/compare", **ADDRESS).words
        with closing(PipelineState.of(settings)) as state:
            unfinished = SimpleNamespace(remaining=0, whole=False, results=[SimpleNamespace(source_rows=7)])
            record_verification(state, unfinished)  # type: ignore[arg-type]
        assert "incomplete no difference found in 7 rows" in browser.get("/compare", **ADDRESS).words


def test_console_passes_a_command_that_ends_with_it() -> None:
    settings = console._settings(ConsoleSection(), None)
    assert settings.command[1:3] == ("-m", "penstock.cli.shared.child")
