# SPDX-License-Identifier: Apache-2.0
"""Converts rows to documents of Elasticsearch and OpenSearch, and back.

A document is a JSON object that begins with `_commit_version`, followed by the columns of the row. Its `_id`
is the primary key as text. If the key has several columns, their values are separated by colons; a colon in a
value is written as %3A and a percent sign as %25. An `_id` may not be empty: a single-column key that is the
empty string becomes %, and a key that consists only of percent signs gets one more percent sign. `_source` is
exact; the mapping determines how values are searched.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, ValueMalformed
from penstock.sinks.sink import typed
from penstock.sinks.template import column_texts

VERSION = "_commit_version"

# Names that the servers reserve.
_TAKEN = (
    "_id",
    "_index",
    "_source",
    "_routing",
    "_ignored",
    "_field_names",
    "_tier",
    "_size",
    "_seq_no",
    VERSION,
)
_KEYWORDS = ("enum", "set", "uuid", "inet4", "inet6", "time")
# A double represents numbers with this many digits exactly.
_DOUBLE_DIGITS = 15

_REQUEST_BYTES_MAX = 8 << 20
_NUMBER = re.compile(r"\((\d)\)")
_TIME = re.compile(r"(-?)(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?")


class Number(str):
    """A number as written in JSON, with all its digits."""


def check_columns(target: Target) -> None:
    """Raise OptionInvalid if a target's rows cannot be documents."""
    if not target.primary_key:
        raise OptionInvalid(
            f"{target.name} has no primary key that could be the _id of its documents",
            hint="Leave it out of this pipeline, or give it a key in the source",
        )
    taken = [name for name in target.column_names if name in _TAKEN]
    if taken:
        raise OptionInvalid(
            f"{target.name} has a column {taken[0]}, which the server keeps for itself",
            hint="Rename the column with a map step",
        )


def mapping(target: Target) -> dict[str, dict[str, Any]]:
    """Return the properties of a target's mapping, which determine how its values are searched."""
    properties = {field.name: _property(target, field) for field in target.arrow()}
    return {VERSION: {"type": "long"}, **properties}


def holds(existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether one property can index the values that belong to another property."""
    existing_type, wanted_type = existing.get("type", "object"), wanted["type"]
    if existing_type == wanted_type:
        return bool(existing_type != "date" or existing.get("format") == wanted["format"])
    numbers = ("byte", "short", "integer", "long", "float", "double", "scaled_float", "unsigned_long")
    if existing_type in ("keyword", "text", "wildcard", "match_only_text", "constant_keyword"):
        return bool(wanted_type != "object")
    return (
        wanted_type in numbers
        and existing_type in ("double", "scaled_float", "unsigned_long")
        and wanted_type != "keyword"
    )


def index_lines(changes: Changes, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the bodies of bulk requests that write rows, with the named columns."""
    target = changes.target
    objects = pyarrow.array(
        _native.json_objects(changes.rows, target.declared, mariadb=target.mariadb, names=list(names))
    )
    versions = _versions(changes)
    action = _action(changes, "index", versions)
    # After the version come the members of the row's JSON object, without its opening brace.
    members = pc.binary_replace_slice(objects.cast(pyarrow.binary()), 0, 1, b",").cast(pyarrow.string())
    return _bodies(pc.binary_join_element_wise(action, f'{{"{VERSION}":', versions, members, "\n", ""))


def delete_lines(changes: Changes) -> Iterator[bytes]:
    """Yield the bodies of bulk requests that delete rows."""
    return _bodies(_action(changes, "delete", _versions(changes)))


def rows_of_sources(target: Target, sources: Sequence[Mapping[str, Any]]) -> pyarrow.RecordBatch:
    """Return documents as rows of a target, null for missing members. Numbers must be `Number`."""
    schema = target.arrow()
    columns = []
    for field in schema:
        read = _reader(target, field)
        values = [source.get(field.name) for source in sources]
        with typed(target, field.name):
            columns.append(
                pyarrow.array([None if value is None else read(value) for value in values], field.type)
            )
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def _property(target: Target, field: pyarrow.Field) -> dict[str, Any]:
    types = pyarrow.types
    text = target.column(field.name).type_text.lower()
    if text.startswith(_KEYWORDS) and not types.is_timestamp(field.type):
        return {"type": "keyword"}
    if types.is_integer(field.type):
        return {"type": "long"}
    if types.is_floating(field.type):
        return {"type": "double"}
    if types.is_decimal(field.type):
        return {"type": "double"} if field.type.precision <= _DOUBLE_DIGITS else {"type": "keyword"}
    if types.is_date(field.type):
        return {"type": "date", "format": "uuuu-MM-dd"}
    if types.is_timestamp(field.type):
        digits = _NUMBER.search(text)
        fraction = "." + "S" * int(digits[1]) if digits and digits[1] != "0" else ""
        return {"type": "date", "format": f"uuuu-MM-dd HH:mm:ss{fraction}"}
    if types.is_list(field.type):
        return {"type": "float", "index": False}
    if types.is_binary(field.type):
        return (
            {"type": "keyword", "index": False, "doc_values": False}
            if _is_geometry(text)
            else {"type": "binary"}
        )
    if text.startswith("json") and not target.mariadb:
        # Documents may have any shape: members with the same name may have different types.
        return {"type": "object", "enabled": False}
    if text.startswith("decimal"):
        return {"type": "keyword"}
    return {"type": "text", "fields": {"keyword": {"type": "keyword", "ignore_above": 256}}}


def _is_geometry(text: str) -> bool:
    return not text.startswith(("binary", "varbinary", "blob", "tinyblob", "mediumblob", "longblob"))


def _versions(changes: Changes) -> pyarrow.Array:
    return changes.rows.column(VERSION).cast(pyarrow.string())


def _action(changes: Changes, verb: str, versions: pyarrow.Array) -> pyarrow.Array:
    head = f'{{"{verb}":{{"_id":'
    return pc.binary_join_element_wise(
        head, _ids(changes), ',"version":', versions, ',"version_type":"external_gte"}}\n', ""
    )


def _ids(changes: Changes) -> pyarrow.Array:
    """Return the ids as JSON."""
    key = changes.target.primary_key
    parts = [column_texts(changes, name) for name in key]
    if len(parts) > 1:
        for text, escape in (("%", "%25"), (":", "%3A")):
            parts = [pc.replace_substring(part, text, escape) for part in parts]
    else:
        parts = [pc.replace_substring_regex(parts[0], "\\A(%*)\\z", "\\1%")]
    texts = pc.binary_join_element_wise(*parts, ":")
    if texts.null_count:
        raise ValueMalformed(
            f"a key of {changes.target.name} has no value that its columns could hold",
            hint="Make a text of it with a map step, or set errors: {table: skip_table}",
        )
    encoded = _native.json_objects(pyarrow.record_batch({"i": texts}), [("i", "longtext", "utf8mb4", True)])
    quoted = pc.binary_slice(pyarrow.array(encoded).cast(pyarrow.binary()), len('{"i":'), -1)
    return quoted.cast(pyarrow.string())


def _bodies(lines: pyarrow.Array) -> Iterator[bytes]:
    """Yield request bodies: lines joined up to the size limit of a request."""
    ends = numpy.frombuffer(lines.buffers()[1], numpy.int32)[lines.offset : lines.offset + len(lines) + 1]
    first = 0
    while first < len(lines):
        fits = int(numpy.searchsorted(ends, ends[first] + _REQUEST_BYTES_MAX, "right")) - 1
        last = max(fits, first + 1)
        # Leave out the last line's newline, because the client adds it.
        yield bytes(lines.buffers()[2][int(ends[first]) : int(ends[last]) - 1])
        first = last


def _reader(target: Target, field: pyarrow.Field) -> Callable[[Any], Any]:
    """Return a function that converts a document's value to a column's value."""
    types = pyarrow.types
    text = target.column(field.name).type_text.lower()
    if types.is_integer(field.type):
        return int
    if types.is_floating(field.type):
        return float
    if types.is_decimal(field.type):
        return Decimal
    if types.is_list(field.type):
        return lambda values: [float(component) for component in values]
    if types.is_binary(field.type):
        if _is_geometry(text):
            raise OptionInvalid(
                f"column {field.name} of {target.name} is text in its documents and cannot be read back",
                hint=f"Compare the other columns: penstock verify FILE --leave-out {field.name}",
            )
        return base64.b64decode
    if types.is_duration(field.type):
        return _span
    if types.is_timestamp(field.type) or types.is_date(field.type):
        scalar = pyarrow.timestamp("us") if types.is_timestamp(field.type) else field.type
        return lambda value: pyarrow.scalar(value).cast(scalar).as_py()
    if text.startswith("json") and not target.mariadb:
        return document_text
    return str


def _span(value: str) -> int:
    """Return the microseconds of a TIME."""
    match = _TIME.fullmatch(value)
    assert match is not None, value
    seconds = (int(match[2]) * 60 + int(match[3])) * 60 + int(match[4])
    micros = seconds * 1_000_000 + int((match[5] or "").ljust(6, "0"))
    return -micros if match[1] else micros


def document_text(value: Any) -> str:
    """Return a document as MySQL prints it."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{json.dumps(name, ensure_ascii=False)}: {document_text(member)}"
                for name, member in value.items()
            )
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(document_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
