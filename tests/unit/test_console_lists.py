# SPDX-License-Identifier: Apache-2.0
"""Lists of the console's pages as JSON and CSV."""

import csv
import io
import json
from contextlib import closing
from pathlib import Path

import pytest

from penstock.console import pages
from penstock.console.lists import export_lists, read_lists
from penstock.errors import OptionInvalid
from penstock.pipeline.state import PipelineState
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, captured_log, serving

PAGE = """<h1>Title</h1><table><tr><td>no list</td></tr></table>
<h2>Jobs <small>2</small></h2>
<table data-sortable><thead><tr><th>Name</th><th class="right">Lag</th><th>Since</th><th></th></tr></thead>
<tbody>
<tr><td><a href="/x">=1+1 &lt;b&gt;</a></td><td class="right" data-sort="1331.5"><svg><title>no</title></svg>
 1.3 KiB</td><td><time datetime="2026-01-02 03:04:05.678">9 s ago</time></td><td><a>Move</a></td></tr>
<tr><td>007,5</td><td class="right" data-sort="0">–</td><td><table><tr><td>a</td></tr></table> b<br>c</td>
<td></td></tr>
</tbody></table>"""


def test_list_has_the_exact_values_of_the_page() -> None:
    (jobs,) = read_lists(PAGE)
    assert (jobs.title, jobs.columns) == ("Jobs 2", ["Name", "Lag", "Since"])
    assert jobs.rows == [["=1+1 <b>", 1331.5, "2026-01-02 03:04:05.678"], ["007,5", None, "a b c"]]


def test_csv_has_no_formulas_and_unknown_files_are_refused() -> None:
    answer = export_lists("/dead-letters", PAGE, "csv", "1")
    assert answer.headers["content-disposition"] == 'attachment; filename="dead-letters.csv"'
    rows = list(csv.reader(io.StringIO(bytes(answer.body).decode())))
    assert rows[1:] == [["'=1+1 <b>", "1331.5", "2026-01-02 03:04:05.678"], ["007,5", "", "a b c"]]
    for file_format, number in (("csv", "2"), ("csv", "x"), ("csv", ""), ("xml", "1")):
        with pytest.raises(OptionInvalid):
            export_lists("/", PAGE, file_format, number)


def test_pages_link_to_files_with_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PIPELINES_SHOWN_MAX", 1)
    url = f"sqlite:///{tmp_path}/states.db"
    names = ["<b>one", "three", "two"]
    for name in names:
        with closing(PipelineState.open(url, name)) as state:
            state.pause("")
    with captured_log() as log, serving(log) as daemon, console_of(daemon, stores=(url,)) as browser:
        overview = browser.get("/")
        assert 'href="?export=json"' in overview.text
        instances, pipelines = json.loads(browser.get("/", export="json").text)
        filtered = browser.get("/pipelines", find="t")
        assert 'href="?find=t&amp;export=csv&amp;list=1"' in filtered.text
        file = browser.get("/pipelines", find="t", export="csv", list="1")
        refused = browser.get("/", export="csv", list="9")
        assert "export=" not in browser.get("/tail").text
    (instance,) = instances["rows"]
    assert (instance["Instance"], instance["State"]) == (INSTANCE, "running")
    assert sorted(row["Pipeline"] for row in pipelines["rows"]) == names
    assert sorted(row["Pipeline"] for row in csv.DictReader(io.StringIO(file.text))) == ["three", "two"]
    assert file.headers["content-type"] == "text/csv; charset=utf-8"
    assert (refused.status, "the page has 2 lists" in refused.problem) == (400, True)
