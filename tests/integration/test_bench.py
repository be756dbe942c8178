# SPDX-License-Identifier: Apache-2.0
"""The benchmarks in their smallest form: every peer and every case completes and agrees on the counts.

No test measures time. A real server generates each corpus once; the benchmark cache keeps it.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from bench.__main__ import case_names, run_case
from bench.corpora import corpus as corpora
from bench.corpora.corpus import NAMES, Corpus, CountsDiffer, check_rows, corpus, workload
from bench.corpora.serve import serve
from bench.peers.peer import VERBS, Job, can_run, measure, names, peer
from bench.result import CaseResult, Line, Options, Target, show, write
from tests.support.spark.cluster import JVM_OPTIONS
from tests.support.suite.fixture_types import MissingPart
from tools.servers import PartMissing, Server, install

# Some tests start three JVMs in sequence.
pytestmark = pytest.mark.timeout(1800)

SIZE = "tiny"
SECONDS_MAX = 2.0
OFFERED = [(name, verb) for name in names() for verb in VERBS if hasattr(peer(name), verb)]


@pytest.fixture(scope="module", autouse=True)
def _mysql(missing_part: MissingPart) -> None:
    """Corpora are written by MySQL."""
    try:
        install("mysql")
    except PartMissing as error:
        missing_part("mysql server", str(error))


@pytest.fixture(autouse=True)
def _short_lived_jvms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start JVMs without the optimizing compiler: a rehearsal is too short to repay it."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", JVM_OPTIONS)


@pytest.fixture(scope="module", params=NAMES)
def narrow_log(request: pytest.FixtureRequest) -> Corpus:
    """Yield each tiny corpus."""
    return corpus(request.param, SIZE)


@pytest.fixture(scope="module")
def served(narrow_log: Corpus) -> Iterator[Server]:
    """A server that streams the corpus."""
    with serve(narrow_log) as server:
        yield server


def test_corpus_contains_the_rows_promised_by_its_workload(narrow_log: Corpus) -> None:
    assert narrow_log.path.stat().st_size == narrow_log.bytes >= corpora.SIZES[SIZE]
    assert narrow_log.rows == sum(narrow_log.rows_by_table.values()) == sum(narrow_log.rows_by_kind.values())
    assert {table.removeprefix("bench.") for table in narrow_log.tables} <= set(
        workload(narrow_log.name).tables
    )
    rows_per_transaction = narrow_log.rows / narrow_log.transactions
    expected = {"narrow": (1, 1), "wide": (200, 200), "tpcc": (12, 25), "bulk": (500, 500)}
    low, high = expected[narrow_log.name]
    assert low <= rows_per_transaction <= high


def test_edited_workload_is_generated_again_but_not_for_line_breaks() -> None:
    narrow = workload("narrow")
    wrapped = dataclasses.replace(narrow, seed=tuple(text.replace(" ", "\n") for text in narrow.seed))
    edited = dataclasses.replace(narrow, seed=(*narrow.seed, "SELECT 1"))
    assert wrapped.fingerprint == narrow.fingerprint != edited.fingerprint


def test_seed_names_the_file_and_determines_the_random_values_of_each_session(
    mysql_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def values(session: int) -> object:
        with mysql_server.connect() as connection, connection.cursor() as cursor:
            corpora.set_random_seed(connection, session)
            cursor.execute("SELECT RAND(), RAND()")
            return cursor.fetchone()

    narrow = workload("narrow")
    unseeded = corpora.folder_name(narrow, SIZE)
    assert values(0) != values(0)
    monkeypatch.setenv("PENSTOCK_BENCH_SEED", "7")
    assert corpora.folder_name(narrow, SIZE) == f"{unseeded}-seed7"
    first = values(0)
    assert first == values(0) != values(1)
    monkeypatch.setenv("PENSTOCK_BENCH_SEED", "8")
    assert first != values(0)


def test_every_peer_has_a_title_and_a_verb() -> None:
    offered = {name for name, _ in OFFERED}
    assert offered == set(names())
    assert len({peer(name).TITLE for name in offered}) == len(offered)


@pytest.mark.deep(keep=("narrow-penstock-receive_raw",))
@pytest.mark.slow
@pytest.mark.parametrize(("name", "verb"), OFFERED)
def test_peer_agrees_with_the_counts_of_the_servers_own_tool(
    name: str, verb: str, narrow_log: Corpus, served: Server, missing_part: MissingPart
) -> None:
    if (why := can_run(name)) is not None:
        missing_part(name, why)
    outcome = measure(name, verb, Job(narrow_log, served.port))
    assert outcome.complete
    assert (outcome.rows, outcome.bytes) == (narrow_log.rows, narrow_log.bytes)
    assert outcome.rows_by_kind in (None, narrow_log.rows_by_kind)
    assert outcome.version


def test_peer_that_skips_rows_is_named() -> None:
    narrow_corpus = corpus("narrow", SIZE)
    with pytest.raises(CountsDiffer, match=rf"somebody saw 1 changes in .* which has {narrow_corpus.rows}"):
        check_rows("somebody", 1, narrow_corpus.rows, narrow_corpus)


@pytest.mark.deep(keep=("commit_to_log",))
@pytest.mark.slow
@pytest.mark.parametrize("name", case_names())
def test_case_runs_to_its_end_and_is_recorded(name: str, tmp_path: Path) -> None:
    # The tests above cover the peers on the other corpora.
    options = Options(SIZE, 1, ("wide",), SECONDS_MAX)
    result = run_case(name, options)
    assert result.case == name
    assert result.lines
    figures = [figure for line in result.lines for figure in line.rates.values()]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    page = write([result], options, tmp_path)
    assert result.title in page.read_text()


def test_page_states_machine_command_and_whether_a_target_is_met(tmp_path: Path) -> None:
    lines = [
        Line("narrow", "a slow peer", {"rows/s": 10.0}, 9.0, Target(8)),
        Line("narrow", "a fast peer", {"rows/s": 100.0}, 0.9, Target(2)),
    ]
    result = CaseResult("files_to_arrow", "Files", lines, {"a slow peer": "1.0"})
    page = write([result], Options("tiny", 1, NAMES, 1.0, ("files_to_arrow",), 7), tmp_path)
    assert page.stem.endswith("-tiny-seed7-files_to_arrow")
    text = page.read_text()
    assert (
        "- command: `python -m bench files_to_arrow --size tiny --repeat 1 --seed 7 --seconds-max 1`" in text
    )
    assert "- kernel: " in text
    assert "- a slow peer: 1.0" in text
    assert "| narrow | a slow peer | 10.00 | 9.00× | ≥ 8 met |" in text
    assert "| narrow | a fast peer | 100 | 0.90× | ≥ 2 missed |" in text
    record = json.loads(page.with_suffix(".json").read_text())
    assert [line["ratio"] for line in record["cases"][0]["lines"]] == [9.0, 0.9]
    show(result, Console(file=sys.stderr))
