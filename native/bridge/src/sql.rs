//! Writes Arrow rows as text for databases.

use std::sync::Arc;

use penstock_kernel::sql::values::{self, Frame};
use penstock_kernel::sql::{copy, groups, Piece};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::array::ArrowArray;
use crate::convert::batch_from;
use crate::raise::{option_invalid, raise};

/// A piece: the number of rows, and their text.
type PieceTuple<'py> = (usize, Bound<'py, PyBytes>);

fn tuples<'py>(py: Python<'py>, pieces: Vec<Piece>) -> Vec<PieceTuple<'py>> {
    pieces.into_iter().map(|piece| (piece.rows, PyBytes::new(py, &piece.text))).collect()
}

/// Write the rows of a batch as MySQL literals, in pieces of bounded size: for each piece the number of rows and the
/// text.
///
/// A piece looks like `(1,'a'),(2,'b')`. `before` holds the text to write in front of each column's value; with it, a
/// piece can also be another list, such as a list of conditions. Values that their column cannot represent are written
/// with their text from `_metadata.unrepresentable`. Raises `OptionInvalid` for a column that is missing from the
/// batch.
#[pyfunction]
#[pyo3(signature = (
    batch, columns, *, before=None, behind=")", between=",", bytes_max=1_048_576, rows_max=1_048_576
))]
#[allow(clippy::too_many_arguments)]
pub fn sql_values<'py>(
    py: Python<'py>,
    batch: &Bound<'py, PyAny>,
    columns: Vec<String>,
    before: Option<Vec<String>>,
    behind: &str,
    between: &str,
    bytes_max: usize,
    rows_max: usize,
) -> PyResult<Vec<PieceTuple<'py>>> {
    let batch = batch_from(batch)?;
    let frame = match before {
        Some(before) if before.len() == columns.len() => {
            Frame { before, after: behind.to_owned(), between: between.to_owned() }
        }
        Some(_) => return Err(option_invalid(py, "`before` needs a text for each column".to_owned())),
        None => Frame::values(columns.len()),
    };
    let pieces = py.detach(|| values::pieces(&batch, &columns, &frame, bytes_max, rows_max));
    Ok(tuples(py, pieces.map_err(|error| raise(py, &error))?))
}

/// Write the rows of a batch in the text format of PostgreSQL's COPY, in pieces of about `bytes_max` bytes. Also
/// return for each column how many values were written as null because PostgreSQL cannot store them.
///
/// Raises `OptionInvalid` for a column that is missing from the batch.
#[pyfunction]
#[pyo3(signature = (batch, columns, *, bytes_max=1_048_576))]
pub fn copy_text<'py>(
    py: Python<'py>,
    batch: &Bound<'py, PyAny>,
    columns: Vec<String>,
    bytes_max: usize,
) -> PyResult<(Vec<PieceTuple<'py>>, Vec<usize>)> {
    let batch = batch_from(batch)?;
    let encoded = py.detach(|| copy::pieces(&batch, &columns, bytes_max));
    let (pieces, lost) = encoded.map_err(|error| raise(py, &error))?;
    Ok((tuples(py, pieces), lost))
}

/// Return the group of each row of a batch, as an array of int32 for `pyarrow.array`. Rows that share a value of any
/// key, directly or through other rows, are in the same group. Groups are numbered from 0 in the order of their first
/// rows.
///
/// A key with a null never groups rows. Texts count as equal if any collation considers them equal. Raises
/// `OptionInvalid` for a column that is missing from the batch.
#[pyfunction]
pub fn key_groups(py: Python<'_>, batch: &Bound<'_, PyAny>, keys: Vec<Vec<String>>) -> PyResult<ArrowArray> {
    let batch = batch_from(batch)?;
    let inner = py.detach(|| groups::key_groups(&batch, &keys)).map_err(|error| raise(py, &error))?;
    Ok(ArrowArray { inner: Arc::new(inner) })
}
