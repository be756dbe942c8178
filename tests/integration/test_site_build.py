# SPDX-License-Identifier: Apache-2.0
"""The documentation site, built by MkDocs: a link or an anchor that leads nowhere fails the build."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.suite.fixture_types import MissingPart
from tools.site.__main__ import BUILD, ROOT, pages


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
