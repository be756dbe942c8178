# SPDX-License-Identifier: Apache-2.0
"""The backends of coordination: one file for each, found by name, which is the URL scheme."""

import pkgutil


def backend_names() -> tuple[str, ...]:
    """Return the names of the available backends, without importing them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
