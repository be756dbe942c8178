//! Writes Arrow rows as text for databases: MySQL literals, and lines for PostgreSQL's COPY.

mod cell;
pub mod copy;
mod fold;
pub mod groups;
mod numbers;
pub mod values;

use arrow_array::RecordBatch;
use cell::Cells;

use crate::error::Result;

/// Consecutive rows as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Number of rows.
    pub rows: usize,
    /// The text of the rows.
    pub text: Vec<u8>,
}

/// Finds the columns of a batch by name.
fn find_cells<'a>(batch: &'a RecordBatch, columns: &[String]) -> Result<Vec<Cells<'a>>> {
    columns.iter().map(|name| Cells::find(batch, name)).collect()
}
