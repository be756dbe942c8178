//! Encodes rows in the text format of PostgreSQL's COPY.

use arrow_array::RecordBatch;

use super::cell::{Cell, Cells};
use super::{find_cells, numbers, Piece};
use crate::column::{client_text, write_integer};
use crate::error::Result;

/// Encodes the rows as lines, in pieces of about `bytes_max` bytes. Also returns, for each column, how many values
/// were written as null because PostgreSQL cannot store them: texts with a zero byte, and values that the Arrow type
/// cannot represent.
///
/// Raises `OptionInvalid` if a column is missing from the batch.
pub fn pieces(batch: &RecordBatch, columns: &[String], bytes_max: usize) -> Result<(Vec<Piece>, Vec<usize>)> {
    let cells = find_cells(batch, columns)?;
    let mut lost = vec![0; cells.len()];
    let mut pieces = Vec::new();
    let mut piece = Piece { rows: 0, text: Vec::new() };
    for row in 0..batch.num_rows() {
        write_row(&cells, row, &mut piece.text, &mut lost);
        piece.rows += 1;
        if piece.text.len() >= bytes_max {
            pieces.push(std::mem::replace(&mut piece, Piece { rows: 0, text: Vec::with_capacity(bytes_max) }));
        }
    }
    if piece.rows > 0 {
        pieces.push(piece);
    }
    Ok((pieces, lost))
}

fn write_row(cells: &[Cells<'_>], row: usize, out: &mut Vec<u8>, lost: &mut [usize]) {
    for (index, (cells, lost)) in cells.iter().zip(lost).enumerate() {
        if index > 0 {
            out.push(b'\t');
        }
        if !write(cells.get(row), out) {
            *lost += 1;
            out.extend_from_slice(b"\\N");
        }
    }
    out.push(b'\n');
}

/// Writes a value. Returns false and writes nothing if PostgreSQL cannot store it.
#[inline]
fn write(cell: Cell<'_>, out: &mut Vec<u8>) -> bool {
    match cell {
        Cell::Null => out.extend_from_slice(b"\\N"),
        Cell::Unrepresentable(_) => return false,
        Cell::Int(value) => write_integer(value, out),
        Cell::Decimal(value, scale) => numbers::decimal(value, scale, out),
        Cell::Single(value) => numbers::single(value, out),
        Cell::Double(value) => numbers::double(value, out),
        Cell::Date(days) => return write_with_year(out, |out| client_text::date(days, out)),
        Cell::Span(micros) => client_text::time(micros, out),
        Cell::Timestamp(micros, utc) => {
            if !write_with_year(out, |out| client_text::datetime(micros, out)) {
                return false;
            }
            if utc {
                out.extend_from_slice(b"+00");
            }
        }
        Cell::Text(text) => return write_text(text.as_bytes(), out),
        Cell::Bytes(bytes) => {
            out.extend_from_slice(b"\\\\x");
            for byte in bytes {
                out.extend(
                    [byte >> 4, byte & 15].map(|nibble| if nibble < 10 { b'0' + nibble } else { b'W' + nibble }),
                );
            }
        }
        Cell::Vector(values) => {
            out.push(b'{');
            for (index, value) in values.iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                numbers::single(*value, out);
            }
            out.push(b'}');
        }
    }
    true
}

/// Writes a date or timestamp. Returns false for the year 0, which PostgreSQL cannot represent.
fn write_with_year(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) -> bool {
    let start = out.len();
    write(out);
    let is_valid = !out.get(start..).unwrap_or_default().starts_with(b"0000");
    if !is_valid {
        out.truncate(start);
    }
    is_valid
}

fn write_text(bytes: &[u8], out: &mut Vec<u8>) -> bool {
    let start = out.len();
    let mut rest = bytes;
    while let Some(index) = rest.iter().position(|byte| matches!(byte, b'\\' | b'\t' | b'\n' | b'\r' | 0)) {
        let (plain, from) = rest.split_at_checked(index).unwrap_or((rest, &[]));
        out.extend_from_slice(plain);
        let Some((byte, after)) = from.split_first() else { break };
        out.push(b'\\');
        out.push(match byte {
            b'\t' => b't',
            b'\n' => b'n',
            b'\r' => b'r',
            0 => {
                out.truncate(start);
                return false;
            }
            byte => *byte,
        });
        rest = after;
    }
    out.extend_from_slice(rest);
    true
}
