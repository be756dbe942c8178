# SPDX-License-Identifier: Apache-2.0
"""What statements leave to the server that runs them."""

from dataclasses import dataclass

from penstock.schema.statements.tokens import ServerSpelling


@dataclass(frozen=True)
class ServerDefaults:
    """What a statement leaves to the server: spelling, charsets, whether table names fold to lower case."""

    spelling: ServerSpelling
    charset: str | None
    database_charsets: dict[str, str]
    folds_names: bool
