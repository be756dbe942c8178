# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.site`: build the documentation site into build/site/html.

The site has the same folders as the repository, so links between pages work in both. A broken link fails the
build.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.site.error_pages import error_page
from tools.site.figures import MARK, figures

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "site"

_LINK = re.compile(r"\]\(([^)#\s:]+)")

ERROR_MESSAGES = "docs/error_messages.md"
# The sections of the navigation, with the pages or folders of each.
SECTIONS = {
    "Start": ("README.md", "docs/start.md", "docs/glossary.md", "docs/comparison.md"),
    "Guides": ("docs/guides",),
    "Targets": ("docs/guides/sinks",),
    "Reference": ("docs/reference", ERROR_MESSAGES),
    "Formats": ("docs/formats",),
    "Architecture": ("ARCHITECTURE.md", "docs/decisions"),
    "Project": ("CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "bench/results"),
    "中文": ("docs/zh",),
}


def write_source(folder: Path) -> None:
    """Write the repository's pages below a folder, with the files that they link to."""
    for page in pages():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / page).read_text()
        (folder / page).write_text(text.replace(MARK, figures()))
        for path in _linked_files(page, text):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, folder / path)


def _linked_files(page: str, text: str) -> Iterator[Path]:
    """Yield the files of the repository, other than pages, that a page links to."""
    for link in _LINK.findall(text):
        path = (ROOT / page).parent.joinpath(link).resolve()
        if path.is_file() and path.suffix != ".md" and path.is_relative_to(ROOT):
            yield path.relative_to(ROOT)


def pages() -> Iterator[str]:
    """Yield the paths of the repository's pages that the site has."""
    for section in SECTIONS.values():
        for entry in section:
            if (ROOT / entry).is_dir():
                yield from (page.relative_to(ROOT).as_posix() for page in sorted((ROOT / entry).glob("*.md")))
            elif (ROOT / entry).exists():
                yield entry


def configuration(source: Path, html: Path) -> dict[str, Any]:
    """Return the configuration of MkDocs."""
    return {
        "site_name": "Penstock",
        "docs_dir": str(source),
        "site_dir": str(html),
        # A site can be read from a folder, without a server.
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            # The site fetches nothing from other servers.
            "font": False,
            "features": ["navigation.tabs", "navigation.top", "search.highlight", "content.code.copy"],
            "palette": [
                {"media": f"(prefers-color-scheme: {scheme})", "scheme": name, "primary": "blue grey"}
                for scheme, name in (("light", "default"), ("dark", "slate"))
            ],
        },
        "plugins": [{"search": {"lang": ["en", "zh"]}}],
        "markdown_extensions": ["tables", "toc", "pymdownx.superfences", "pymdownx.highlight"],
        "validation": {
            "omitted_files": "warn",
            "absolute_links": "warn",
            "unrecognized_links": "warn",
            "anchors": "warn",
        },
        "nav": [{title: list(_entries(section, source))} for title, section in SECTIONS.items()],
    }


def _entries(section: tuple[str, ...], source: Path) -> Iterator[str]:
    for entry in section:
        folder = source / entry
        if folder.is_dir():
            yield from sorted(page.relative_to(source).as_posix() for page in folder.glob("*.md"))
        else:
            yield entry


def main() -> None:
    """Build the site. Exits with MkDocs' status."""
    shutil.rmtree(BUILD, ignore_errors=True)
    source, html = BUILD / "source", BUILD / "html"
    write_source(source)
    (source / ERROR_MESSAGES).write_text(error_page())
    # JSON is valid YAML.
    settings = BUILD / "mkdocs.yml"
    settings.write_text(json.dumps(configuration(source, html), ensure_ascii=False))
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(settings)]
    sys.exit(subprocess.run(words, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
