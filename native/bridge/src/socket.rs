//! Reads a non-blocking socket of Python without the interpreter.

use std::io::{ErrorKind, Read, Result};
use std::net::TcpStream;
use std::os::fd::{BorrowedFd, RawFd};

use pyo3::exceptions::PyAssertionError;
use pyo3::prelude::*;

/// A duplicate of a Python socket's descriptor, which stays valid if another thread closes the socket.
pub struct Socket(TcpStream);

impl Socket {
    /// Duplicate the descriptor of a stream socket that does not block. The caller keeps the descriptor open during
    /// the call.
    pub fn duplicate(descriptor: RawFd) -> PyResult<Socket> {
        if descriptor < 0 {
            return Err(PyAssertionError::new_err("a closed socket"));
        }
        // SAFETY: the descriptor is not -1, and the caller's socket keeps it open until this function returns.
        let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
        // The address family does not matter for reading.
        Ok(Socket(TcpStream::from(borrowed.try_clone_to_owned()?)))
    }

    /// Read available bytes. Returns None if there are none, and 0 after the peer closed the connection.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        loop {
            match self.0.read(buffer) {
                Ok(size) => return Ok(Some(size)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
