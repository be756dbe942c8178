# SPDX-License-Identifier: Apache-2.0
"""Converts table filters of other systems into Penstock table patterns that select the same tables."""

import re

from penstock.errors import OptionInvalid
from penstock.model import TablePatterns

_EVERYTHING = (".*\\..*", ".*", "[^.]*\\.[^.]*")


def split_expressions(text: str) -> list[str]:
    """Split expressions at commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [part.strip() for part in [*parts, current] if part.strip()]


def pattern_of(expression: str, name: str, *, ignore_case: bool = True) -> str:
    """Return the pattern of a regular expression over the whole `database.table`.

    Raises OptionInvalid if the expression means something else in Penstock than in Java; `name` is the
    property that contains the expression.
    """
    slashed = expression.replace("\\/", "/").replace("/", "\\/")
    pattern = f"/{'(?i)' if ignore_case else ''}{slashed}/"
    try:
        TablePatterns([pattern])
    except OptionInvalid as problem:
        raise OptionInvalid(
            f"{name}: {expression!r} is not an expression that Penstock reads: {problem.message}",
            hint=f"Write {name} without constructs of Java's own, and migrate again",
        ) from problem
    return pattern


def name_expression(regex: str, name: str, *, is_anchored: bool = False) -> str:
    """Return an expression for the database or table names that a regex matches. By default, the regex may
    match any part of a name.

    With `is_anchored`, the original puts `^` and `$` around the regex without a group, so that each anchor
    applies to one alternative only. Raises OptionInvalid if the anchors cannot be translated; `name` is the
    property that contains the regex.
    """
    if "|" in regex and (is_anchored or re.search(r"[\^$](?![^\[]*\])", regex)):
        raise OptionInvalid(
            f"{name}: /{regex}/ has alternatives with anchors of their own",
            hint="Write one rule for each alternative, and migrate again",
        )
    begin, end = regex.startswith("^"), regex.endswith("$") and not regex.endswith("\\$")
    regex = regex[1:] if begin else regex
    regex = regex[:-1] if end else regex
    # A dot stands for any character of this name, but never for the dot between the database and the table.
    inside = re.sub(
        r"\\.|\[(?:\\.|[^\]])*\]|\.", lambda token: "[^.]" if token[0] == "." else token[0], regex
    )
    before, after = ("" if anchored or is_anchored else "[^.]*" for anchored in (begin, end))
    return f"{before}(?:{inside}){after}"


def patterns_of(text: str, name: str) -> list[str]:
    """Return the patterns of a comma-separated list that selects tables; none if it selects all."""
    expressions = split_expressions(text)
    if any(expression in _EVERYTHING for expression in expressions):
        return []
    return [pattern_of(expression, name) for expression in expressions]


def both(first: str, second: str) -> str:
    """Return an expression for the names that match both of these expressions as a whole."""
    return f"(?=(?:{first})\\Z)(?:{second})"


def literal(name: str) -> str:
    """Return the pattern part of a literal database or table name."""
    return name if re.fullmatch(r"[0-9A-Za-z_$]+", name) else "`" + name.replace("`", "``") + "`"
