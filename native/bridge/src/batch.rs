//! A batch of rows, exported to Python through the Arrow PyCapsule protocol.

use penstock_kernel::emit;
use penstock_kernel::slots::stream::{stream, Shards};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::convert::batch_capsules;
use crate::raise::raise;

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

    /// Return the rows as an Arrow stream, and their number.
    ///
    /// With `shards`, a number and the shards of it, these are the rows of the shards, and a column has their slots
    /// by `columns`. With `grouped` the rows of each shard are adjacent. Returns None if an update moves a row to
    /// another shard, or if images lack columns. Raises `OptionInvalid` as `shard_slots` does.
    #[pyo3(signature = (table, columns, shards=None, *, grouped=false))]
    fn stream<'py>(
        &self,
        py: Python<'py>,
        table: &str,
        columns: Vec<String>,
        shards: Option<(i16, Vec<i16>)>,
        grouped: bool,
    ) -> PyResult<Option<(Bound<'py, PyBytes>, usize)>> {
        let shards = shards.as_ref().map(|(count, of)| Shards { columns: &columns, count: *count, of, grouped });
        // Releasing the interpreter would take longer than encoding a small batch.
        let encoded = stream(&self.inner.record, table, shards).map_err(|error| raise(py, &error))?;
        Ok(encoded.map(|(content, rows)| (PyBytes::new(py, &content), rows)))
    }

    fn __len__(&self) -> usize {
        self.inner.record.num_rows()
    }
}
