# SPDX-License-Identifier: Apache-2.0
"""A subscriber's request: the body of `POST /v1/instances/{instance}/changes`."""

import difflib
import re
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.errors import OptionInvalid
from penstock.limits import (
    BATCH_ROWS_MAX,
    CREDIT_BYTES_DEFAULT,
    CREDIT_BYTES_MAX,
    REQUEST_COLUMNS_MAX,
    REQUEST_PATTERNS_BYTES_MAX,
    REQUEST_PATTERNS_MAX,
    SHARDS_MAX,
    WAIT_SECONDS_DEFAULT,
    WAIT_SECONDS_MAX,
)
from penstock.model import Position
from penstock.serve.subscription import Start

Format = Literal["arrow", "debezium", "debezium_schema", "maxwell", "canal_flat"]
ChangeKind = Literal["insert", "update", "update_preimage", "update_postimage", "delete"]

# The maximum number of unbounded repeats in a backtracking pattern, so that the matching time is at most
# cubic in the length of the table's name.
_REPEATS_MAX = 3

_INT32_MAX = (1 << 31) - 1

# The largest time that `datetime` can represent, at the end of the year 9999, in microseconds.
_TIME_US_MAX = 253_402_300_799_999_999

_HINT = "GET /v1/openapi.json describes the body"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StartPart(_Part):
    """A position in the log: exactly one of position, gtid_set and time."""

    position: str | None = Field(None, description="A position as in position frames: mysql-bin.000003:1542")
    server_key: str | None = Field(
        None, description="The position frame's server_key, which identifies the epoch's server on any daemon"
    )
    gtid_set: str | None = Field(None, description="The set of consumed transactions")
    time: str | int | None = Field(None, description="ISO 8601 (UTC unless it has a zone), or microseconds")

    @model_validator(mode="after")
    def _has_one(self) -> "StartPart":
        if sum(value is not None for value in (self.position, self.gtid_set, self.time)) != 1:
            raise ValueError("name exactly one of position, gtid_set and time")
        if self.server_key is not None and self.position is None:
            raise ValueError("server_key belongs to position")
        return self

    def start(self) -> Start:
        """Return the start that this part describes. Raises OptionInvalid, PositionInvalid."""
        if self.position is not None:
            return Start(position=Position.parse(self.position), server_key=self.server_key)
        if self.gtid_set is not None:
            return Start(gtid_set=self.gtid_set)
        assert self.time is not None, "one of them is given"
        return Start(time_us=_time_us(self.time))


class ShardsPart(_Part):
    """The selected shards and their total number. A row's shard is its slot modulo the count."""

    count: int = Field(ge=1, le=SHARDS_MAX)
    of: list[int] = Field(
        min_length=1, max_length=SHARDS_MAX, description="The requested shards, counted from 0"
    )
    columns: dict[str, Annotated[list[str], Field(max_length=REQUEST_COLUMNS_MAX)]] = Field(
        default_factory=dict,
        max_length=REQUEST_PATTERNS_MAX,
        description="Table pattern to the columns to hash; default: the primary key",
    )


class ChangesRequest(_Part):
    """A subscriber's request for changes."""

    subscriber: str = Field(
        "",
        max_length=256,
        description="The subscriber's name in GET /v1/subscribers, such as orders-cache/host-1",
    )
    tables: list[str] | None = Field(
        None,
        max_length=REQUEST_PATTERNS_MAX,
        description="Patterns: shop.orders, shop.*, /regex/; default: all tables",
    )
    exclude: list[str] | None = Field(
        None, max_length=REQUEST_PATTERNS_MAX, description="Patterns, as in tables"
    )
    changes: list[ChangeKind] | None = Field(
        None, min_length=1, description="The kinds of changes to send; default: all"
    )
    where: str | None = Field(None, max_length=16384, description="An SQL predicate over a row's columns")
    columns: list[str] | None = Field(
        None, max_length=REQUEST_COLUMNS_MAX, description="Columns to send, including system columns"
    )
    format: Format = "arrow"
    compression: Literal["none", "lz4", "zstd"] = "none"
    shards: ShardsPart | None = None
    start: StartPart | Literal["earliest", "latest"] = "latest"
    until: StartPart | Literal["earliest", "latest"] | None = None
    batch_rows: int = Field(BATCH_ROWS_MAX, ge=1, le=_INT32_MAX, description="Maximum rows per batch")
    credit_bytes: int = Field(
        CREDIT_BYTES_DEFAULT, ge=1, le=CREDIT_BYTES_MAX, description="The response ends after this many bytes"
    )
    wait_seconds: float = Field(
        WAIT_SECONDS_DEFAULT,
        ge=0,
        le=WAIT_SECONDS_MAX,
        description="The response ends when no change arrives for this long",
    )

    @classmethod
    def parse(cls, body: bytes) -> "ChangesRequest":
        """Parse a request body. Raises OptionInvalid, which lists every problem."""
        try:
            request = cls.model_validate_json(body, strict=True)
        except ValidationError as problem:
            problems = "; ".join(_describe_problems(problem))
            raise OptionInvalid(
                f"the body of the request cannot be used: {problems}", hint=_HINT
            ) from problem
        patterns = [
            *(request.tables or ()),
            *(request.exclude or ()),
            *(request.shards or _NO_SHARDS).columns,
        ]
        _prove_short(patterns)
        for pattern in patterns:
            _prove_quick(pattern)
        return request


_NO_SHARDS = ShardsPart(count=1, of=[0])


def _prove_short(patterns: list[str]) -> None:
    """Raise OptionInvalid if the table patterns of a request are too long in total."""
    size = sum(len(pattern.encode()) for pattern in patterns)
    if size > REQUEST_PATTERNS_BYTES_MAX:
        raise OptionInvalid(
            f"the table patterns of the request have {size} bytes together, and"
            f" {REQUEST_PATTERNS_BYTES_MAX} is the most",
            hint="Use wildcards, shop.*, or several requests",
        )


def _prove_quick(pattern: str) -> None:
    """Raise OptionInvalid for a table pattern that may be slow to match: other clients share the daemon."""
    if pattern.startswith("/"):
        plain = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", pattern)
        repeats = len(re.findall(r"[*+]|(?<!\()\?|\{\d*,\d*\}", plain))
        choices = plain.count("(") if "|" in plain else 0
        slow = max(repeats, choices) > _REPEATS_MAX or re.search(r"\)[*+{]", plain) is not None
    else:
        plain = re.sub(r"`(?:[^`]|``)+`", "x", pattern)
        slow = any(part.count("*") > _REPEATS_MAX for part in plain.split("."))
    if slow:
        raise OptionInvalid(
            f"table pattern {pattern} may take very long to try",
            hint=f"Repeat and choose at most {_REPEATS_MAX} times in it, and repeat no group",
        )


def start_of(value: StartPart | str) -> Start:
    """Return the start described by a request part, or by "earliest" or "latest"."""
    if isinstance(value, StartPart):
        return value.start()
    return Start(edge="earliest" if value == "earliest" else "latest")


def _time_us(value: str | int) -> int:
    if isinstance(value, int):
        if abs(value) > _TIME_US_MAX:
            raise OptionInvalid(
                f"time {str(value)[:64]} is none of these ages", hint="Write microseconds since 1970"
            )
        return value
    try:
        timestamp = datetime.fromisoformat(value.strip())
    except ValueError as problem:
        raise OptionInvalid(
            f"{value!r} is no time", hint="Write 2026-11-21T08:00:00Z, or microseconds since 1970"
        ) from problem
    timestamp = timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)
    elapsed = timestamp - datetime(1970, 1, 1, tzinfo=UTC)
    return (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds


def _describe_problems(problem: ValidationError) -> Iterator[str]:
    """Describe each problem once, replacing pydantic's wording. For an unknown name, suggest the closest
    known name.
    """
    seen = set()
    for error in problem.errors(include_url=False, include_input=False):
        # For unions, pydantic includes the branch names, which mean nothing to a reader of JSON.
        path = [str(step) for step in error["loc"] if not _is_branch(str(step))]
        if error["type"] == "extra_forbidden":
            known = _names_at(path[:-1])
            matches = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
            description = (
                f"unknown; did you mean {matches[0]}?" if matches else f"unknown; known: {', '.join(known)}"
            )
        else:
            description = str(error["msg"]).removeprefix("Value error, ")
            description = description[:1].lower() + description[1:]
        text = f"{'.'.join(path)}: {description}" if path else description
        if text not in seen:
            seen.add(text)
            yield text


def _is_branch(step: str) -> bool:
    return "[" in step or step == StartPart.__name__


def _names_at(path: list[str]) -> list[str]:
    model: Any = ChangesRequest
    for step in path:
        model_field = model.model_fields.get(step)
        model = _part_in(model_field.annotation) if model_field is not None else None
        if model is None:
            return []
    return sorted(model.model_fields)


def _part_in(annotation: Any) -> Any:
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else [annotation]
    return next(
        (choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)), None
    )
