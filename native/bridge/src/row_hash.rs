//! Hashes Arrow rows.

use std::sync::Arc;

use penstock_kernel::row_hash;
use pyo3::prelude::*;

use crate::array::ArrowArray;
use crate::convert::batch_from;
use crate::raise::raise;

/// Return a hash of each row of an Arrow batch by the values of `columns` in this order, as an array of uint64 for
/// `pyarrow.array`.
///
/// The hash does not depend on the representation of values in memory, and is the same on all machines within a
/// release. Raises `OptionInvalid` for a column that is missing from the batch, or for a type that table columns cannot
/// have.
#[pyfunction]
pub fn row_hashes(py: Python<'_>, batch: &Bound<'_, PyAny>, columns: Vec<String>) -> PyResult<ArrowArray> {
    let batch = batch_from(batch)?;
    let inner = py.detach(|| row_hash::row_hashes(&batch, &columns)).map_err(|error| raise(py, &error))?;
    Ok(ArrowArray { inner: Arc::new(inner) })
}
