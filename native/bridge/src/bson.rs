//! Arrow rows as BSON documents.

use std::sync::Arc;

use penstock_kernel::bson;
use pyo3::prelude::*;

use crate::convert::batch_from;
use crate::objects::Texts;
use crate::raise::raise;

/// One BSON document for each row of an Arrow batch, as an array of bytes for `pyarrow.array`.
///
/// A field's type is that of its column: integers, doubles, decimals of at most 34 digits, texts, bytes, days and
/// milliseconds, lists of numbers, and structs of all these. Raises `OptionInvalid` for a column of another type.
#[pyfunction]
pub fn bson_documents(py: Python<'_>, batch: &Bound<'_, PyAny>) -> PyResult<Texts> {
    let batch = batch_from(batch)?;
    let made = py.detach(|| bson::bson_documents(&batch)).map_err(|error| raise(py, &error))?;
    Ok(Texts { inner: Arc::new(made) })
}
