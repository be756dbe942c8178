# SPDX-License-Identifier: Apache-2.0
"""The SQL dialect of a source's log. MariaDB and MySQL interpret some of the same syntax differently."""

from penstock._native import Decoder
from penstock.schema.statements.tokens import ServerSpelling
from penstock.source.source import Source, file_number


def spelling_of(source: Source) -> ServerSpelling:
    """Return the server's SQL dialect, according to its format description. Raises SourceMissing."""
    file = source.earliest().file
    head = source.head_bytes(file)
    decoder = Decoder(
        instance="", file=file, file_number=file_number(file), offset=len(head), head=head, aligned=True
    )
    return ServerSpelling(mariadb=decoder.mariadb)
