# SPDX-License-Identifier: Apache-2.0
"""Asks for confirmation of a change at the terminal."""

import sys

from penstock.errors import OptionInvalid


def check_confirmation(*, yes: bool) -> None:
    """Raise OptionInvalid if a change needs a confirmation but there is no terminal to ask on."""
    if not yes and not sys.stdin.isatty():
        raise OptionInvalid(
            "confirmation is required, but there is no terminal to ask",
            hint="Check with --dry-run first, then add --yes",
        )
