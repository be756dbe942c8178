//! Hashes of Arrow rows.

use std::sync::Arc;

use penstock_kernel::row_hash;
use pyo3::prelude::*;

use crate::convert::batch_from;
use crate::raise::raise;
use crate::slots::Numbers;

/// A hash of each row of an Arrow batch by the values of `columns`, in the order named, as an array of uint64 for
/// `pyarrow.array`.
///
/// Values have one hash however they lie in memory. Hashes of one release agree on every machine. Raises `OptionInvalid`
/// for a column that the batch lacks, and for one of a type that no table has.
#[pyfunction]
pub fn row_hashes(py: Python<'_>, batch: &Bound<'_, PyAny>, columns: Vec<String>) -> PyResult<Numbers> {
    let batch = batch_from(batch)?;
    let inner = py.detach(|| row_hash::row_hashes(&batch, &columns)).map_err(|error| raise(py, &error))?;
    Ok(Numbers { inner: Arc::new(inner) })
}
