# SPDX-License-Identifier: Apache-2.0
"""The texts of the pages: English in the templates, and their Chinese translations in `words.zh.toml`."""

import tomllib
from importlib.resources import files

# The first language is the default.
LANGUAGES = ("en", "zh")

CHINESE: dict[str, str] = tomllib.loads(files(__package__).joinpath("words.zh.toml").read_text("utf-8"))


def translate(language: str, text: str, **values: object) -> str:
    """Return a template text in a language, with its values filled in."""
    translated = CHINESE.get(text, text) if language == "zh" else text
    return translated.format(**values) if values else translated
