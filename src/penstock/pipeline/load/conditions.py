# SPDX-License-Identifier: Apache-2.0
"""Checks the condition of a request to read some rows of a table again, by having the server parse it."""

from penstock.errors import SourceMissing
from penstock.model import TableName, TablePatterns
from penstock.pipeline.load.session import check_condition, open_session
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.verify.source_rows import address_of


def prove_condition(settings: PipelineSettings, source: str, table: TableName, where: str) -> None:
    """Have the server of a source parse a condition on a table.

    Raises SourceMissing if the table does not exist, OptionInvalid for a condition that the server refuses,
    and propagates errors from `connect`.
    """
    address = address_of(settings.source(source))
    with open_session(address) as session:
        for target in targets_of(address, TablePatterns([table.sql])):
            check_condition(session, target, where)
            return
    raise SourceMissing(f"the source {source} has no table {table}")
