//! Replication packets in, event bytes out; and events found by their headers.

use penstock_kernel::event::headers;
use penstock_kernel::frame::packet;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::slice_of;
use crate::raise::raise;

/// Takes replication packets apart, whatever the pieces in which they arrive.
#[pyclass(module = "penstock._native")]
pub struct Framer {
    inner: packet::Framer,
}

#[pymethods]
impl Framer {
    /// `semi_sync` expects the two bytes that the server adds for replicas which asked to acknowledge.
    #[new]
    #[pyo3(signature = (*, semi_sync=false))]
    fn new(semi_sync: bool) -> Framer {
        Framer { inner: packet::Framer::new(semi_sync) }
    }

    /// Take whole packets from the front of a buffer; return how many bytes that were.
    fn feed(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed(bytes)).map_err(|error| raise(py, &error))
    }

    /// Return the event bytes gathered so far and forget them.
    fn take<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes = PyBytes::new(py, self.inner.events());
        self.inner.clear();
        bytes
    }

    /// How many event bytes are gathered.
    #[getter]
    fn gathered(&self) -> usize {
        self.inner.events().len()
    }

    /// Forget the event bytes gathered so far; return how many they were.
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

    /// The error the server sent instead of an event: number and message, or None.
    #[getter]
    fn error(&self) -> Option<(u16, &str)> {
        self.inner.error().map(|error| (error.number, error.message.as_str()))
    }

    /// Whether the server waits for an acknowledgement; asking clears it.
    fn take_acknowledge(&mut self) -> bool {
        self.inner.take_acknowledge()
    }
}

/// Follow the events of a buffer, which begins with a header at `offset`, by their headers alone. Return where the last
/// one begins that begins at or before `target`, None where no such header is whole, and where the next one begins.
#[pyfunction]
pub fn follow_events(py: Python<'_>, buffer: PyBuffer<u8>, offset: u64, target: u64) -> PyResult<(Option<u64>, u64)> {
    let bytes = slice_of(&buffer)?;
    let followed = py.detach(|| headers::follow(bytes, offset, target)).map_err(|error| raise(py, &error))?;
    Ok((followed.last, followed.next))
}
