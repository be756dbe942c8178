//! Parses replication packets into event bytes, and locates events by their headers.

use penstock_kernel::event::headers;
use penstock_kernel::frame::packet;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::slice_of;
use crate::raise::raise;

/// Parses replication packets from pieces of any size.
#[pyclass(module = "penstock._native")]
pub struct Framer {
    inner: packet::Framer,
}

#[pymethods]
impl Framer {
    /// With `semi_sync`, each packet starts with two bytes that the server adds for replicas that requested
    /// semi-synchronous replication.
    #[new]
    #[pyo3(signature = (*, semi_sync=false))]
    fn new(semi_sync: bool) -> Framer {
        Framer { inner: packet::Framer::new(semi_sync) }
    }

    /// Consume complete packets from the start of a buffer; return the number of consumed bytes.
    fn feed(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed(bytes)).map_err(|error| raise(py, &error))
    }

    /// Return the buffered event bytes and clear the buffer.
    fn take<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes = PyBytes::new(py, self.inner.events());
        self.inner.clear();
        bytes
    }

    /// Size of the buffered event bytes.
    #[getter]
    fn gathered(&self) -> usize {
        self.inner.events().len()
    }

    /// Clear the buffered event bytes and return how many bytes were cleared.
    fn discard(&mut self) -> usize {
        let bytes = self.inner.events().len();
        self.inner.clear();
        bytes
    }

    /// Whether the server ended the stream.
    #[getter]
    fn end(&self) -> bool {
        self.inner.ended()
    }

    /// The error that the server sent, number and message; None if there is none.
    #[getter]
    fn error(&self) -> Option<(u16, &str)> {
        self.inner.error().map(|error| (error.number, error.message.as_str()))
    }

    /// Return whether the server waits for an acknowledgement, and reset that flag.
    fn take_acknowledge(&mut self) -> bool {
        self.inner.take_acknowledge()
    }
}

/// Locate events by following their headers, in a buffer whose first byte is a header at `offset`. Return the start of
/// the last event that starts at or before `target` (None if its header is incomplete), and the start of the event
/// after it.
#[pyfunction]
pub fn follow_events(py: Python<'_>, buffer: PyBuffer<u8>, offset: u64, target: u64) -> PyResult<(Option<u64>, u64)> {
    let bytes = slice_of(&buffer)?;
    let followed = py.detach(|| headers::follow(bytes, offset, target)).map_err(|error| raise(py, &error))?;
    Ok((followed.last, followed.next))
}
