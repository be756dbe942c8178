# SPDX-License-Identifier: Apache-2.0
"""Where sinks write, according to their settings: two sinks of a pipeline must not write to the same
target.
"""

import os.path

from penstock.settings.values import Section

_ENDPOINTS = ("url", "path", "servers", "catalog")
# The settings that name what is written at an endpoint. For each sink, only the first of these settings that
# the sink declares is compared.
_NAMINGS = ("topic", "index", "namespace", "database", "key")


def may_share_target(first: Section, second: Section) -> bool:
    """Return whether two sinks of a kind may write to the same table, topic, index or key.

    They cannot if their endpoints differ, or if the names that they produce start differently. Two paths
    count as the same endpoint if one contains the other.
    """
    if not _share_endpoint(_endpoints(first), _endpoints(second)):
        return False
    naming = next((naming for naming in _NAMINGS if naming in type(first).model_fields), None)
    if naming is None:
        return True
    (start, is_whole), (other, other_is_whole) = _start(first, naming), _start(second, naming)
    if is_whole and other_is_whole:
        return start == other
    if is_whole or other_is_whole:
        return start.startswith(other) if is_whole else other.startswith(start)
    return start.startswith(other) or other.startswith(start)


def _endpoints(settings: Section) -> set[str]:
    """Return the addresses of a sink, each in a canonical spelling. Standard output has none."""
    endpoints = set[str]()
    for name in _ENDPOINTS:
        value = getattr(settings, name, None)
        if name == "servers" and value is not None:
            endpoints |= {server.strip().casefold() for server in value.split(",")}
        elif name == "path" and value is not None and "://" not in value:
            endpoints.add(f"{os.path.abspath(value)}/")
        elif name == "catalog" and value:
            endpoints.add(str(sorted(value.items())))
        elif value:
            endpoints.add(f"{value.rstrip('/').casefold()}/")
    return endpoints


def _share_endpoint(first: set[str], second: set[str]) -> bool:
    if not first or not second:
        return first == second
    return any(
        address.startswith(other) or other.startswith(address) for address in first for other in second
    )


def _start(settings: Section, naming: str) -> tuple[str, bool]:
    """Return the text before the first placeholder of a naming template, and whether that is the whole
    template.
    """
    text = getattr(settings, naming)
    start, brace, _ = ("", "{", "") if text is None else str(text).partition("{")
    return start.casefold(), not brace
