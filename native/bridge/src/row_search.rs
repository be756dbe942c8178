//! Locates the transactions of a log that may change a given row.

use penstock_kernel::stream::{self, SearchedRow};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::convert::slice_of;
use crate::raise::raise;
use crate::schema::{declared, ColumnTuple};

/// Searches a range of a file for transactions that may change a given row, without decoding values.
///
/// `head` is the file's magic and format description; the range starts at `offset`, between transactions. `columns`
/// names the columns of `values`, () for the primary key. Without values, each change of the table is a candidate.
/// `definition` has the columns and the primary key of the table where the range starts, for logs that do not name
/// columns. Candidates with at most `gap_bytes` between them are joined.
#[pyclass(module = "penstock._native")]
pub struct RowSearch {
    inner: stream::RowSearch,
}

#[pymethods]
impl RowSearch {
    #[new]
    #[pyo3(signature = (database, table, *, head, offset, columns, values, definition=None, gap_bytes=0))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        database: String,
        table: String,
        head: PyBuffer<u8>,
        offset: u64,
        columns: Vec<String>,
        values: Vec<String>,
        definition: Option<(Vec<ColumnTuple>, Vec<String>)>,
        gap_bytes: u64,
    ) -> PyResult<RowSearch> {
        let definition = definition.map(|(columns, primary_key)| (declared(columns), primary_key));
        let row = SearchedRow { database, table, columns, values, declared: definition };
        let inner = stream::RowSearch::new(row, slice_of(&head)?, offset, gap_bytes);
        Ok(RowSearch { inner: inner.map_err(|error| raise(py, &error))? })
    }

    /// Process the next bytes, which may be split anywhere.
    fn feed(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<()> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed(bytes));
        Ok(())
    }

    /// Return the candidates as ascending pairs of offsets. The last candidate may end after the range.
    fn finish(&mut self) -> Vec<(u64, u64)> {
        self.inner.finish()
    }

    /// Whether changes of the table are candidates only because the log does not name its columns.
    #[getter]
    fn needs_definition(&self) -> bool {
        self.inner.needs_definition()
    }
}
