//! Rows of Arrow as text for databases.

use std::sync::Arc;

use penstock_kernel::sql::values::{self, Frame};
use penstock_kernel::sql::{copy, groups, Piece};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::batch_from;
use crate::raise::{option_invalid, raise};
use crate::slots::Numbers;

/// Number of rows, and their text.
type PieceTuple<'py> = (usize, Bound<'py, PyBytes>);

fn tuples<'py>(py: Python<'py>, pieces: Vec<Piece>) -> Vec<PieceTuple<'py>> {
    pieces.into_iter().map(|piece| (piece.rows, PyBytes::new(py, &piece.text))).collect()
}

/// The rows of a batch as literals of MySQL's SQL, in pieces of bounded size: each the number of its rows, and text.
///
/// A piece is `(1,'a'),(2,'b')`; with `before`, a text for each column, any other list, such as conditions. Values that
/// their column cannot hold are written as `_metadata.unrepresentable` has them. Raises `OptionInvalid` for a column
/// that the batch lacks.
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

/// The rows of a batch as lines of PostgreSQL's COPY in its text format, in pieces of about `bytes_max` bytes, and for
/// each column how many values were written as null because PostgreSQL has none such.
///
/// Raises `OptionInvalid` for a column that the batch lacks.
#[pyfunction]
#[pyo3(signature = (batch, columns, *, bytes_max=1_048_576))]
pub fn copy_text<'py>(
    py: Python<'py>,
    batch: &Bound<'py, PyAny>,
    columns: Vec<String>,
    bytes_max: usize,
) -> PyResult<(Vec<PieceTuple<'py>>, Vec<usize>)> {
    let batch = batch_from(batch)?;
    let found = py.detach(|| copy::pieces(&batch, &columns, bytes_max));
    let (pieces, lost) = found.map_err(|error| raise(py, &error))?;
    Ok((tuples(py, pieces), lost))
}

/// The group of each row of a batch, as an array of int32 for `pyarrow.array`: rows that share a value of any of the
/// keys are in one group, with all that share one with those. Groups are numbered from 0 in the order of first rows.
///
/// A key with a null in it is shared with nobody; texts that any collation takes for the same are shared. Raises
/// `OptionInvalid` for a column that the batch lacks.
#[pyfunction]
pub fn key_groups(py: Python<'_>, batch: &Bound<'_, PyAny>, keys: Vec<Vec<String>>) -> PyResult<Numbers> {
    let batch = batch_from(batch)?;
    let inner = py.detach(|| groups::key_groups(&batch, &keys)).map_err(|error| raise(py, &error))?;
    Ok(Numbers { inner: Arc::new(inner) })
}
