# SPDX-License-Identifier: Apache-2.0
"""Converts Canal's topic and partition rules into routes. A route contains the tables that match the same
topic rule and the same partition rule.

Rules are separated by commas or semicolons, and the first rule that matches a table applies
(github.com/alibaba/canal/wiki/Canal-Kafka-RocketMQ-QuickStart). A rule without a dot matches all tables of a
database.
"""

import re
from dataclasses import dataclass
from typing import Any

from penstock.migrate.table_filters import both, split_expressions

_META = re.compile(r"[*?+|(){}\[\]\\^$]")
_PRIMARY_KEY = "$pk$"


@dataclass(frozen=True)
class _Rule:
    """A rule's settings, and the tables that it applies to: an expression, None for all tables."""

    expression: str | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class Route:
    """The tables that one pair of rules selects, and the settings of their sink.

    `tables` is an expression, or None for all tables. Tables that match an `earlier` expression belong to
    other routes.
    """

    tables: str | None
    earlier: tuple[str, ...]
    settings: dict[str, Any]


def routes_of(topic: str, dynamic_topic: str, partition_hash: str) -> list[Route]:
    """Return the routes of an instance. Together they cover each table once, if there is a default topic."""
    topics = _topic_rules(topic, dynamic_topic)
    hashes = _hash_rules(partition_hash)
    routes = []
    for topic_index, topic_rule in enumerate(topics):
        for hash_index, hash_rule in enumerate(hashes):
            own = [rule.expression for rule in (topic_rule, hash_rule) if rule.expression is not None]
            earlier = (*topics[:topic_index], *hashes[:hash_index])
            routes.append(
                Route(
                    tables=both(*own) if len(own) == 2 else own[0] if own else None,
                    earlier=tuple(str(rule.expression) for rule in earlier),
                    settings={**topic_rule.settings, **hash_rule.settings},
                )
            )
    return routes


def _topic_rules(topic: str, text: str) -> list[_Rule]:
    rules = []
    for rule in _split(text):
        fixed, colon, expression = rule.rpartition(":")
        whole, of_table = _expression(expression)
        name = "{database}_{table}" if of_table else "{database}"
        rules.append(_Rule(whole, {"topic": _without_dots(fixed) if colon else name}))
    # Canal replaces the dots of every topic, but only if it has rules.
    if not rules:
        return [_Rule(None, {"topic": _literal(topic)})]
    # Without a default topic, Canal drops tables that no rule matches.
    return rules + ([_Rule(None, {"topic": _without_dots(topic)})] if topic else [])


def _hash_rules(text: str) -> list[_Rule]:
    rules = []
    for rule in _split(text):
        expression, colon, columns = rule.partition(":")
        whole, _ = _expression(expression)
        if not colon:
            settings: dict[str, Any] = {"key": "none", "order": "table"}
        elif columns.strip() == _PRIMARY_KEY:
            settings = {"key": "primary_key"}
        else:
            names = [name.strip() for name in columns.split("^") if name.strip()]
            settings = {"key": "none", "partition_by": names}
        rules.append(_Rule(whole, settings))
    everything = any(rule.expression == ".*\\..*" for rule in rules)
    return rules + ([] if everything else [_Rule(None, {"key": "none", "order": "commit"})])


def _split(text: str) -> list[str]:
    return [rule.strip() for part in split_expressions(text) for rule in part.split(";") if rule.strip()]


def _expression(text: str) -> tuple[str, bool]:
    """Return an expression over `database.table`, and whether the original rule names a table."""
    text = text.strip()
    if _META.search(text):
        return (text, True) if "\\." in text else (f"(?:{text})\\..*", False)
    return (re.escape(text), True) if "." in text else (f"{re.escape(text)}\\..*", False)


def _literal(topic: str) -> str:
    return topic.strip().replace("{", "{{").replace("}", "}}")


def _without_dots(topic: str) -> str:
    return _literal(topic).replace(".", "_")
