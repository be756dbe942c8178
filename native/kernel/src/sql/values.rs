//! Writes rows as MySQL's SQL: lists of values, or conditions that match the rows.

use arrow_array::RecordBatch;

use super::cell::{Cell, Cells};
use super::{find_cells, numbers, Piece};
use crate::column::{client_text, write_integer};
use crate::error::Result;

/// The text around the values of a row.
#[derive(Debug, Clone)]
pub struct Frame {
    /// The text before each value: one for each column.
    pub before: Vec<String>,
    /// The text after the last value.
    pub after: String,
    /// The text between two rows.
    pub between: String,
}

impl Frame {
    /// Returns the frame for lists of values such as `(a,b),(c,d)`.
    pub fn values(columns: usize) -> Frame {
        let before = (0..columns).map(|index| if index == 0 { "(" } else { "," }.to_owned()).collect();
        Frame { before, after: ")".to_owned(), between: ",".to_owned() }
    }
}

/// Writes the rows in pieces of at most `rows_max` rows. Pieces have at most `bytes_max` bytes, unless a single row is
/// longer. Texts are UTF-8. The session that parses the rows must use an SQL mode in which backslashes are escape
/// characters.
///
/// Raises `OptionInvalid` if a column is missing from the batch.
pub fn pieces(
    batch: &RecordBatch,
    columns: &[String],
    frame: &Frame,
    bytes_max: usize,
    rows_max: usize,
) -> Result<Vec<Piece>> {
    let cells = find_cells(batch, columns)?;
    let mut pieces = Vec::new();
    let mut piece = Piece { rows: 0, text: Vec::new() };
    for row in 0..batch.num_rows() {
        let end = piece.text.len();
        if piece.rows > 0 {
            piece.text.extend_from_slice(frame.between.as_bytes());
        }
        let start = piece.text.len();
        write_row(&cells, frame, row, &mut piece.text);
        if piece.rows > 0 && (piece.text.len() > bytes_max || piece.rows >= rows_max) {
            let next = piece.text.get(start..).unwrap_or_default().to_vec();
            piece.text.truncate(end);
            pieces.push(std::mem::replace(&mut piece, Piece { rows: 0, text: next }));
        }
        piece.rows += 1;
    }
    if piece.rows > 0 {
        pieces.push(piece);
    }
    Ok(pieces)
}

fn write_row(cells: &[Cells<'_>], frame: &Frame, row: usize, out: &mut Vec<u8>) {
    for (cells, before) in cells.iter().zip(&frame.before) {
        out.extend_from_slice(before.as_bytes());
        write(cells.get(row), out);
    }
    out.extend_from_slice(frame.after.as_bytes());
}

#[inline]
fn write(cell: Cell<'_>, out: &mut Vec<u8>) {
    match cell {
        Cell::Null => out.extend_from_slice(b"NULL"),
        Cell::Unrepresentable(text) => write_unrepresentable(text, out),
        Cell::Int(value) => write_integer(value, out),
        Cell::Decimal(value, scale) => numbers::decimal(value, scale, out),
        Cell::Single(value) => numbers::single(value, out),
        Cell::Double(value) => numbers::double(value, out),
        Cell::Date(days) => within_quotes(out, |out| client_text::date(days, out)),
        Cell::Span(micros) => within_quotes(out, |out| client_text::time(micros, out)),
        Cell::Timestamp(micros, _) => within_quotes(out, |out| client_text::datetime(micros, out)),
        Cell::Text(text) => write_quoted(text.as_bytes(), out),
        Cell::Bytes(bytes) => {
            out.extend_from_slice(b"_binary");
            write_quoted(bytes, out);
        }
        Cell::Vector(values) => {
            out.extend_from_slice(b"_binary");
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            write_quoted(&bytes, out);
        }
    }
}

/// Bytes that are invalid in their character set become a hexadecimal literal. Dates and timestamps become text.
#[cold]
fn write_unrepresentable(text: &str, out: &mut Vec<u8>) {
    match text.strip_prefix("0x") {
        Some(digits) if digits.bytes().all(|digit| digit.is_ascii_hexdigit()) => out.extend_from_slice(text.as_bytes()),
        _ => write_quoted(text.as_bytes(), out),
    }
}

fn within_quotes(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    out.push(b'\'');
    write(out);
    out.push(b'\'');
}

#[inline]
fn write_quoted(bytes: &[u8], out: &mut Vec<u8>) {
    out.push(b'\'');
    let mut rest = bytes;
    while let Some(index) = rest.iter().position(|byte| matches!(byte, b'\'' | b'\\' | 0)) {
        let (plain, from) = rest.split_at_checked(index).unwrap_or((rest, &[]));
        out.extend_from_slice(plain);
        let Some((byte, after)) = from.split_first() else { break };
        out.push(b'\\');
        out.push(if *byte == 0 { b'0' } else { *byte });
        rest = after;
    }
    out.extend_from_slice(rest);
    out.push(b'\'');
}
