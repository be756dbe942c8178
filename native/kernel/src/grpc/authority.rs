//! Removes the name of the server from a client's requests.
//!
//! Over a Unix socket, gRPC's clients send the path of the socket as the `:authority`. A path is not a valid authority
//! (RFC 3986), so `h2` would refuse the request. The server does not use the name, so the frames are rewritten without
//! it.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_core::Stream;
use h2::frame::Frame;
use h2::Codec;

use super::memory::Memory;

/// The preface, which precedes the first frame.
const PREFACE_BYTES: usize = 24;

/// Tracks the frames that a client sends over one connection.
#[derive(Debug)]
pub struct AuthorityFilter {
    preface: usize,
    received: Memory,
    reader: Codec<Memory, Bytes>,
    passed_on: Memory,
    writer: Codec<Memory, Bytes>,
}

impl AuthorityFilter {
    /// Starts before the client's preface.
    pub fn new(headers_bytes_max: u32) -> AuthorityFilter {
        let (received, passed_on) = (Memory::default(), Memory::default());
        let mut reader = Codec::new(received.clone());
        reader.set_max_recv_header_list_size(headers_bytes_max as usize);
        let writer = Codec::new(passed_on.clone());
        AuthorityFilter { preface: 0, received, reader, passed_on, writer }
    }

    /// Returns the bytes of the frames that have arrived completely; None after a violation of the protocol.
    pub fn pass_on(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let (preface, frames) = bytes.split_at(bytes.len().min(PREFACE_BYTES - self.preface));
        self.preface += preface.len();
        self.received.receive(frames);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            let mut frame = match Pin::new(&mut self.reader).poll_next(&mut context) {
                Poll::Pending => break,
                Poll::Ready(None | Some(Err(_))) => return None,
                Poll::Ready(Some(Ok(frame))) => frame,
            };
            match &mut frame {
                Frame::Headers(headers) => headers.pseudo_mut().authority = None,
                // The priority in a frame is deprecated. `h2` ignores it and cannot write it.
                Frame::Priority(_) => continue,
                _ => {}
            }
            self.writer.buffer(frame).ok()?;
            // Writing to memory never waits.
            if !matches!(self.writer.flush(&mut context), Poll::Ready(Ok(()))) {
                return None;
            }
        }
        Some([preface, &self.passed_on.take_output()].concat())
    }
}
