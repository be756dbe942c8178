# SPDX-License-Identifier: Apache-2.0
"""Opens object stores by URL."""

from typing import Any

from penstock.errors import DependencyMissing, OptionInvalid


def open_store(url: str, hint: str) -> tuple[Any, str]:
    """Return the file system of a URL and the root folder in it, without a trailing slash.

    Raises OptionInvalid with `hint` for an unknown URL scheme, and DependencyMissing if fsspec or its package
    for the scheme is not installed.
    """
    try:
        import fsspec
    except ImportError as problem:
        raise DependencyMissing(
            "fsspec is not installed, which reaches object stores", hint="pip install 'penstock[tier]'"
        ) from problem
    kind = url.split("://")[0]
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as problem:
        # fsspec's package for this scheme is not installed. The error of fsspec names the package.
        raise DependencyMissing(
            f"a URL of the kind {kind!r} needs another package: {problem}", hint="pip install it"
        ) from problem
    except ValueError as problem:
        raise OptionInvalid(f"the URL's kind {kind!r} is not known", hint=hint) from problem
    return files, str(root).rstrip("/")
