//! Writes Arrow rows as BSON documents.

use std::sync::Arc;

use penstock_kernel::bson;
use pyo3::prelude::*;

use crate::array::ArrowArray;
use crate::convert::batch_from;
use crate::raise::raise;

/// Return a BSON document for each row of an Arrow batch, as an array of bytes for `pyarrow.array`.
///
/// Columns become fields according to their types: integers, doubles, decimals of at most 34 digits, texts, bytes,
/// dates and timestamps in milliseconds, lists of numbers, and structs of these. Raises `OptionInvalid` for a column
/// of another type.
#[pyfunction]
pub fn bson_documents(py: Python<'_>, batch: &Bound<'_, PyAny>) -> PyResult<ArrowArray> {
    let batch = batch_from(batch)?;
    let documents = py.detach(|| bson::bson_documents(&batch)).map_err(|error| raise(py, &error))?;
    Ok(ArrowArray { inner: Arc::new(documents) })
}
