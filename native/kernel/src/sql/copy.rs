//! Rows as lines of PostgreSQL's COPY, in its text format.

use arrow_array::RecordBatch;

use super::cell::{Cell, Cells};
use super::{cells_of, spelled, Piece};
use crate::column::{client_text, write_integer};
use crate::error::Result;

/// The rows as lines, cut into pieces of about `bytes_max` bytes, and for each column how many values were written as
/// null because PostgreSQL has none such: texts with a zero byte, and what Arrow's type could not hold either.
///
/// Raises `OptionInvalid` for a column that the batch lacks.
pub fn pieces(batch: &RecordBatch, columns: &[String], bytes_max: usize) -> Result<(Vec<Piece>, Vec<usize>)> {
    let cells = cells_of(batch, columns)?;
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
    for (place, (cells, lost)) in cells.iter().zip(lost).enumerate() {
        if place > 0 {
            out.push(b'\t');
        }
        if !write(cells.at(row), out) {
            *lost += 1;
            out.extend_from_slice(b"\\N");
        }
    }
    out.push(b'\n');
}

/// Adds a value; false where PostgreSQL has none such, and nothing was added.
#[inline]
fn write(cell: Cell<'_>, out: &mut Vec<u8>) -> bool {
    match cell {
        Cell::Null => out.extend_from_slice(b"\\N"),
        Cell::Spare(_) => return false,
        Cell::Int(value) => write_integer(value, out),
        Cell::Decimal(value, scale) => spelled::decimal(value, scale, out),
        Cell::Single(value) => spelled::single(value, out),
        Cell::Double(value) => spelled::double(value, out),
        Cell::Date(days) => return dated(out, |out| client_text::date(days, out)),
        Cell::Span(micros) => client_text::time(micros, out),
        Cell::Moment(micros, utc) => {
            if !dated(out, |out| client_text::datetime(micros, out)) {
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
            for (place, value) in values.iter().enumerate() {
                if place > 0 {
                    out.push(b',');
                }
                spelled::single(*value, out);
            }
            out.push(b'}');
        }
    }
    true
}

/// Adds a day; PostgreSQL knows no year 0.
fn dated(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) -> bool {
    let start = out.len();
    write(out);
    let known = !out.get(start..).unwrap_or_default().starts_with(b"0000");
    if !known {
        out.truncate(start);
    }
    known
}

fn write_text(bytes: &[u8], out: &mut Vec<u8>) -> bool {
    let start = out.len();
    let mut rest = bytes;
    while let Some(place) = rest.iter().position(|byte| matches!(byte, b'\\' | b'\t' | b'\n' | b'\r' | 0)) {
        let (plain, from) = rest.split_at_checked(place).unwrap_or((rest, &[]));
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
