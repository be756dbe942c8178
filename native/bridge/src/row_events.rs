//! Writes binlog transactions from values given as text.

use penstock_kernel::error::Result;
use penstock_kernel::event::Change;
use penstock_kernel::write::row_events;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::raise::raise;
use crate::schema::{declared, ColumnTuple};

/// A row: each column's value as text, in the table's column order; None for NULL.
type Row = Vec<Option<PyBackedBytes>>;

fn cells(row: &Row) -> Vec<Option<&[u8]>> {
    row.iter().map(|cell| cell.as_ref().map(|text| &**text)).collect()
}

/// Writes transactions of a MySQL binlog from rows of text, for sources that describe their changes in messages.
///
/// Numbers, dates and times are as MySQL shows them, TIMESTAMP in UTC, BIT as a number, an ENUM as a member, a SET as
/// members with commas between them, documents as JSON, other values as their bytes. With `numbered`, an ENUM or SET is
/// given as its number. After a row is refused, the caller must begin its transaction again.
#[pyclass(module = "penstock._native")]
pub struct RowEventWriter {
    inner: row_events::RowEventWriter,
    numbered: bool,
}

impl RowEventWriter {
    fn rows<'a>(
        &mut self,
        py: Python<'_>,
        table: usize,
        change: Change,
        images: impl Iterator<Item = Vec<&'a Row>>,
    ) -> PyResult<()> {
        let mut write = |rows: Vec<&Row>| -> Result<()> {
            let images: Vec<_> = rows.iter().map(|row| cells(row)).collect();
            let images: Vec<_> = images.iter().map(Vec::as_slice).collect();
            self.inner.row(table, change, &images, self.numbered)
        };
        for rows in images {
            write(rows).map_err(|error| raise(py, &error))?;
        }
        Ok(())
    }
}

#[pymethods]
impl RowEventWriter {
    #[new]
    #[pyo3(signature = (*, cluster_id, server_id, numbered=false))]
    fn new(cluster_id: u64, server_id: u32, numbered: bool) -> RowEventWriter {
        RowEventWriter { inner: row_events::RowEventWriter::new(cluster_id, server_id), numbered }
    }

    /// Add a table, with its columns as MySQL declares them. Return its index.
    ///
    /// Raises `SchemaInvalid` for an unknown type, or if a key column is missing from the table.
    fn define(
        &mut self,
        py: Python<'_>,
        database: &str,
        table: &str,
        columns: Vec<ColumnTuple>,
        primary_key: Vec<String>,
    ) -> PyResult<usize> {
        let columns = declared(columns);
        self.inner.define(database, table, &columns, &primary_key).map_err(|error| raise(py, &error))
    }

    /// Begin the transaction with this commit timestamp, at `offset` of a file. An open transaction is dropped.
    fn begin(&mut self, py: Python<'_>, commit_ts: u64, offset: u64) -> PyResult<()> {
        self.inner.begin(commit_ts, offset).map_err(|error| raise(py, &error))
    }

    /// Add inserted rows. Raises `ValueMalformed` for a row with the wrong number of columns, or for a text that is not
    /// a valid value of its column.
    fn insert(&mut self, py: Python<'_>, table: usize, rows: Vec<Row>) -> PyResult<()> {
        self.rows(py, table, Change::Insert, rows.iter().map(|row| vec![row]))
    }

    /// Add updated rows, each as the old and the new row. Raises the same exceptions as `insert`.
    fn update(&mut self, py: Python<'_>, table: usize, rows: Vec<(Row, Row)>) -> PyResult<()> {
        self.rows(py, table, Change::Update, rows.iter().map(|(before, after)| vec![before, after]))
    }

    /// Add deleted rows. Raises the same exceptions as `insert`.
    fn delete(&mut self, py: Python<'_>, table: usize, rows: Vec<Row>) -> PyResult<()> {
        self.rows(py, table, Change::Delete, rows.iter().map(|row| vec![row]))
    }

    /// End the transaction and return its bytes.
    fn commit<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let events = self.inner.commit().map_err(|error| raise(py, &error))?;
        Ok(PyBytes::new(py, &events))
    }

    /// Return the bytes of a statement with a commit timestamp, placed at `offset` of a file. The start timestamp
    /// defaults to the commit timestamp.
    #[pyo3(signature = (commit_ts, offset, database, text, *, start_ts=None))]
    fn statement<'py>(
        &self,
        py: Python<'py>,
        commit_ts: u64,
        offset: u64,
        database: &str,
        text: &str,
        start_ts: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let timestamps = (commit_ts, start_ts.unwrap_or(commit_ts));
        let events = self.inner.statement(timestamps, offset, database, text).map_err(|error| raise(py, &error))?;
        Ok(PyBytes::new(py, &events))
    }
}
