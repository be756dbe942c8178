# SPDX-License-Identifier: Apache-2.0
"""Whose statements a source's log holds: MariaDB and MySQL mean different things by the same words."""

from penstock._native import Decoder
from penstock.capture.ddl.tokens import ServerSpelling
from penstock.source.source import Source, file_number


def spelling_of(source: Source) -> ServerSpelling:
    """Return how the server spells its statements, as its format description tells. Raises SourceMissing."""
    file = source.earliest().file
    head = source.head_bytes(file)
    decoder = Decoder(
        instance="", file=file, file_number=file_number(file), offset=len(head), head=head, aligned=True
    )
    return ServerSpelling(mariadb=decoder.mariadb)
