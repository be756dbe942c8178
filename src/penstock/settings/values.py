# SPDX-License-Identifier: Apache-2.0
"""The value types of settings: durations, numbers of bytes, secrets, and the base of every section."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from penstock.coordinate.backends import backend_names
from penstock.errors import OptionInvalid
from penstock.model import Secret, ServerAddress, TablePatterns, is_server_url

_Parsed = TypeVar("_Parsed")

_IS_READING = ContextVar("is_reading_secrets", default=True)

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTE_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    "KB": 1000,
}
# The URL of a file has no host: sqlite:///path, or sqlite:path for a relative path. URLs of other stores have
# one.
_STORE_URL = re.compile(r"sqlite:(//(?=/)|(?!//)).*[^/]|(?!sqlite:)[a-z][a-z0-9_]*://[^/].*")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def seconds_of(value: Any) -> float:
    """Return the seconds of a number, or of text such as "24h", "1.5s" or "500ms". Raises ValueError."""
    amount, unit = _amount(value, "s")
    if unit not in _DURATION_UNITS:
        raise ValueError(f"{value!r} is no duration: write 500ms, 30s, 15m, 24h or 7d")
    return amount * _DURATION_UNITS[unit]


def bytes_of(value: Any) -> int:
    """Return the bytes of a number, or of text such as "1GiB", "64KiB" or "10GB". Raises ValueError."""
    amount, unit = _amount(value, "B")
    if unit not in _BYTE_UNITS:
        raise ValueError(f"{value!r} is no number of bytes: write 64KiB, 512MiB, 1GiB or 10GB")
    return int(amount * _BYTE_UNITS[unit])


def _amount(value: Any, unit_default: str) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("it must be a number, with a unit or without")
    if not isinstance(value, str):
        if value < 0:
            raise ValueError(f"{value} is below 0")
        return value, unit_default
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is no number with a unit")
    return float(match.group(1)), match.group(2) or unit_default


def _secret_of(value: Any) -> Secret:
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("it must be text, and not empty")
    return Secret(value)


@contextmanager
def secrets_unread() -> Iterator[None]:
    """Validate settings inside the block without reading the files and variables of their secrets."""
    token = _IS_READING.set(False)
    try:
        yield
    finally:
        _IS_READING.reset(token)


def one_secret(text: Secret | None, file: Path | None, variable: str | None, name: str) -> Secret | None:
    """Read a secret that is set as text, in a file or in a variable, and return it. Raises ValueError.

    Inside `secrets_unread`, a placeholder is returned instead of reading the secret.
    """
    sources = [source for source in (text, file, variable) if source is not None]
    if len(sources) > 1:
        raise ValueError(f"one of {name}, {name}_file and {name}_env is enough")
    if text is None and sources and not _IS_READING.get():
        return Secret(f"the secret in {sources[0]}")
    if file is not None:
        try:
            text = Secret(file.read_text(encoding="utf-8").strip("\r\n"))
        except (OSError, UnicodeDecodeError) as problem:
            raise ValueError(f"{name}_file {file} cannot be read: {problem}") from problem
        if not text:
            raise ValueError(f"{name}_file {file} is empty")
    if variable is not None:
        text = Secret(os.environ.get(variable, ""))
        if not text:
            raise ValueError(f"{name}_env: the environment has no variable {variable}")
    return text


def _check_single_secret(variable: str | None, validation: ValidationInfo) -> str | None:
    name = str(validation.field_name).removesuffix("_env")
    one_secret(validation.data.get(name), validation.data.get(f"{name}_file"), variable, name)
    return variable


def validate_option(parse: Callable[[], _Parsed]) -> _Parsed:
    """Call a parser; convert OptionInvalid into ValueError, which pydantic collects."""
    try:
        return parse()
    except OptionInvalid as problem:
        raise ValueError(f"{problem.message}{f'. {problem.hint}' if problem.hint else ''}") from problem


def store_url(url: str) -> str:
    """Return the URL of a coordination store unchanged. Raises ValueError for a URL of no supported kind."""
    if url.partition(":")[0] not in backend_names() or not _STORE_URL.fullmatch(url):
        raise ValueError(
            "write sqlite:///path/file.db or zookeeper://host:2181,host:2181/path;"
            f" the schemes are {', '.join(backend_names())}"
        )
    return url


def columns_by_table(columns: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return columns by table pattern unchanged. Raises ValueError unless each key is one pattern."""
    for pattern, names in columns.items():
        _prove_one_pattern(pattern)
        if not names or not all(names) or len(set(names)) < len(names):
            raise ValueError(f"{pattern}: write one or more columns, each once")
    return columns


def conditions_by_table(conditions: dict[str, str]) -> dict[str, str]:
    """Validate conditions, which are keyed by table pattern, and return them unchanged. Raises ValueError
    unless each key is one pattern, and each value is a condition.
    """
    if not conditions:
        return conditions
    # Imported here because few settings have conditions, and importing Arrow takes longer than reading the
    # settings.
    from penstock.predicate import Predicate

    for pattern, text in conditions.items():
        _prove_one_pattern(pattern)
        try:
            Predicate.compile(text)
        except OptionInvalid as problem:
            raise ValueError(
                f"{pattern}: {problem.message}{f'. {problem.hint}' if problem.hint else ''}"
            ) from problem
    return conditions


def _prove_one_pattern(pattern: str) -> None:
    if len(validate_option(partial(TablePatterns, pattern)).include) != 1:
        raise ValueError(f"{pattern!r} is more than one table pattern")


def _table_patterns(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return validate_option(lambda: TablePatterns(",".join(value)).include)
    return value


Seconds = Annotated[
    float,
    BeforeValidator(seconds_of),
    WithJsonSchema({"type": ["string", "number"], "description": "a duration: 500ms, 30s, 24h, 7d"}),
]
Bytes = Annotated[
    int,
    BeforeValidator(bytes_of),
    WithJsonSchema({"type": ["string", "integer"], "description": "a number of bytes: 64KiB, 1GiB, 10GB"}),
]
SecretText = Annotated[Secret, PlainValidator(_secret_of), WithJsonSchema({"type": "string"})]
# A field NAME_env: the environment variable with a secret. The fields NAME and NAME_file come before it, and
# only one of the three may be set.
SecretEnv = Annotated[str | None, AfterValidator(_check_single_secret)]
# One pattern or a list of patterns: `database.table`, with * and /regex/.
TablePatternTexts = Annotated[tuple[str, ...], BeforeValidator(_table_patterns)]


class Section(BaseModel):
    """A section of the settings. Unknown names are rejected, values are immutable, and errors do not show the
    input.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        arbitrary_types_allowed=True,
        # Validators are built at first use, so that a verb that reads no settings starts sooner.
        defer_build=True,
    )


def further_server(
    text: str, first: ServerAddress, password: Secret | None, server_id: int | None
) -> ServerAddress:
    """Parse another server of a cluster: a URL, or host:port, with everything else copied from `first`.

    Raises ValueError, without any secret.
    """
    if is_server_url(text):
        return validate_option(
            lambda: ServerAddress.parse(
                text, password=password or first.password, server_id=server_id, tls=None
            )
        )
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s/@]+)(?::(\d{1,5}))?", text.strip())
    if match is None or not 0 < int(match.group(2) or 1) <= 65_535:
        raise ValueError("a further server is host, host:port, or a whole mysql:// URL")
    return ServerAddress(
        host=match.group(1).strip("[]"),
        port=int(match.group(2) or first.port),
        user=first.user,
        password=first.password,
        scheme=first.scheme,
        tls=first.tls,
        server_id=first.server_id,
    )
