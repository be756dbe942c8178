# SPDX-License-Identifier: Apache-2.0
"""The console's own files: colors, templates, and files copied from other packages."""

import hashlib
import re
import tomllib
from pathlib import Path

from penstock.console import pages
from tests.support.suite.nonempty import each

CONSOLE = Path(pages.__file__).parent
TEMPLATES = sorted((CONSOLE / "templates").glob("*.html"))


def test_colors_of_both_themes_are_readable() -> None:
    """Text has a contrast of at least 4.5 to 1, as level AA of the WCAG requires."""
    themes = re.findall(r":root \{(.*?)\}", (CONSOLE / "static/console.css").read_text(), re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        colors = dict(re.findall(r"--(\w+): (#\w{6});", theme))
        grounds = [colors.pop("ground"), colors.pop("raised")]
        del colors["line"]
        for name, color in each(colors.items()):
            for ground in grounds:
                lighter, darker = sorted((_luminance(color), _luminance(ground)), reverse=True)
                assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{name} on {ground}"


def _luminance(color: str) -> float:
    shares = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_no_template_marks_a_value_as_safe() -> None:
    for template in each(TEMPLATES):
        assert not re.search(r"\|\s*safe\b|autoescape|<script(?! src)", template.read_text()), template.name


def test_vendored_files_are_those_of_their_packages() -> None:
    vendor = CONSOLE / "static/vendor"
    files = tomllib.loads((vendor / "VENDOR.toml").read_text())["file"]
    named = {entry["path"] for entry in files} | {entry["license_file"] for entry in files}
    assert {path.name for path in vendor.iterdir()} == named | {"VENDOR.toml"}
    for entry in each(files):
        assert hashlib.sha256((vendor / entry["path"]).read_bytes()).hexdigest() == entry["sha256"]


def test_addresses_of_other_sites_are_in_no_file_of_the_console() -> None:
    for file in each([*TEMPLATES, *(CONSOLE / "static").glob("*.*")]):
        addresses = set(re.findall(r"https?://[^\s\"'<>)]+", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name
