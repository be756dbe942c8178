//! Decodes the packets of a result set into batches.

use penstock_kernel::emit::system::TableRef;
use penstock_kernel::resultset::{self, Bounds, Origin};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::batch::Batch;
use crate::convert::slice_of;
use crate::raise::{option_invalid, raise};
use crate::schema::{declared, ColumnTuple};

/// Decodes a query's result set in the text protocol.
///
/// Its columns must be the declared columns in the same order. After each buffer, `state` tells the caller what to do
/// next: "input" (feed more), "batch" (`take_batch`), or "done".
#[pyclass(module = "penstock._native")]
pub struct ResultSet {
    inner: resultset::ResultSet,
}

#[pymethods]
impl ResultSet {
    /// `timestamp_us` is the time of the read; `file`, `offset` and `commit_version` are the log's position at that
    /// time. `row_first` is the number of rows that earlier queries returned. The last values of the columns in `key`
    /// are kept.
    #[new]
    #[pyo3(signature = (
        columns, *, mariadb, instance, database, table, file, offset, commit_version, timestamp_us, server_id=0,
        schema_version=0, row_first=0, key=None, batch_rows_max=65_536, batch_bytes_max=8_388_608,
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        columns: Vec<ColumnTuple>,
        mariadb: bool,
        instance: &str,
        database: &str,
        table: &str,
        file: &str,
        offset: u64,
        commit_version: i64,
        timestamp_us: i64,
        server_id: u32,
        schema_version: i32,
        row_first: u32,
        key: Option<Vec<String>>,
        batch_rows_max: usize,
        batch_bytes_max: usize,
    ) -> PyResult<ResultSet> {
        let columns = declared(columns);
        let mut key_indexes = Vec::new();
        for name in key.unwrap_or_default() {
            match columns.iter().position(|column| column.name == name) {
                Some(index) => key_indexes.push(index),
                None => return Err(option_invalid(py, format!("the key's column `{name}` is not selected"))),
            }
        }
        let origin = Origin {
            instance: instance.into(),
            table: TableRef { database: database.into(), table: table.into(), schema_version },
            file: file.into(),
            offset,
            commit_version,
            timestamp_us,
            server_id,
            row_first,
        };
        let bounds = Bounds { rows: batch_rows_max, bytes: batch_bytes_max };
        let inner = resultset::ResultSet::new(&columns, mariadb, key_indexes, origin, bounds);
        Ok(ResultSet { inner: inner.map_err(|error| raise(py, &error))? })
    }

    /// Consume complete packets from the start of a buffer, up to the end of a batch; return the number of consumed
    /// bytes.
    fn feed(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed(bytes)).map_err(|error| raise(py, &error))
    }

    /// The action that the decoder expects from the caller: "input", "batch" or "done".
    #[getter]
    fn state(&self) -> &'static str {
        match (self.inner.has_batch(), self.inner.is_done()) {
            (true, _) => "batch",
            (_, true) => "done",
            _ => "input",
        }
    }

    /// Take the batch that is ready, or None.
    fn take_batch(&mut self) -> Option<Batch> {
        self.inner.take_batch().map(Batch::new)
    }

    /// Number of rows read so far.
    #[getter]
    fn rows(&self) -> u64 {
        self.inner.rows()
    }

    /// The key values in the last row of the last full batch as the server sent them, None for NULL; [] before the
    /// first.
    #[getter]
    fn key_last<'py>(&self, py: Python<'py>) -> Vec<Option<Bound<'py, PyBytes>>> {
        self.inner.key_last().iter().map(|value| value.as_deref().map(|bytes| PyBytes::new(py, bytes))).collect()
    }

    /// The error that the server sent instead of a row, number and message; None if there is none.
    #[getter]
    fn server_error(&self) -> Option<(u16, &str)> {
        self.inner.error().map(|error| (error.number, error.message.as_str()))
    }
}
