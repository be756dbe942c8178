# SPDX-License-Identifier: Apache-2.0
"""Where coordination is kept: one file for each backend, found by name, which is the scheme of its URLs."""

import pkgutil


def backend_names() -> tuple[str, ...]:
    """Return the names of the available backends, without importing them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
