# SPDX-License-Identifier: Apache-2.0
"""Documents are correct: their references exist, and generated pages are fresh."""

import re
from pathlib import Path

import pytest

from bench.__main__ import case_names
from bench.corpora.corpus import ALL_NAMES
from penstock.logstore.records import BLOCK_DTYPE, SEGMENT_DTYPE
from penstock.serve.http.openapi import description
from penstock.sinks.sink import kinds
from tests.tidy.tree import ROOT, files, name_of, python_symbols, rust_symbols
from tools.document import PAGES

MARKDOWN = files(".md")
CITATION = re.compile(r"`([\w./-]+\.(?:py|rs))::([\w.]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Handwritten reference pages about server behaviour, which no code describes.
_WRITTEN = {"hidden_changes.md"}
PATH_WORD = re.compile(r"`((?:src|native|tests|bench|docs|tools|demo|examples)/[\w./-]+)`")
HTTP_CALL = re.compile(r"\| `(GET|POST|PUT|DELETE) ")


@pytest.mark.parametrize("path", MARKDOWN, ids=name_of)
def test_document_has_one_title(path: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^# .+", text, re.MULTILINE)
    assert len(titles) == 1, titles


@pytest.mark.parametrize("path", MARKDOWN, ids=name_of)
def test_document_references_exist(path: Path) -> None:
    text = path.read_text()
    cited = [(ROOT / citation[0], citation[1]) for citation in CITATION.findall(text)]
    missing = [f"{name_of(where)}::{symbol}" for where, symbol in cited if not defines(where, symbol)]
    missing += [word for word in PATH_WORD.findall(text) if not (ROOT / word).exists()]
    linked = [word for word in LINK.findall(text) if "://" not in word and not word.startswith("mailto:")]
    missing += [word for word in linked if not (path.parent / word).exists()]
    assert not missing, missing


def test_architecture_traces_a_row_through_existing_symbols() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    life = text[text.index("## The life of one row") : text.index("## Sources of truth")]
    steps = re.findall(r"^\d+\. ", life, re.MULTILINE)
    assert len(steps) >= 10
    assert len(CITATION.findall(life)) >= len(steps)


def test_every_invariant_names_its_test() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    part = text[text.index("## Invariants") :]
    part = part[: part.index("\n## ", 3)]
    invariants = re.split(r"^\d+\. ", part, flags=re.MULTILINE)[1:]
    assert len(invariants) >= 10
    unheld = [text.split("\n")[0] for text in invariants if not re.search(r"`tests/[\w./]+::test_\w+`", text)]
    assert not unheld, unheld


@pytest.mark.parametrize("name", sorted(PAGES))
def test_generated_page_is_fresh(name: str) -> None:
    page = ROOT / "docs/reference" / name
    assert page.exists(), "run: make docs"
    assert page.read_text() == PAGES[name](), f"{name} is stale, run: make docs"


@pytest.mark.parametrize("page", ["README.md", "docs/zh/README.md", "docs/guides/pipelines.md"])
def test_page_names_every_sink(page: str) -> None:
    text = (ROOT / page).read_text().lower().replace("文件", "files")
    assert [kind for kind in kinds() if kind not in text] == []


def test_page_of_the_log_has_the_fields_of_its_records() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| `(\w+)` \|", (ROOT / "docs/formats/log.md").read_text(), re.MULTILINE
    )
    records = [(*dtype.fields[name], name) for dtype in (BLOCK_DTYPE, SEGMENT_DTYPE) for name in dtype.names]
    expected = [(str(offset), str(kind.itemsize), name) for kind, offset, name in records]
    assert rows == expected


def test_page_of_the_benchmarks_names_every_case_and_file() -> None:
    text = (ROOT / "bench/README.md").read_text()
    assert [name for name in (*case_names(), *ALL_NAMES) if f"| `{name}` |" not in text] == []


def test_guide_of_the_daemon_lists_every_http_call() -> None:
    # Members use the calls below /copy among themselves.
    described = {
        (method.upper(), without_names(path))
        for path, methods in description()["paths"].items()
        for method in methods
        if "/copy/" not in path
    }
    assert listed_calls() == described


def listed_calls() -> set[tuple[str, str]]:
    """Return the method and path of each call in the guide's table. A word without a slash replaces the last
    part of the path before it.
    """
    calls = set()
    for line in (ROOT / "docs/guides/serve.md").read_text().splitlines():
        method = path = ""
        for word in re.findall(r"`([^`?]*)[^`]*`", line.partition(" | ")[0]) if HTTP_CALL.match(line) else ():
            if not word:
                continue
            method, _, name = word.rpartition(" ") if " " in word else (method, "", word)
            if not name.startswith(("/", "...")):
                name = f"{path.rpartition('/')[0]}/{name}"
            path = name.replace("...", "/v1/instances/NAME")
            calls.add((method, without_names(path)))
    return calls


def without_names(path: str) -> str:
    """Return a path in which every variable part is NAME."""
    return re.sub(r"\{\w+\}", "NAME", path)


def test_every_handwritten_reference_page_is_listed() -> None:
    assert {path.name for path in files(".md", below="docs/reference")} == set(PAGES) | _WRITTEN


def defines(path: Path, symbol: str) -> bool:
    """Return whether a file defines a symbol. For a dotted Rust name, the file must define each part."""
    if not path.exists():
        return False
    if path.suffix == ".py":
        return symbol in python_symbols(path)
    return all(part in rust_symbols(path) for part in symbol.split("."))
