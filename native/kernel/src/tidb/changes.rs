//! The rows of a transaction: `PrewriteValue` and its `TableMutation`s.
//!
//! Rows are read in place, so a transaction of 2 GiB needs no additional memory.

use super::protobuf::{next, Field};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::Change;

/// Iterates over a field of a message. It stores positions, so that it does not borrow the message.
#[derive(Debug, Clone, Copy, Default)]
pub struct FieldCursor {
    at: usize,
}

impl FieldCursor {
    /// Where the next field starts.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Returns the next value of the field `number`; None after the last.
    #[inline]
    pub fn next<'a>(&mut self, message: &'a [u8], number: u64) -> Result<Option<Field<'a>>> {
        let mut cursor = Cursor::new(message.get(self.at..).unwrap_or_default());
        loop {
            let field = next(&mut cursor)?;
            self.at = message.len() - cursor.remaining();
            match field {
                None => return Ok(None),
                Some((found, field)) if found == number => return Ok(Some(field)),
                Some(_) => {}
            }
        }
    }
}

/// Field numbers of `PrewriteValue`.
mod prewrite {
    pub const SCHEMA_VERSION: u64 = 1;
    pub const MUTATIONS: u64 = 2;
}

/// Field numbers of `TableMutation`.
mod mutation {
    pub const TABLE_ID: u64 = 1;
    pub const INSERTED_ROWS: u64 = 2;
    pub const UPDATED_ROWS: u64 = 3;
    pub const DELETED_IDS: u64 = 4;
    pub const DELETED_PKS: u64 = 5;
    pub const DELETED_ROWS: u64 = 6;
    pub const SEQUENCE: u64 = 7;
}

/// Returns the schema version under which a transaction wrote its rows.
pub fn schema_version(prewrite_value: &[u8]) -> Result<i64> {
    match FieldCursor::default().next(prewrite_value, prewrite::SCHEMA_VERSION)? {
        Some(field) => field.signed(),
        None => Ok(0),
    }
}

/// Returns the changes of the next table in a `PrewriteValue`.
pub fn next_mutation<'a>(prewrite_value: &'a [u8], cursor: &mut FieldCursor) -> Result<Option<&'a [u8]>> {
    cursor.next(prewrite_value, prewrite::MUTATIONS)?.map(Field::bytes).transpose()
}

/// Returns the number of the table that a `TableMutation` changes.
pub fn table_id(message: &[u8]) -> Result<i64> {
    FieldCursor::default().next(message, mutation::TABLE_ID)?.map_or(Ok(0), Field::signed)
}

/// Iterates over the rows of a `TableMutation` in the order of their changes.
#[derive(Debug, Clone, Default)]
pub struct RowCursor {
    sequence: FieldCursor,
    /// Start and end of a packed sequence's remaining part in the message.
    packed: (usize, usize),
    inserted: FieldCursor,
    updated: FieldCursor,
    deleted: FieldCursor,
}

impl RowCursor {
    /// Returns the next change and its row, or `None` after the last.
    ///
    /// Raises `EventMalformed` if the sequence of changes and the rows disagree, `EventUnsupported` for changes without
    /// their rows, as TiDB before 2.0 sent them.
    pub fn next<'a>(&mut self, message: &'a [u8]) -> Result<Option<(Change, &'a [u8])>> {
        let Some(number) = self.next_number(message)? else {
            self.prove_end(message)?;
            return Ok(None);
        };
        let (change, cursor, field) = match number {
            0 => (Change::Insert, &mut self.inserted, mutation::INSERTED_ROWS),
            1 => (Change::Update, &mut self.updated, mutation::UPDATED_ROWS),
            4 => (Change::Delete, &mut self.deleted, mutation::DELETED_ROWS),
            2 | 3 => return Err(without_rows()),
            _ => return Err(malformed(format!("a change of kind {number} in a TiDB payload"))),
        };
        match cursor.next(message, field)? {
            Some(row) => Ok(Some((change, row.bytes()?))),
            None => Err(malformed("a TiDB payload has fewer rows than its sequence names")),
        }
    }

    /// Each number of a sequence is in a separate field, or all are packed.
    fn next_number(&mut self, message: &[u8]) -> Result<Option<u64>> {
        loop {
            let (start, end) = self.packed;
            if start < end {
                let mut cursor = Cursor::new(message.get(start..end).unwrap_or_default());
                let number = super::protobuf::varint(&mut cursor)?;
                self.packed.0 = end - cursor.remaining();
                return Ok(Some(number));
            }
            match self.sequence.next(message, mutation::SEQUENCE)? {
                None => return Ok(None),
                Some(Field::Bytes(bytes)) => self.packed = (self.sequence.at - bytes.len(), self.sequence.at),
                Some(field) => return field.number().map(Some),
            }
        }
    }

    /// Fails if rows remain at the end of the sequence.
    fn prove_end(&mut self, message: &[u8]) -> Result<()> {
        let left = self.inserted.next(message, mutation::INSERTED_ROWS)?.is_some()
            || self.updated.next(message, mutation::UPDATED_ROWS)?.is_some()
            || self.deleted.next(message, mutation::DELETED_ROWS)?.is_some();
        if left {
            return Err(malformed("a TiDB payload has more rows than its sequence names"));
        }
        for field in [mutation::DELETED_IDS, mutation::DELETED_PKS] {
            if FieldCursor::default().next(message, field)?.is_some() {
                return Err(without_rows());
            }
        }
        Ok(())
    }
}

#[cold]
fn without_rows() -> Error {
    Error::new(ErrorKind::EventUnsupported, "a TiDB payload deletes rows without their values")
        .hint("only TiDB before 2.0 sends such payloads")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows are inserted, one is updated, and one is deleted.
    const ROWS: &[u8] = b"\x08\x56\x12\x01a\x12\x01b\x1a\x01c\x32\x01d";

    fn changes(sequence: &[u8]) -> Result<Vec<(Change, Vec<u8>)>> {
        let message = [ROWS, sequence].concat();
        assert_eq!(table_id(&message), Ok(86));
        let mut cursor = RowCursor::default();
        let mut changes = Vec::new();
        while let Some((change, row)) = cursor.next(&message)? {
            changes.push((change, row.to_vec()));
        }
        Ok(changes)
    }

    #[test]
    fn rows_come_in_the_order_of_the_sequence() {
        let expected = [
            (Change::Insert, b"a".to_vec()),
            (Change::Delete, b"d".to_vec()),
            (Change::Update, b"c".to_vec()),
            (Change::Insert, b"b".to_vec()),
        ];
        assert_eq!(changes(b"\x38\0\x38\x04\x38\x01\x38\0").unwrap(), expected);
        assert_eq!(changes(b"\x3a\x04\0\x04\x01\0").unwrap(), expected, "packed");
        assert_eq!(changes(b"\x38\0\x3a\x02\x04\x01\x38\0").unwrap(), expected, "in parts");
    }

    #[test]
    fn a_sequence_that_does_not_match_its_rows_is_refused() {
        for sequence in [&b""[..], b"\x38\0", b"\x3a\x05\0\x04\x01\0\0", b"\x3a\x04\0\x04\x01\x05", b"\x3a\x01\x02"] {
            assert!(changes(sequence).is_err(), "{sequence:02x?}");
        }
        assert!(changes(b"\x22\x01\x07\x3a\x04\0\x04\x01\0").is_err(), "deleted ids");
    }

    #[test]
    fn schema_version_and_tables_are_found_in_any_order() {
        let value = b"\x12\x02\x08\x56\x08\x2b\x12\x02\x08\x57";
        assert_eq!(schema_version(value), Ok(43));
        let mut cursor = FieldCursor::default();
        assert_eq!(next_mutation(value, &mut cursor).unwrap().map(table_id), Some(Ok(86)));
        assert_eq!(next_mutation(value, &mut cursor).unwrap().map(table_id), Some(Ok(87)));
        assert_eq!(next_mutation(value, &mut cursor).unwrap(), None);
    }
}
