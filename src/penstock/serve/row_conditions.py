# SPDX-License-Identifier: Apache-2.0
"""The rows that an account may see, by `where` of the account in penstock.yaml.

This filter can only be applied to typed changes. An account with a filter may therefore not use any other
call that shows rows, statements or raw bytes: see `Account.prove_reads_every_row`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow

from penstock.errors import AccessDenied, OptionInvalid, ServerUnsupported
from penstock.model import TableName, TablePatterns
from penstock.predicate import Predicate
from penstock.serve.masking import in_any_case, matches_in_any_case
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
    # Who sees the rows, and the setting to correct, in errors.
    reader: str = "this account sees"
    setting: str = "where of the account, access in penstock.yaml"

    @classmethod
    def of_settings(
        cls, where: Mapping[str, str], *, reader: str | None = None, setting: str | None = None
    ) -> "RowConditions":
        """Return the conditions of a setting that maps table patterns to conditions. Raises OptionInvalid."""
        rules = tuple((in_any_case(pattern), Predicate.compile(text)) for pattern, text in where.items())
        return cls(rules, tuple(where), reader or cls.reader, setting or cls.setting)

    def __bool__(self) -> bool:
        return bool(self.rules)

    def permit_rows(self, table: TableName, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return the visible rows of a table. An update with only one visible image becomes a delete or an
        insert. `rows` have all columns of the table, and both images of each update.

        Raises AccessDenied if a condition cannot be evaluated for every row.
        """
        if not rows.num_rows:
            return rows
        preimages = preimages_of(rows)
        visible = self.visible(table, rows, preimages)
        if visible is None:
            return rows
        (updates,) = preimages.nonzero()
        divided = updates[visible[updates] != visible[updates + 1]]
        # Only the visible image gets another change type; the hidden image is dropped.
        leaves = visible[divided]
        kinds = ["delete" if is_leaving else "insert" for is_leaving in leaves]
        if kinds:
            rows = with_kinds(rows, divided + ~leaves, kinds)
        return rows if visible.all() else rows.filter(pyarrow.array(visible))

    def apply_to(self, table: TableName) -> bool:
        """Return whether the rows of a table have conditions."""
        return any(matches_in_any_case(tables, table) for tables, _ in self.rules)

    def columns_of(self, table: TableName) -> frozenset[str]:
        """Return the columns that the conditions of a table read, in lower case."""
        predicates = [predicate for tables, predicate in self.rules if matches_in_any_case(tables, table)]
        return frozenset(name.casefold() for predicate in predicates for name in predicate.columns)

    def visible(self, table: TableName, rows: pyarrow.RecordBatch, preimages: Mask) -> Mask | None:
        """Return a mask of the visible row images of a table, None without a condition.

        `rows` have both images of each update. Raises AccessDenied if a condition cannot be evaluated for
        every row.
        """
        visible: Mask | None = None
        for tables, predicate in self.rules:
            if matches_in_any_case(tables, table):
                visible = both(visible, _passing(self, predicate, table, rows, preimages))
        return visible


EVERY_ROW = RowConditions()


def _passing(
    conditions: RowConditions,
    predicate: Predicate,
    table: TableName,
    rows: pyarrow.RecordBatch,
    preimages: Mask,
) -> Mask:
    """Return a mask of the rows that pass a condition. Raises AccessDenied.

    Texts of errors about values are left out, because they may quote a hidden row.
    """
    names = rows.schema.names
    assert _METADATA in names, "the metadata names the columns that an image lacks"
    folded_names = {name.casefold() for name in names}
    missing = sorted(name for name in predicate.columns if name.casefold() not in folded_names)
    if missing:
        raise AccessDenied(
            f"the rows of {table} that {conditions.reader} depend on column {missing[0]}, which the table"
            " does not have here",
            hint=f"It may have had another name: correct {conditions.setting}",
        )
    try:
        filled = fill_absent(rows, sorted(predicate.reads(rows.schema)), str(table), preimages)
        return predicate.passes(filled)
    except ServerUnsupported:
        raise AccessDenied(
            f"the rows of {table} that {conditions.reader} depend on {', '.join(sorted(predicate.columns))},"
            " which a row image lacks",
            hint="Set binlog_row_image=FULL on the source",
        ) from None
    except OptionInvalid:
        raise AccessDenied(
            f"the condition for the rows of {table} that {conditions.reader} cannot be evaluated with the"
            f" types of {', '.join(sorted(predicate.columns)) or 'its columns'}",
            hint=f"Correct {conditions.setting}",
        ) from None
