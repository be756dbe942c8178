//! The server's side of gRPC connections, without sockets: bytes in, calls out, answers in, bytes out.
//!
//! Sources: RFC 9113 (HTTP/2) through the crate `h2`, which is driven in memory, and gRPC's "gRPC over HTTP2". The
//! crate reads a clock for one purpose: for one second after it has reset a stream, it ignores late frames of that
//! stream.

mod authority;
pub mod connection;
mod memory;
mod status;
