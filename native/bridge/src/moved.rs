//! Moves events from the logs of several servers into a single log.

use penstock_kernel::stream;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::slice_of;
use crate::raise::raise;

/// Moves the events of a log file to the offsets of another log. Only positions and checksums change.
///
/// `head` is the file's magic and format description. Raises `EventUnsupported` for a log without checksums or GTID
/// events.
#[pyclass(module = "penstock._native")]
pub struct EventMover {
    inner: stream::EventMover,
}

#[pymethods]
impl EventMover {
    #[new]
    fn new(py: Python<'_>, head: PyBuffer<u8>) -> PyResult<EventMover> {
        let inner = stream::EventMover::new(slice_of(&head)?).map_err(|error| raise(py, &error))?;
        Ok(EventMover { inner })
    }

    /// The first bytes of the new file: the magic and the format description.
    #[getter]
    fn head<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.inner.head())
    }

    /// Whether the server is MariaDB.
    #[getter]
    fn is_mariadb(&self) -> bool {
        self.inner.is_mariadb()
    }

    /// Return the complete events at the start of a buffer, moved to `offset` of a file.
    ///
    /// Raises `ChecksumMismatch`; `SchemaUnknown` for a table map without column names; `EventUnsupported` for a
    /// prepared XA transaction and its commit.
    fn move_events<'py>(
        &mut self,
        py: Python<'py>,
        events: PyBuffer<u8>,
        offset: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = slice_of(&events)?;
        let inner = &mut self.inner;
        let moved = py.detach(|| {
            let mut out = Vec::with_capacity(bytes.len());
            inner.move_events(bytes, offset, &mut out).map(|_| out)
        });
        Ok(PyBytes::new(py, &moved.map_err(|error| raise(py, &error))?))
    }
}
