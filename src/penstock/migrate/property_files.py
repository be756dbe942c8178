# SPDX-License-Identifier: Apache-2.0
"""Java's `.properties` files, and the placeholders that Spring resolves in their values.

The format is that of `java.util.Properties.load`: `key=value`, `key: value` or `key value`, `#` and `!` begin
a comment, a backslash at the end continues a line, and `\\u0041` is a character.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import OptionInvalid

_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_NAMED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_PLACEHOLDER = re.compile(r"\$\{([^${}:]+)(?::([^${}]*))?\}")
_DEPTH_MAX = 10


def read_text(path: Path) -> str:
    """Return a file's text. Raises OptionInvalid."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionInvalid(
            f"{path} cannot be read: {problem}", hint="Name the file as it is on the original's host"
        ) from problem


def number_of(text: str) -> int | str:
    """Return text as a number. Other text is returned unchanged, so that the settings refuse it by name."""
    return int(text) if text.isdecimal() else text


def parse_properties(text: str) -> dict[str, str]:
    """Return the properties of a file's text. The last value of a name wins."""
    values: dict[str, str] = {}
    logical = ""
    for line in text.splitlines():
        line = line.lstrip(" \t\f")
        if not logical and (not line or line[0] in "#!"):
            continue
        logical += line
        if (len(logical) - len(logical.rstrip("\\"))) % 2:
            logical = logical[:-1]
            continue
        name, value = _split(logical)
        values[name] = value
        logical = ""
    if logical:
        name, value = _split(logical)
        values[name] = value
    return values


def _split(line: str) -> tuple[str, str]:
    match = re.match(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*", line)
    assert match is not None, "every part of the expression may be empty"
    return _unescaped(match[1]), _unescaped(line[match.end() :])


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _NAMED.get(code, code)

    return _ESCAPE.sub(character, text)


def resolve(value: str, values: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return a value with `${name}` and `${name:default}` replaced; unknown names without default stay."""

    def replacement(match: re.Match[str]) -> str:
        name = match[1].strip()
        return environment.get(name, values.get(name, match[0] if match[2] is None else match[2]))

    for _ in range(_DEPTH_MAX):
        resolved = _PLACEHOLDER.sub(replacement, value)
        if resolved == value:
            break
        value = resolved
    return value
