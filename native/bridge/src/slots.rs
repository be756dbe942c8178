//! Computes the slot of each Arrow row; the slot determines the row's shard.

use std::sync::Arc;

use penstock_kernel::slots;
use pyo3::prelude::*;

use crate::array::ArrowArray;
use crate::convert::batch_from;
use crate::raise::raise;

/// Return the slot of each row of an Arrow batch by the values of `columns`, as an array of int16 for
/// `pyarrow.array`.
///
/// Without columns, every row has the slot of `table`, a name like `database.table`. Raises `OptionInvalid` for a
/// column that is missing from the batch, or whose type cannot be a key.
#[pyfunction]
#[pyo3(signature = (batch, columns, table=""))]
pub fn shard_slots(
    py: Python<'_>,
    batch: &Bound<'_, PyAny>,
    columns: Vec<String>,
    table: &str,
) -> PyResult<ArrowArray> {
    let batch = batch_from(batch)?;
    let inner = py.detach(|| slots::slots(&batch, &columns, table)).map_err(|error| raise(py, &error))?;
    Ok(ArrowArray { inner: Arc::new(inner) })
}
