//! Rows of Arrow as text that a database reads: literals of MySQL's SQL, and lines of PostgreSQL's COPY.

mod cell;
pub mod copy;
mod fold;
pub mod groups;
mod spelled;
pub mod values;

use arrow_array::RecordBatch;
use cell::Cells;

use crate::error::Result;

/// A run of rows as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// How many rows it has.
    pub rows: usize,
    /// Their text.
    pub text: Vec<u8>,
}

/// The columns of a batch by name.
fn cells_of<'a>(batch: &'a RecordBatch, columns: &[String]) -> Result<Vec<Cells<'a>>> {
    columns.iter().map(|name| Cells::of(batch, name)).collect()
}
