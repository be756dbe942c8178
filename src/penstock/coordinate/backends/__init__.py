# SPDX-License-Identifier: Apache-2.0
"""The coordination backends, one file for each. The name of a backend is the scheme of its URLs."""

import pkgutil


def backend_names() -> tuple[str, ...]:
    """Return the names of the available backends, without importing them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
