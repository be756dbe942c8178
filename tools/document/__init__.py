# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/reference, each generated from the code or the measurements that define its facts.

`PAGES` maps a page's file name to the function that returns its text. `python -m tools.document` writes them.
A test fails if a page on disk differs.
"""

from collections.abc import Callable

from tools.document import cli, costs, errors, limits, metrics, options, pipelines, python, sink_types, types

PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli.page,
    "costs.md": costs.page,
    "errors.md": errors.page,
    "limits.md": limits.page,
    "metrics.md": metrics.page,
    "options.md": options.page,
    "pipelines.md": pipelines.page,
    "python.md": python.page,
    "sink_types.md": sink_types.page,
    "types.md": types.page,
}

__all__ = ["PAGES"]
