# SPDX-License-Identifier: Apache-2.0
"""Object stores by their URL: the only file that knows fsspec."""

from typing import Any

from penstock.errors import DependencyMissing, OptionInvalid


def open_store(url: str, hint: str) -> tuple[Any, str]:
    """Return the store of a URL, and the folder in it that the URL names, without a slash at its end.

    `hint` says what to write where the URL's kind is not known: then OptionInvalid is raised. Raises
    DependencyMissing where fsspec, or the package for this kind of URL, is not installed.
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
        # The URL's own package is missing; its name is in what fsspec says.
        raise DependencyMissing(
            f"a URL of the kind {kind!r} needs another package: {problem}", hint="pip install it"
        ) from problem
    except ValueError as problem:
        raise OptionInvalid(f"the URL's kind {kind!r} is not known", hint=hint) from problem
    return files, str(root).rstrip("/")
