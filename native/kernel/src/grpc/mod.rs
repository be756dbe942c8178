//! The server's side of gRPC connections, without sockets: received bytes become calls, and answers become bytes to
//! send.
//!
//! Sources: RFC 9113 (HTTP/2) through the crate `h2`, which is driven in memory, and gRPC's "gRPC over HTTP2". The
//! crate reads a clock only in order to ignore late frames of a stream for one second after resetting it.

mod authority;
pub mod connection;
mod memory;
mod status;
