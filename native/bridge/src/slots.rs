//! Computes slots of Arrow rows.

use std::sync::Arc;

use arrow_array::ffi::to_ffi;
use arrow_array::{Array, ArrayRef};
use arrow_schema::ffi::FFI_ArrowSchema;
use penstock_kernel::slots;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::convert::batch_from;
use crate::raise::raise;

/// An array with a number for each row, to be imported by the caller's Arrow library.
#[pyclass(frozen, module = "penstock._native")]
pub struct Numbers {
    pub(crate) inner: ArrayRef,
}

#[pymethods]
impl Numbers {
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        // The protocol allows producers to ignore the requested schema.
        let _ = requested_schema;
        let error = |error: arrow_schema::ArrowError| PyValueError::new_err(error.to_string());
        let schema = FFI_ArrowSchema::try_from(self.inner.data_type()).map_err(error)?;
        let (array, _) = to_ffi(&self.inner.to_data()).map_err(error)?;
        let schema = PyCapsule::new_with_value(py, schema, c"arrow_schema")?;
        let array = PyCapsule::new_with_value(py, array, c"arrow_array")?;
        PyTuple::new(py, [schema.into_any(), array.into_any()])
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }
}

/// Return the slot of each row of an Arrow batch by the values of `columns`, as an array of int16 for
/// `pyarrow.array`.
///
/// Without columns, every row has the slot of `table`, a name like `database.table`. Raises `OptionInvalid` for a
/// column that is missing from the batch, or whose type cannot be a key.
#[pyfunction]
#[pyo3(signature = (batch, columns, table=""))]
pub fn shard_slots(py: Python<'_>, batch: &Bound<'_, PyAny>, columns: Vec<String>, table: &str) -> PyResult<Numbers> {
    let batch = batch_from(batch)?;
    let inner = py.detach(|| slots::slots(&batch, &columns, table)).map_err(|error| raise(py, &error))?;
    Ok(Numbers { inner: Arc::new(inner) })
}
