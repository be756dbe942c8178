//! Rows of a payload as row images.
//!
//! An inserted row consists of its handle and of pairs of column number and value; the columns of the handle may be
//! missing from the pairs. An updated row consists of the old row's pairs, followed by the new row's pairs. A deleted
//! row consists of its pairs. For a table without a primary key, a further pair with the number -1 contains the row id.

use super::column::Missing;
use super::datum::Datum;
use super::table::{Handle, TidbTable};
use super::value;
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::write::transaction::image;

/// The values of a row by column; None for a column that the row lacks.
type Cells<'a> = Vec<Option<Datum<'a>>>;

/// How to interpret a column that a row lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lacks {
    /// An inserted row: TiDB omits NULLs and defaults.
    Default,
    /// An updated or deleted row. It has every column up to this number; later columns have their defaults.
    DefaultAfter(i64),
}

/// Appends the image of an inserted row.
pub fn write_inserted(table: &TidbTable, row: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let mut cursor = Cursor::new(row);
    let mut cells: Cells<'_> = vec![None; table.columns.len()];
    match &table.handle {
        Handle::RowId => {
            Datum::read(&mut cursor)?;
        }
        Handle::Integer(column) => set(&mut cells, *column, Datum::read(&mut cursor)?),
        Handle::Clustered(columns) => {
            for column in columns {
                let datum = Datum::read(&mut cursor)?;
                if let Some(column) = column {
                    set(&mut cells, *column, datum);
                }
            }
        }
    }
    let mut pairs = Pairs { cursor, next: 0 };
    while let Some((column, datum)) = pairs.next(table)? {
        if let Some(column) = column {
            // If the handle has only a prefix or a collation's sort key, the row has the whole value.
            set(&mut cells, column, datum);
        }
    }
    write_cells(table, &cells, Lacks::Default, out)
}

/// Appends the image of a deleted row. The row has every public column up to the number `complete_to`.
pub fn write_deleted(table: &TidbTable, complete_to: i64, row: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let mut cells: Cells<'_> = vec![None; table.columns.len()];
    let mut pairs = Pairs { cursor: Cursor::new(row), next: 0 };
    while let Some((column, datum)) = pairs.next(table)? {
        if let Some(column) = column {
            set(&mut cells, column, datum);
        }
    }
    write_cells(table, &cells, Lacks::DefaultAfter(complete_to), out)
}

/// Appends both images of an updated row.
///
/// Each image has every public column up to the number `complete_to`. In `row`, the old and the new row have the same
/// columns in the same order, so the first repeated column number begins the new row.
pub fn write_updated(table: &TidbTable, complete_to: i64, row: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let mut before: Cells<'_> = vec![None; table.columns.len()];
    let mut after = before.clone();
    let mut pairs = Pairs { cursor: Cursor::new(row), next: 0 };
    let (mut first, mut in_after) = (None, false);
    let mut counts = (0usize, 0usize);
    while !pairs.cursor.is_empty() {
        let id = column_id(Datum::read(&mut pairs.cursor)?)?;
        if !in_after && first == Some(id) {
            in_after = true;
            pairs.next = 0;
        }
        first = first.or(Some(id));
        let (cells, count) = if in_after { (&mut after, &mut counts.1) } else { (&mut before, &mut counts.0) };
        *count += 1;
        if let (Some(column), datum) = pairs.value(table, id)? {
            set(cells, column, datum);
        }
    }
    let same_columns = before.iter().zip(&after).all(|(before, after)| before.is_some() == after.is_some());
    if counts.0 != counts.1 || !same_columns {
        return Err(malformed(format!("an updated row of {} old and {} new values", counts.0, counts.1)));
    }
    write_cells(table, &before, Lacks::DefaultAfter(complete_to), out)?;
    write_cells(table, &after, Lacks::DefaultAfter(complete_to), out)
}

#[inline]
fn set<'a>(cells: &mut Cells<'a>, column: usize, datum: Datum<'a>) {
    if let Some(cell) = cells.get_mut(column) {
        *cell = Some(datum);
    }
}

fn column_id(datum: Datum<'_>) -> Result<i64> {
    match datum {
        Datum::Int(id) => Ok(id),
        other => Err(malformed(format!("{} where a column's number is due", other.name()))),
    }
}

/// Reads pairs of a column's number and its value.
struct Pairs<'a> {
    cursor: Cursor<'a>,
    /// The index of the next column in table order.
    next: usize,
}

impl<'a> Pairs<'a> {
    /// Returns the next value and the index of its column (None if the column is not written).
    #[inline]
    fn next(&mut self, table: &TidbTable) -> Result<Option<(Option<usize>, Datum<'a>)>> {
        if self.cursor.is_empty() {
            return Ok(None);
        }
        let number = Datum::read(&mut self.cursor)?;
        if number == Datum::Null && self.cursor.is_empty() {
            // A row without pairs is written as a single NULL.
            return Ok(None);
        }
        self.value(table, column_id(number)?).map(Some)
    }

    /// Returns the value of the column with the number `id`, and the column's index.
    #[inline]
    fn value(&mut self, table: &TidbTable, id: i64) -> Result<(Option<usize>, Datum<'a>)> {
        let column = table.column_of(id, self.next);
        let datum = Datum::read(&mut self.cursor)?;
        match column {
            Some(column) => self.next = column + 1,
            None if table.skips(id) => {}
            None => {
                let message = format!("a row has a column of number {id}, which its table does not have");
                return Err(mismatch(&message).within(&name(table)));
            }
        }
        Ok((column, datum))
    }
}

fn write_cells(table: &TidbTable, cells: &[Option<Datum<'_>>], lacks: Lacks, out: &mut Vec<u8>) -> Result<()> {
    image(cells.len(), out, |index, out| {
        let (Some(cell), Some(written)) = (cells.get(index), table.written.columns.get(index)) else { return Ok(true) };
        match cell {
            Some(datum) => value::write(&written.kind, *datum, out).map_err(|error| within(table, index, error)),
            None => write_missing(table, index, lacks, out),
        }
    })
}

/// Appends the value of a column that the row lacks. Returns whether the value is NULL.
fn write_missing(table: &TidbTable, index: usize, lacks: Lacks, out: &mut Vec<u8>) -> Result<bool> {
    let Some(column) = table.columns.get(index) else { return Ok(true) };
    if matches!(lacks, Lacks::DefaultAfter(complete_to) if column.id <= complete_to) {
        return Err(within(table, index, mismatch("an updated or deleted row lacks the column")));
    }
    match &column.missing {
        Missing::Default(default) => {
            out.extend_from_slice(default);
            Ok(false)
        }
        Missing::Null => Ok(true),
        Missing::Unreadable(error) => Err(within(table, index, error.clone())),
        Missing::Never => Err(within(table, index, mismatch("a row lacks the column, which has no default"))),
    }
}

#[cold]
fn mismatch(message: &str) -> Error {
    Error::new(ErrorKind::SchemaMismatch, message)
        .hint("the definition is not that of the row's schema version: begin a new log, and read the tables again")
}

#[cold]
fn within(table: &TidbTable, index: usize, error: Error) -> Error {
    let column = table.written.columns.get(index).map_or("", |column| &column.name);
    error.within(&format!("{}, column `{column}`", name(table)))
}

fn name(table: &TidbTable) -> String {
    format!("table `{}`.`{}`", table.written.database, table.written.table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::column::Kind;

    /// The largest number of a column in `table`.
    const LAST: i64 = 4;

    /// A table with an integer handle, a text with a default, a nullable integer, and a column that is not public.
    fn table() -> TidbTable {
        let json = r#"{"id": 8, "name": {"O": "t"}, "pk_is_handle": true, "cols": [
            {"id": 1, "name": {"O": "id"}, "offset": 0, "state": 5, "type": {"Tp": 8, "Flag": 35}},
            {"id": 2, "name": {"O": "v"}, "offset": 1, "state": 5, "origin_default": "d",
             "type": {"Tp": 15, "Flag": 1, "Flen": 5, "Charset": "utf8mb4"}},
            {"id": 4, "name": {"O": "n"}, "offset": 2, "state": 5, "type": {"Tp": 3, "Flag": 0}},
            {"id": 3, "name": {"O": "h"}, "offset": 3, "state": 1, "type": {"Tp": 3, "Flag": 0}}], "max_col_id": 4}"#;
        TidbTable::read("shop", &serde_json::from_str(json).unwrap()).unwrap()
    }

    /// Returns the values in the images that result from a row.
    fn shown(write: fn(&TidbTable, &[u8], &mut Vec<u8>) -> Result<()>, row: &[u8]) -> Result<Vec<String>> {
        shown_with(&table(), write, row)
    }

    fn shown_with(
        table: &TidbTable,
        write: impl Fn(&TidbTable, &[u8], &mut Vec<u8>) -> Result<()>,
        row: &[u8],
    ) -> Result<Vec<String>> {
        let mut images = Vec::new();
        write(table, row, &mut images)?;
        let mut cursor = Cursor::new(&images);
        let mut values = Vec::new();
        while !cursor.is_empty() {
            let nulls = cursor.u8()?;
            for (index, column) in table.written.columns.iter().enumerate() {
                let mut text = b"NULL".to_vec();
                if nulls >> index & 1 == 0 {
                    text.clear();
                    column.kind.read(&mut cursor)?.write_text(&column.kind, &mut text)?;
                }
                values.push(String::from_utf8(text).unwrap());
            }
        }
        assert!(matches!(table.written.columns.first().map(|column| &column.kind), Some(Kind::Integer { .. })));
        Ok(values)
    }

    #[test]
    fn columns_that_an_inserted_row_lacks_have_their_defaults() {
        assert_eq!(shown(write_inserted, b"\x08\x02\x00").unwrap(), ["1", "d", "NULL"], "no pair at all");
        assert_eq!(shown(write_inserted, b"\x08\x02").unwrap(), ["1", "d", "NULL"]);
        assert_eq!(shown(write_inserted, b"\x08\x02\x08\x08\x08\x0e").unwrap(), ["1", "d", "7"]);
        // An unsigned handle of 2^63 + 1, which TiDB stores as a negative number.
        let largest = b"\x08\xfd\xff\xff\xff\xff\xff\xff\xff\xff\x01\x08\x04\x02\x02x";
        assert_eq!(shown(write_inserted, largest).unwrap(), ["9223372036854775809", "x", "NULL"]);
    }

    #[test]
    fn values_of_columns_that_are_not_public_are_skipped() {
        let row = b"\x08\x02\x08\x06\x02\x02?\x08\x04\x02\x02x\x08\x0a\x09\x05";
        assert_eq!(shown(write_inserted, row).unwrap(), ["1", "x", "NULL"]);
    }

    #[test]
    fn values_of_columns_that_no_definition_has_are_refused() {
        let mut table = table();
        let row = b"\x08\x02\x08\x06\x02\x02?\x08\x04\x02\x02x";
        assert!(shown_with(&table, write_inserted, row).is_ok());
        table.unwritten.clear();
        let error = shown_with(&table, write_inserted, row).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SchemaMismatch);
        table.follow(&self::table());
        assert!(shown_with(&table, write_inserted, row).is_ok(), "the number of an earlier definition");
    }

    #[test]
    fn updated_and_deleted_rows_lack_only_columns_that_were_added_after_them() {
        let deleted = b"\x08\x02\x09\x07\x08\x04\x02\x02x";
        let updated = [&deleted[..], b"\x08\x02\x09\x07\x08\x04\x02\x02y"].concat();
        let table = table();
        for complete_to in [LAST, 2] {
            let rows = [
                shown_with(&table, |table, row, out| write_deleted(table, complete_to, row, out), deleted),
                shown_with(&table, |table, row, out| write_updated(table, complete_to, row, out), &updated),
            ];
            for values in rows {
                match values {
                    Ok(values) => assert_eq!((complete_to, values.first().unwrap().as_str()), (2, "7")),
                    Err(error) => assert_eq!((complete_to, error.kind()), (LAST, ErrorKind::SchemaMismatch)),
                }
            }
        }
    }

    #[test]
    fn hidden_row_ids_are_skipped() {
        let row = b"\x08\x02\x09\x07\x08\x04\x02\x02x\x08\x08\0\x08\x01\x08\x02";
        assert_eq!(shown(|table, row, out| write_deleted(table, LAST, row, out), row).unwrap(), ["7", "x", "NULL"]);
    }

    #[test]
    fn an_updated_row_is_two_rows_of_the_same_columns() {
        let row = b"\x08\x02\x09\x07\x08\x04\x02\x02x\x08\x08\0\x08\x02\x09\x07\x08\x04\x02\x02y\x08\x08\x08\x0e";
        assert_eq!(
            shown(|table, row, out| write_updated(table, LAST, row, out), row).unwrap(),
            ["7", "x", "NULL", "7", "y", "7"]
        );
        for damaged in [&row[..row.len() - 4], b"", b"\x08\x02\x09\x07", b"\x08\x02\0\x08\x04\0\x08\x02\0\x08\x08\0"] {
            assert!(shown(|table, row, out| write_updated(table, LAST, row, out), damaged).is_err(), "{damaged:02x?}");
        }
    }

    #[test]
    fn rows_that_end_inside_a_pair_are_refused() {
        for row in [
            &b""[..],
            b"\x00\x08",
            b"\x08\x02\x08",
            b"\x08\x02\x08\x04",
            b"\x08\x02\x02\x02x\x08\x02",
            b"\x08\x02\x00\x00",
        ] {
            assert!(shown(write_inserted, row).is_err(), "{row:02x?}");
        }
    }
}
