# SPDX-License-Identifier: Apache-2.0
"""Settings as text that is safe to share: each secret in it is replaced by a reference to the environment."""

import json
import re
from dataclasses import dataclass

from penstock.settings.file import REFERENCE, ValuePath, scalars_of

# Names of settings, options of clients and parameters of URLs that carry a secret.
_SECRET_WORDS = (
    r"passw|secret|token|credential|authorization|connection[._-]?string"
    r"|(?:api|access|private|signing|account)[._-]?key"
)
_SECRET_NAME = re.compile(_SECRET_WORDS, re.IGNORECASE)
# Settings that name the place of a secret, not the secret itself.
_REFERENCE_NAME = re.compile(r"(?:file|env|path|location)$", re.IGNORECASE)
_SECRETS_IN_URLS = (
    # A password may contain any character, so the last @ ends it.
    re.compile(r"(?P<before>[a-zA-Z][\w+.-]*://[^\s:/@]*:)(?P<secret>\S+)(?=@)"),
    # Over HTTP, a user without a password is often a token.
    re.compile(r"(?P<before>https?://)(?P<secret>[^\s:/@?#]+)(?=@)", re.IGNORECASE),
    re.compile(rf"(?P<before>[?&;][^=&\s]*(?:{_SECRET_WORDS})[^=&\s]*=)(?P<secret>[^&;#\s]+)", re.IGNORECASE),
)
_NO_VARIABLE = re.compile(r"[^0-9A-Z]+")


@dataclass(frozen=True)
class ExportedText:
    """The text of a settings file without secrets.

    `hidden` contains the variables that replace secrets in the text. `references` contains all variables that
    its secrets refer to, including those that the text already referred to.
    """

    text: str
    hidden: tuple[str, ...]
    references: frozenset[str]


def without_secrets(text: str, name: str) -> ExportedText:
    """Return the text of a settings file without its secrets; everything else stays as written.

    The variables that replace secrets begin with `name`, so that the variables of several files differ.
    Comments are not searched. Raises OptionInvalid for a text that is not YAML.
    """
    parts: list[str] = []
    hidden: dict[str, str] = {}
    references: set[str] = set()
    end = 0
    for scalar in scalars_of(text):
        shown = _without_secret(scalar.value, (name, *scalar.path), hidden, references)
        if shown != scalar.value:
            # A block scalar includes the end of its last line, so the replacement needs a line end too.
            line_end = "\n" if text[scalar.start] in "|>" else ""
            parts += [text[end : scalar.start], json.dumps(shown, ensure_ascii=False), line_end]
            end = scalar.end
    return ExportedText("".join((*parts, text[end:])), tuple(hidden), frozenset(references))


def _without_secret(value: str, path: ValuePath, hidden: dict[str, str], references: set[str]) -> str:
    """Return a value with its secrets replaced by variables, which are added to `hidden` and `references`."""

    def replaced(secret: str, name: ValuePath) -> str:
        if REFERENCE.sub("", secret):
            secret = f"${{{_variable(name, secret, hidden)}}}"
        references.update(match.group(2) for match in REFERENCE.finditer(secret) if match.group(2))
        return secret

    if _is_secret(path):
        return replaced(value, path)
    for pattern in _SECRETS_IN_URLS:
        value = pattern.sub(
            lambda match: match["before"] + replaced(match["secret"], (*path, "secret")), value
        )
    return value


def _is_secret(path: ValuePath) -> bool:
    names = [step for step in path[1:] if isinstance(step, str)]
    if "steps" in names:
        # A setting of a step may be named after a column, so `mask.key` is the only secret in steps.
        return names[-2:] == ["mask", "key"]
    return bool(names and _SECRET_NAME.search(names[-1]) and not _REFERENCE_NAME.search(names[-1]))


def _variable(path: ValuePath, secret: str, hidden: dict[str, str]) -> str:
    """Return the variable that stands for a secret."""
    stem = variable = _NO_VARIABLE.sub("_", "_".join(map(str, path)).upper()).lstrip("0123456789")
    number = 1
    while hidden.setdefault(variable, secret) != secret:
        number += 1
        variable = f"{stem}_{number}"
    return variable
