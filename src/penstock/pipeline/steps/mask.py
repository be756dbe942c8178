# SPDX-License-Identifier: Apache-2.0
"""`mask`: hide sensitive values from the target.

- mask: {columns: {email: hash, phone: {last: 4}, note: redact}, key_env: MASK_KEY}

`hash` writes the HMAC-SHA256 of the value as text, in hexadecimal. Equal values stay equal in every table,
and without the key nobody can guess values by trial. If no key is set, `hash` writes a plain SHA-256.
`redact` replaces text with stars and other values with null. `null` writes null. `first` and `last` keep that
many characters.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow
import pyarrow.compute as compute
from pydantic import BeforeValidator, Field, model_validator

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import Column
from penstock.pipeline.row_metadata import exact_texts, rename_metadata
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import StepSection, resolve_column
from penstock.settings.values import SecretEnv, SecretText, Section, one_secret

VERB = "mask"

_TEXT = re.compile(r"(?:national )?(?:var)?char|(?:tiny|medium|long)?text", re.IGNORECASE)
_LENGTH = re.compile(r"\((\d+)\)")
_STARS = "***"


def _expand_shorthand(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return {"how": value or "null"}
    return value


class MaskSection(Section):
    """How the values of one column are masked."""

    how: Literal["hash", "redact", "null", "part"] = "part"
    first: int = Field(default=0, ge=0, description="how many leading characters to keep")
    last: int = Field(default=0, ge=0, description="how many trailing characters to keep")

    @model_validator(mode="after")
    def _check_arguments(self) -> "MaskSection":
        if self.how == "part" and not (self.first or self.last):
            raise ValueError("write hash, redact, null, or how many characters stay: {last: 4}")
        if self.how != "part" and (self.first or self.last):
            raise ValueError(f"first and last do not go with {self.how}")
        return self


class Settings(StepSection):
    """Which columns are masked, and how."""

    columns: dict[str, Annotated[MaskSection, BeforeValidator(_expand_shorthand)]] = Field(
        min_length=1, description="column to one of hash, redact, null, or {first: n, last: n}"
    )
    if_present: bool = Field(
        default=False, description="true: ignore columns that a table does not have; false: stop the table"
    )
    key: SecretText | None = Field(default=None, description="the HMAC key for hash")
    key_file: Path | None = None
    key_env: SecretEnv = Field(default=None, validate_default=True)


class MaskStep(Step):
    """Masks values, including the exact text stored for values that a type cannot represent."""

    verb = VERB

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # Read the key now, because a remote process may not have the file or the variable.
        self._key = one_secret(settings.key, settings.key_file, settings.key_env, "key")

    def target(self, target: Target) -> Target | None:
        if not self.settings.applies_to(target):
            return target
        masks = self._masks(target)
        for name, mask in masks.items():
            self._refuse_misfit(target, name, mask)
        unhashed = {name for name, mask in masks.items() if mask.how != "hash"}
        return replace(
            target,
            columns=tuple(
                _masked_column(column, masks[column.name]) if column.name in masks else column
                for column in target.columns
            ),
            # Redacted or truncated values are no longer unique.
            unique_keys=tuple(key for key in target.unique_keys if not unhashed & set(key)),
        )

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        target = self.target(changes.target)
        assert target is not None, "rows of every table pass"
        if target is changes.target:
            return [changes]
        rows, schema = changes.rows, target.arrow()
        masks = self._masks(changes.target)
        for name, mask in masks.items():
            index = rows.schema.get_field_index(name)
            values = self._values(changes.rows, name, mask, target.column(name))
            rows = rows.set_column(index, schema.field(name), values.cast(schema.field(name).type))
        # The exact text of an unrepresentable value is stored in `_metadata` and would reveal the value.
        unmasked = {name: [name] for name in changes.target.column_names if name not in masks}
        return [replace(changes, target=target, rows=_drop_exact_texts(rows, masks, unmasked))]

    def _masks(self, target: Target) -> dict[str, MaskSection]:
        known = target.column_names
        spelt = {name.casefold() for name in known}
        return {
            resolve_column(name, known, VERB, target.name): mask
            for name, mask in self.settings.columns.items()
            if not self.settings.if_present or name.casefold() in spelt
        }

    def _refuse_misfit(self, target: Target, name: str, mask: MaskSection) -> None:
        if mask.how != "hash" and name in target.primary_key:
            raise OptionInvalid(
                f"mask: {name!r} is of the primary key of {target.name}: its rows would fall together",
                hint=f"Write {name}: hash, which keeps equal values equal and others apart",
            )
        if mask.how == "part" and not _TEXT.match(target.column(name).type_text):
            raise OptionInvalid(
                f"mask: {name!r} of {target.name} is {target.column(name).type_text}, no text",
                hint=f"Write {name}: hash, redact or null",
            )

    def _values(
        self, rows: pyarrow.RecordBatch, name: str, mask: MaskSection, column: Column
    ) -> pyarrow.Array:
        values = rows.column(name)
        if mask.how == "hash":
            return self._hash_texts(_texts(rows, name))
        if mask.how == "null" or not _TEXT.match(column.type_text):
            return pyarrow.nulls(len(values), values.type)
        if mask.how == "redact":
            length = _LENGTH.search(column.type_text)
            stars = pyarrow.scalar(_STARS[: int(length.group(1))] if length else _STARS)
            present = compute.or_(values.is_valid(), _texts(rows, name).is_valid())
            return compute.if_else(present, stars, pyarrow.scalar(None, pyarrow.string()))
        return _star_middle(values, mask.first, mask.last)

    def _hash_texts(self, texts: pyarrow.Array) -> pyarrow.Array:
        """Return the hash of each text. Each distinct text is hashed once."""
        encoded = texts.dictionary_encode()
        digest = self._digest()
        hashes = [digest(text).hex() for text in encoded.dictionary.cast(pyarrow.binary()).to_pylist()]
        return pyarrow.array(hashes, pyarrow.string()).take(encoded.indices)

    def _digest(self) -> Callable[[bytes], bytes]:
        if self._key is None:
            return lambda text: hashlib.sha256(text).digest()
        key = self._key.reveal().encode()
        return lambda text: hmac.digest(key, text, "sha256")


make = MaskStep


def _masked_column(column: Column, mask: MaskSection) -> Column:
    """Return the definition of a masked column."""
    if mask.how == "hash":
        return Column(column.name, "char(64)", "ascii", column.nullable)
    starred = mask.how in ("redact", "part") and _TEXT.match(column.type_text)
    return column if starred else replace(column, nullable=True)


def _texts(rows: pyarrow.RecordBatch, name: str) -> pyarrow.Array:
    """Return a column as text, or as bytes if it is binary, with exact texts of unrepresentable values."""
    values = rows.column(name)
    kind = values.type
    if pyarrow.types.is_nested(kind):
        # Arrow cannot cast lists to text. Vectors are rare, so Python formats them.
        values = pyarrow.array(
            [None if vector is None else repr(vector) for vector in values.to_pylist()], pyarrow.string()
        )
    elif pyarrow.types.is_duration(kind):
        values = values.cast(pyarrow.int64()).cast(pyarrow.string())
    elif pyarrow.types.is_binary(kind):
        exact = exact_texts(rows, name)
        return values if exact is None else compute.coalesce(values, exact.cast(pyarrow.binary()))
    elif not pyarrow.types.is_string(kind):
        values = values.cast(pyarrow.string())
    exact = exact_texts(rows, name)
    return values if exact is None else compute.coalesce(values, exact)


def _star_middle(values: pyarrow.Array, first: int, last: int) -> pyarrow.Array:
    """Return texts with stars between the first and last characters.

    A text with no characters in between becomes all stars.
    """
    length = compute.utf8_length(values)
    hidden = compute.subtract(length, first + last)
    short = compute.less_equal(hidden, 0)
    front = compute.utf8_slice_codeunits(values, 0, first)
    back = (
        compute.utf8_slice_codeunits(values, -last)
        if last
        else pyarrow.repeat(pyarrow.scalar(""), len(values))
    )
    middle = compute.binary_repeat("*", compute.max_element_wise(hidden, 0, skip_nulls=False))
    whole = compute.binary_join_element_wise(front, middle, back, "")
    return compute.if_else(short, compute.binary_repeat("*", length), whole)


def _drop_exact_texts(
    rows: pyarrow.RecordBatch, masks: dict[str, MaskSection], names: dict[str, list[str]]
) -> pyarrow.RecordBatch:
    """Return rows whose `_metadata` holds no exact texts of masked columns."""
    exact_of_masked = any(exact_texts(rows, name) is not None for name in masks)
    return rename_metadata(rows, names, keep_absent=True) if exact_of_masked else rows
