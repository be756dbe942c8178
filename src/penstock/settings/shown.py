# SPDX-License-Identifier: Apache-2.0
"""Settings in a form that can be shown on a page or attached to a support case: complete, but without
secrets.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from penstock.model import Secret

HIDDEN = "•••"

# Fields with free text of the user, which may contain a credential anywhere.
_FREE_TEXTS = frozenset({"body"})
# A password may contain any character, so the last @ ends it.
_URL_PASSWORD = re.compile(r"(//[^:/@]*):.*@", re.DOTALL)
_PASSWORD = re.compile(r"^([^:/@]*):.*@", re.DOTALL)
# Over HTTP, a user without a password is often a token.
_HTTP_USER = re.compile(r"(https?://)[^:/@?#]+@", re.IGNORECASE)
# The value of a parameter of a URL.
_PARAMETER = re.compile(r"(?<==)[^&\s]*")


def shown_settings(settings: BaseModel) -> dict[str, Any]:
    """Return settings as plain JSON values, without secrets and without credentials in URLs."""
    return {
        name: HIDDEN if name in _FREE_TEXTS and getattr(settings, name) else _shown(getattr(settings, name))
        for name in type(settings).model_fields
    }


def _shown(value: Any) -> Any:
    match value:
        case Secret():
            return HIDDEN
        case BaseModel():
            return shown_settings(value)
        case Mapping():
            return {str(name): _shown(part) for name, part in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_shown(part) for part in value]
        case Path():
            return str(value)
        case str():
            return _without_credentials(value)
        case _:
            return value


def _without_credentials(text: str) -> str:
    is_url = "://" in text
    if not is_url:
        return _PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    text = _HTTP_USER.sub(rf"\1{HIDDEN}@", _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text))
    text, mark, fragment = text.partition("#")
    shown_fragment = f"{mark}{HIDDEN if fragment else ''}"
    address, mark, parameters = text.partition("?")
    return f"{address}{mark}{_PARAMETER.sub(HIDDEN, parameters)}{shown_fragment}"
