# SPDX-License-Identifier: Apache-2.0
"""The rows that an account may see, by `where` of the account in penstock.yaml.

This filter can only be applied to typed changes. An account with a filter may therefore not use any other
call that shows rows, statements or raw bytes: see `Account.prove_reads_every_row`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow

from penstock.errors import AccessDenied, OptionInvalid, ServerUnsupported
from penstock.model import TableName, TablePatterns
from penstock.predicate import Predicate
from penstock.serve.masking import in_any_case, matches_in_any_case
from penstock.serve.pieces import Piece
from penstock.source.rows_filter import Mask, both
from penstock.source.sharding import fill_absent, preimages_of, with_kinds

_METADATA = "_metadata"


@dataclass(frozen=True)
class RowConditions:
    """The row conditions of an account, by table pattern.

    A row image is visible if it satisfies the conditions of all patterns that match its table. If no pattern
    matches, all rows of the table are visible. The case of table names is ignored, because a server may fold
    names.
    """

    rules: tuple[tuple[TablePatterns, Predicate], ...] = ()
    patterns: tuple[str, ...] = ()

    @classmethod
    def of_settings(cls, where: Mapping[str, str]) -> "RowConditions":
        """Return the conditions of the setting `where`, which maps table patterns to conditions. Raises
        OptionInvalid.
        """
        rules = tuple((in_any_case(pattern), Predicate.compile(text)) for pattern, text in where.items())
        return cls(rules, tuple(where))

    def __bool__(self) -> bool:
        return bool(self.rules)

    def permit(self, piece: Piece) -> Piece:
        """Return a piece of typed rows with the visible rows only. Raises AccessDenied if a condition cannot
        be evaluated.

        The returned piece has its own cache for derived results, so that results computed from all rows and
        from visible rows are never mixed.
        """
        permitted = [
            (batch, rows)
            for batch, arrow in zip(piece.batches, piece.arrow(), strict=True)
            if (rows := self.permit_rows(TableName.parse(batch.table), arrow)).num_rows
        ]
        arrow = tuple(rows for _, rows in permitted)
        return replace(piece, batches=tuple(batch for batch, _ in permitted), derived={"arrow": arrow})

    def permit_rows(self, table: TableName, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return the visible rows of a table. An update with only one visible image becomes a delete or an
        insert. `rows` have all columns of the table, and both images of each update.

        Raises AccessDenied if a condition cannot be evaluated for every row.
        """
        predicates = [predicate for tables, predicate in self.rules if matches_in_any_case(tables, table)]
        if not predicates or not rows.num_rows:
            return rows
        preimages = preimages_of(rows)
        visible: Mask | None = None
        for predicate in predicates:
            visible = both(visible, _passing(predicate, table, rows, preimages))
        assert visible is not None, "there is a predicate"
        (updates,) = preimages.nonzero()
        divided = updates[visible[updates] != visible[updates + 1]]
        # Only the visible image gets another change type; the hidden image is dropped.
        leaves = visible[divided]
        kinds = ["delete" if is_leaving else "insert" for is_leaving in leaves]
        if kinds:
            rows = with_kinds(rows, divided + ~leaves, kinds)
        return rows if visible.all() else rows.filter(pyarrow.array(visible))


EVERY_ROW = RowConditions()


def _passing(predicate: Predicate, table: TableName, rows: pyarrow.RecordBatch, preimages: Mask) -> Mask:
    """Return a mask of the rows that pass a condition. Raises AccessDenied.

    Texts of errors about values are left out, because they may quote a hidden row.
    """
    names = rows.schema.names
    assert _METADATA in names, "the metadata names the columns that an image lacks"
    folded_names = {name.casefold() for name in names}
    missing = sorted(name for name in predicate.columns if name.casefold() not in folded_names)
    if missing:
        raise AccessDenied(
            f"the rows of {table} that this account sees depend on column {missing[0]}, which the table does"
            " not have here",
            hint="It may have had another name: correct where of the account, access in penstock.yaml",
        )
    try:
        filled = fill_absent(rows, sorted(predicate.reads(rows.schema)), str(table), preimages)
        return predicate.passes(filled)
    except ServerUnsupported:
        raise AccessDenied(
            f"the rows of {table} that this account sees depend on {', '.join(sorted(predicate.columns))},"
            " which a row image lacks",
            hint="Set binlog_row_image=FULL on the source",
        ) from None
    except OptionInvalid:
        raise AccessDenied(
            f"the condition for the rows of {table} that this account sees cannot be evaluated with the types"
            f" of {', '.join(sorted(predicate.columns)) or 'its columns'}",
            hint="Correct where of the account: access in penstock.yaml",
        ) from None
