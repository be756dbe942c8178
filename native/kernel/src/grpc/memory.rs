//! The transport of a connection: bytes that were received, and bytes to send.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

#[derive(Debug, Default)]
struct Buffers {
    input: Vec<u8>,
    /// Number of bytes of `input` that were already read.
    read: usize,
    output: Vec<u8>,
}

/// A pair of buffers, shared by the connection and its owner. Reading waits for more input; writing never waits.
#[derive(Debug, Clone, Default)]
pub struct Memory(Arc<Mutex<Buffers>>);

impl Memory {
    /// Adds received bytes.
    pub fn receive(&self, bytes: &[u8]) {
        self.buffers().input.extend_from_slice(bytes);
    }

    /// Takes the bytes to send.
    pub fn take_output(&self) -> Vec<u8> {
        std::mem::take(&mut self.buffers().output)
    }

    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        // A panic between two steps leaves the buffers consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsyncRead for Memory {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut guard = self.buffers();
        let buffers = &mut *guard;
        let unread = buffers.input.get(buffers.read..).unwrap_or_default();
        let part = &unread[..unread.len().min(buffer.remaining())];
        if part.is_empty() {
            return Poll::Pending;
        }
        buffer.put_slice(part);
        buffers.read += part.len();
        if buffers.read == buffers.input.len() {
            buffers.input.clear();
            buffers.read = 0;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Memory {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.buffers().output.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
