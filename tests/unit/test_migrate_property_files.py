# SPDX-License-Identifier: Apache-2.0
"""Java's property files, and the placeholders in their values."""

import pytest

from penstock.migrate.property_files import parse_properties, resolve


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1\nb: 2\nc 3\nd", {"a": "1", "b": "2", "c": "3", "d": ""}),
        ("# no\n! no\n\n  a = 1 ", {"a": "1 "}),
        ("a = one,\\\n    two\nb=1", {"a": "one,two", "b": "1"}),
        ("a=x\\\\\nb=1", {"a": "x\\", "b": "1"}),
        ("a=.*\\\\..*", {"a": ".*\\..*"}),
        ("a\\ b\\=c=\\u00e9\\t\\q", {"a b=c": "é\tq"}),
        ("a=1\na=2", {"a": "2"}),
        ("a==1", {"a": "=1"}),
        ("a=last\\", {"a": "last"}),
    ],
)
def test_properties_are_read_as_java_reads_them(text: str, values: dict[str, str]) -> None:
    assert parse_properties(text) == values


def test_placeholders_are_replaced() -> None:
    values = {"a": "${b}/x", "b": "y"}
    assert resolve("${a}", values, {}) == "y/x"
    assert resolve("${a}", values, {"b": "z"}) == "z/x"
    assert resolve("${none:default}", values, {}) == "default"
    assert resolve("${none}", values, {}) == "${none}"


def test_placeholder_that_names_itself_ends() -> None:
    assert resolve("${a}", {"a": "${a}"}, {}) == "${a}"
