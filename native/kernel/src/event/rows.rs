//! Row images: the columns that they hold, and where each image ends.
//!
//! ```text
//! table id │ flags │ (extra header) │ count │ columns present │ (present after) │ images...
//! image:  null bits of the present columns │ values
//! ```

use crate::column::Kind;
use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::{Change, EventKind};

/// The head of a rows event, as views of the body.
#[derive(Debug, Clone, Copy)]
pub struct RowsHead<'a> {
    /// The id that the table map assigned to the table.
    pub table_id: u64,
    /// Number of columns of the table.
    pub width: usize,
    /// One bit for each column: whether the first image holds the column.
    pub present: &'a [u8],
    /// One bit for each column: whether the second image of an update holds the column. A copy of `present` for other
    /// events.
    pub present_after: &'a [u8],
    /// The images, compressed if the event type says so.
    pub images: &'a [u8],
}

/// The table id of an event that only ends a statement and names no table.
pub const TABLE_ID_NONE: u64 = 0x00ff_ffff;

impl<'a> RowsHead<'a> {
    /// Reads the head from a body without checksum (`Rows_event`).
    #[inline]
    pub fn read(body: &'a [u8], kind: EventKind, table_id_bytes: usize) -> Result<RowsHead<'a>> {
        let mut cursor = Cursor::new(body);
        let table_id = cursor.uint(table_id_bytes)?;
        cursor.skip(2)?;
        if kind.has_extra_header() {
            let bytes = usize::from(cursor.u16()?);
            cursor.skip(bytes.checked_sub(2).ok_or_else(|| malformed("an extra row header under two bytes"))?)?;
        }
        let width = usize::try_from(cursor.length_encoded()?).map_err(|_| malformed("a rows event's width"))?;
        let present = cursor.take(width.div_ceil(8))?;
        let present_after = match kind.change() {
            Some(Change::Update) => cursor.take(width.div_ceil(8))?,
            _ => present,
        };
        Ok(RowsHead { table_id, width, present, present_after, images: cursor.take_rest() })
    }
}

/// Whether bit `index` is set, counting from the lowest bit of the first byte.
#[inline(always)]
pub fn bit(bits: &[u8], index: usize) -> bool {
    bits.get(index / 8).is_some_and(|byte| byte >> (index % 8) & 1 == 1)
}

/// Counts the set bits among the first `width` bits.
#[inline]
pub fn count(bits: &[u8], width: usize) -> usize {
    let whole: usize = bits.iter().take(width / 8).map(|byte| byte.count_ones() as usize).sum();
    let rest = width % 8;
    let last = bits.get(width / 8).copied().unwrap_or(0) & ((1u16 << rest) - 1) as u8;
    whole + last.count_ones() as usize
}

/// The prefix of an after-image that may hold partial JSON updates (PARTIAL_UPDATE_ROWS).
#[derive(Debug, Clone, Copy)]
pub struct PartialHead<'a> {
    /// One bit for each JSON column of the table: whether the value is a partial update. Empty if no value is a partial
    /// update.
    pub partial: &'a [u8],
}

impl<'a> PartialHead<'a> {
    /// Reads the value options of an after-image; `json_columns` is the number of JSON columns of the table.
    pub fn read(cursor: &mut Cursor<'a>, json_columns: usize) -> Result<PartialHead<'a>> {
        const PARTIAL_JSON: u64 = 1;
        let options = cursor.length_encoded()?;
        if options & PARTIAL_JSON == 0 {
            return Ok(PartialHead { partial: &[] });
        }
        Ok(PartialHead { partial: cursor.take(json_columns.div_ceil(8))? })
    }
}

/// Skips one image. A partial JSON update has the same length prefix as a whole value, so it needs no special case.
#[inline]
pub fn skip_image(cursor: &mut Cursor<'_>, kinds: &[Kind], present: &[u8], partial_json: Option<usize>) -> Result<()> {
    if let Some(json_columns) = partial_json {
        PartialHead::read(cursor, json_columns)?;
    }
    let nulls = cursor.take(count(present, kinds.len()).div_ceil(8))?;
    let mut null_index = 0;
    for (index, kind) in kinds.iter().enumerate() {
        if !bit(present, index) {
            continue;
        }
        if !bit(nulls, null_index) {
            kind.skip(cursor)?;
        }
        null_index += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_after_the_width_are_not_counted() {
        assert_eq!(count(&[0xff, 0xff], 10), 10);
        assert_eq!(count(&[0b101], 3), 2);
        assert_eq!(count(&[], 0), 0);
        assert!(bit(&[0, 1], 8) && !bit(&[0, 1], 9) && !bit(&[], 3));
    }
}
