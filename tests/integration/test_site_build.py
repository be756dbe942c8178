# SPDX-License-Identifier: Apache-2.0
"""The documentation site, built by MkDocs: a broken link or anchor fails the build."""

import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.nonempty import each
from tools.site.__main__ import BUILD, ROOT, pages
from tools.site.figures import figures


class Links(HTMLParser):
    """Collects the addresses in a page: those of links, and those of the files that a browser fetches to show
    the page.
    """

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.linked: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "a":
            self.linked.add(named.get("href") or "")
        elif tag in ("script", "img", "iframe"):
            self.fetched.add(named.get("src") or "")
        elif tag == "link" and named.get("rel") in ("stylesheet", "icon"):
            self.fetched.add(named.get("href") or "")


@pytest.mark.deep(guard="tests/unit/test_site.py::test_site_has_every_page_and_what_the_pages_link_to")
def test_site_is_built_without_a_warning(missing_part: MissingPart) -> None:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        missing_part("MkDocs", "mkdocs-material is not installed: pip install 'penstock[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "tools.site"], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    html = BUILD / "html"
    assert (html / "index.html").exists()
    for page in pages():
        built = html / page.replace("README.md", "index.md").replace(".md", ".html")
        assert built.exists(), page
    for built in each(html.rglob("*.html"), least=50):
        page = Links(built)
        assert not [address for address in page.fetched if urlsplit(address).scheme], (
            f"{built} needs a network"
        )
        local = (
            unquote(urlsplit(url).path) for url in page.linked | page.fetched if not urlsplit(url).scheme
        )
        # A server sends the 404 page for any address, so its links begin at the site's root.
        folder = html if built.name == "404.html" else built.parent
        assert not [path for path in local if not (folder / path.lstrip("/")).exists()], built
    comparison = (html / "docs/comparison.html").read_text()
    for row in each(figures().splitlines()[2:], least=4):
        assert f"<td>{row.split(' | ')[3]}</td>" in comparison
