//! An Arrow array for Python.

use arrow_array::ffi::to_ffi;
use arrow_array::{Array, ArrayRef};
use arrow_schema::ffi::FFI_ArrowSchema;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::convert::arrow_error;

/// An array with one value per batch row, which the caller's Arrow library imports.
#[pyclass(frozen, module = "penstock._native")]
pub struct ArrowArray {
    pub(crate) inner: ArrayRef,
}

#[pymethods]
impl ArrowArray {
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        // The protocol allows producers to ignore the requested schema.
        let _ = requested_schema;
        let schema = FFI_ArrowSchema::try_from(self.inner.data_type()).map_err(arrow_error)?;
        let (array, _) = to_ffi(&self.inner.to_data()).map_err(arrow_error)?;
        let schema = PyCapsule::new_with_value(py, schema, c"arrow_schema")?;
        let array = PyCapsule::new_with_value(py, array, c"arrow_array")?;
        PyTuple::new(py, [schema.into_any(), array.into_any()])
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }
}
