# SPDX-License-Identifier: Apache-2.0
"""Server settings that determine the defaults for values that a statement leaves out."""

from dataclasses import dataclass

from penstock.schema.statements.tokens import ServerSpelling


@dataclass(frozen=True)
class ServerDefaults:
    """A server's defaults for statements: its spelling and charsets, and whether it folds table names to
    lower case.
    """

    spelling: ServerSpelling
    charset: str | None
    database_charsets: dict[str, str]
    folds_names: bool
