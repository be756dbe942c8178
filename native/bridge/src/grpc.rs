//! The server's side of a gRPC connection, for the event loop that owns the connection's socket.

use penstock_kernel::grpc::connection::{Call, Connection, Progress};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::blocks::Chunk;
use crate::convert::slice_of;

/// A call: stream, method, message, whether the message is compressed with gzip, and whether the client accepts
/// compressed messages.
type CallTuple = (u32, String, Chunk, bool, bool);

fn call_of(call: Call) -> CallTuple {
    (call.stream, call.method, Chunk::whole(call.message), call.is_compressed, call.accepts_gzip)
}

/// A connection of a gRPC client, without its socket.
///
/// The connection refuses more than `calls_max` concurrent calls. `any_authority` is for clients of a Unix socket,
/// which do not send a valid name of the server. After each call of a method, `take` returns the pending work.
#[pyclass(module = "penstock._native")]
pub struct GrpcConnection {
    inner: Connection,
}

#[pymethods]
impl GrpcConnection {
    #[new]
    #[pyo3(signature = (*, calls_max, message_bytes_max, any_authority))]
    fn new(calls_max: u32, message_bytes_max: usize, any_authority: bool) -> GrpcConnection {
        GrpcConnection { inner: Connection::new(calls_max, message_bytes_max, any_authority) }
    }

    /// Read received bytes. A violation of the protocol closes the connection.
    fn receive(&mut self, data: &[u8]) {
        self.inner.receive(data);
    }

    /// End calls successfully, all with the same message. Cancelled calls are skipped.
    fn answer(&mut self, streams: Vec<u32>, message: &[u8]) {
        self.inner.answer(&streams, message);
    }

    /// Add messages to the answer of a call; with `gzip`, all of the answer's messages are compressed.
    fn send(&mut self, stream: u32, messages: Vec<PyBuffer<u8>>, gzip: bool) -> PyResult<()> {
        let slices = messages.iter().map(slice_of).collect::<PyResult<Vec<_>>>()?;
        self.inner.send(stream, &slices, gzip);
        Ok(())
    }

    /// End a call with a gRPC status code, after its messages.
    fn finish(&mut self, stream: u32, code: u32, text: &str) {
        self.inner.finish(stream, code, text);
    }

    /// Tell the client to send no more calls. The connection closes once the calls already sent have ended.
    fn end(&mut self) {
        self.inner.end();
    }

    /// Take the calls that arrived, the streams that the client cancelled, the streams whose messages fit into the
    /// client's flow-control window, and the bytes to send.
    fn take<'py>(&mut self, py: Python<'py>) -> (Vec<CallTuple>, Vec<u32>, Vec<u32>, Bound<'py, PyBytes>) {
        let Progress { calls, cancelled, sent } = self.inner.take_progress();
        let output = PyBytes::new(py, &self.inner.take_output());
        (calls.into_iter().map(call_of).collect(), cancelled, sent, output)
    }

    /// Number of bytes buffered for calls that have not arrived completely.
    #[getter]
    fn unfinished_bytes(&self) -> usize {
        self.inner.unfinished_bytes()
    }

    /// The number of calls that have not ended.
    #[getter]
    fn calls(&self) -> usize {
        self.inner.calls()
    }

    /// Whether nothing more is sent or received.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }
}
