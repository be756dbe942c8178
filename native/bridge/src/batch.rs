//! A batch of rows, exported to Python through the Arrow PyCapsule protocol.

use penstock_kernel::emit;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::convert::batch_capsules;

/// A batch of rows that the decoder returned.
#[pyclass(frozen, module = "penstock._native")]
pub struct Batch {
    inner: emit::Batch,
}

impl Batch {
    pub fn new(inner: emit::Batch) -> Batch {
        Batch { inner }
    }
}

#[pymethods]
impl Batch {
    /// The database; empty for formats that span tables.
    #[getter]
    fn database(&self) -> &str {
        &self.inner.database
    }

    /// The table; empty for formats that span tables.
    #[getter]
    fn table(&self) -> &str {
        &self.inner.table
    }

    /// The schema version of the rows.
    #[getter]
    fn schema_version(&self) -> i32 {
        self.inner.schema_version
    }

    /// The number of rows.
    #[getter]
    fn rows(&self) -> usize {
        self.inner.record.num_rows()
    }

    /// Memory size in bytes.
    #[getter]
    fn bytes(&self) -> usize {
        self.inner.record.get_array_memory_size()
    }

    /// The end of the last complete transaction when the batch closed: file and offset.
    #[getter]
    fn position(&self) -> (&str, u64) {
        (&self.inner.position.0, self.inner.position.1)
    }

    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        // The protocol allows producers to ignore the requested schema.
        let _ = requested_schema;
        batch_capsules(py, &self.inner.record)
    }

    fn __len__(&self) -> usize {
        self.inner.record.num_rows()
    }
}
