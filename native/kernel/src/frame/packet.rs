//! Replication packets of a live server: strips the framing and returns the bytes of events.
//!
//! ```text
//! ┌────────────┬────────┬────┬────────────────────┬───────┐
//! │ length u24 │ seq u8 │ 00 │ (semi-sync: ef, f) │ event │
//! └────────────┴────────┴────┴────────────────────┴───────┘
//! ```
//!
//! The byte before the event is 00 for an event, fe for the end of the stream, ff for an error. A packet of 0xffffff
//! bytes continues in the next packet, which has no such byte (protocol manual, "Sending more than 16 MB").

use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};

const HEADER_BYTES: usize = 4;
const PAYLOAD_BYTES_MAX: usize = 0xff_ffff;
const SEMI_SYNC_MAGIC: u8 = 0xef;

/// The first piece of a packet must hold at least the marker bytes and the event's header.
const PIECE_BYTES_MIN: usize = 64;

/// An error packet that the server sent instead of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerError {
    /// The server's error number.
    pub number: u16,
    /// The message of the server.
    pub message: String,
}

/// A piece of an event: the bytes from a packet, or from a part of a long packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The bytes of the event, without framing.
    pub bytes: &'a [u8],
    /// Whether this is the first piece of the event.
    pub begins: bool,
    /// Whether this is the last piece of the event.
    pub ends: bool,
}

/// Parses packets one at a time without buffering their bytes.
#[derive(Debug)]
pub struct Packets {
    semi_sync: bool,
    /// Packets of at least this length are returned in pieces, as their bytes arrive.
    piecewise_bytes_min: usize,
    sequence: Option<u8>,
    /// The previous packet was full, so the next packet continues its event.
    continued: bool,
    /// Bytes of the current packet that have not arrived yet. Set when the packet's first piece is returned.
    remaining_bytes: usize,
    ended: bool,
    acknowledge: bool,
    /// The current event asks for an acknowledgement, after which the server restarts the sequence numbers.
    sequence_restarts: bool,
    error: Option<ServerError>,
}

impl Packets {
    /// Starts before the first packet of a dump. With `semi_sync`, each packet begins with the two bytes that the
    /// server adds for replicas that have requested semi-synchronous replication.
    pub fn new(semi_sync: bool, piecewise_bytes_min: usize) -> Packets {
        Packets {
            semi_sync,
            piecewise_bytes_min,
            sequence: None,
            continued: false,
            remaining_bytes: 0,
            ended: false,
            acknowledge: false,
            sequence_restarts: false,
            error: None,
        }
    }

    /// Parses a packet, or a piece of a long packet, from the start of `bytes`.
    ///
    /// Returns how many bytes were consumed, and the piece of an event that these bytes contain. Returns None if more
    /// bytes are needed, or if the stream has ended.
    #[inline]
    pub fn take<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<(usize, Piece<'a>)>> {
        if self.remaining_bytes > 0 {
            return Ok(self.take_remaining(bytes));
        }
        if self.ended || self.error.is_some() {
            return Ok(None);
        }
        let mut cursor = Cursor::new(bytes);
        if cursor.remaining() < HEADER_BYTES {
            return Ok(None);
        }
        let length = cursor.u24()? as usize;
        let sequence = cursor.u8()?;
        let available = cursor.remaining();
        if available < length && (length < self.piecewise_bytes_min || available < PIECE_BYTES_MIN) {
            return Ok(None);
        }
        if let Some(expected) = self.sequence.filter(|expected| *expected != sequence) {
            return Err(out_of_order(expected, sequence));
        }
        self.sequence = Some(sequence.wrapping_add(1));
        let payload = cursor.take(length.min(available))?;
        let begins = !self.continued;
        let bytes = if begins { self.read_marker(payload, length)? } else { payload };
        self.continued = length == PAYLOAD_BYTES_MAX;
        self.remaining_bytes = length - payload.len();
        let ends = self.event_ends();
        Ok(Some((HEADER_BYTES + payload.len(), Piece { bytes, begins, ends })))
    }

    #[cold]
    fn take_remaining<'a>(&mut self, bytes: &'a [u8]) -> Option<(usize, Piece<'a>)> {
        let bytes = bytes.get(..self.remaining_bytes.min(bytes.len())).filter(|piece| !piece.is_empty())?;
        self.remaining_bytes -= bytes.len();
        let ends = self.event_ends();
        Some((bytes.len(), Piece { bytes, begins: false, ends }))
    }

    /// Whether the current event is complete. The sequence numbers restart after an event that asks for an
    /// acknowledgement.
    #[inline]
    fn event_ends(&mut self) -> bool {
        let ends = !self.continued && self.remaining_bytes == 0;
        if ends && self.sequence_restarts {
            self.sequence_restarts = false;
            self.sequence = None;
        }
        ends
    }

    /// Reads the marker bytes and returns the rest: an event, or nothing if the packet ends the stream or reports an
    /// error.
    #[inline]
    fn read_marker<'a>(&mut self, payload: &'a [u8], length: usize) -> Result<&'a [u8]> {
        let mut cursor = Cursor::new(payload);
        match cursor.u8()? {
            0x00 => {
                if self.semi_sync {
                    if cursor.u8()? != SEMI_SYNC_MAGIC {
                        return Err(malformed("a semi-synchronous packet without its mark"));
                    }
                    self.sequence_restarts = cursor.u8()? == 1;
                    self.acknowledge |= self.sequence_restarts;
                }
                Ok(cursor.take_rest())
            }
            0xfe if length < 9 => {
                self.ended = true;
                Ok(&[])
            }
            0xff => {
                self.error = Some(server_error(cursor)?);
                Ok(&[])
            }
            marker => Err(malformed(format!("a packet starts with {marker:#04x}"))),
        }
    }

    /// Whether the server ended the stream.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// The error that the server sent, if any.
    pub fn error(&self) -> Option<&ServerError> {
        self.error.as_ref()
    }

    /// Whether any packet since the last call asked for an acknowledgement.
    #[inline]
    pub fn take_acknowledge(&mut self) -> bool {
        std::mem::take(&mut self.acknowledge)
    }
}

#[cold]
fn out_of_order(expected: u8, sequence: u8) -> Error {
    Error::new(ErrorKind::ConnectionLost, format!("packet {sequence} arrives where {expected} is due"))
}

#[cold]
pub(crate) fn server_error(mut cursor: Cursor<'_>) -> Result<ServerError> {
    let number = cursor.u16()?;
    let text = cursor.take_rest();
    // Since protocol 4.1, `#` and the five characters of the SQLSTATE precede the text.
    let text = if text.first() == Some(&b'#') { text.get(6..).unwrap_or_default() } else { text };
    Ok(ServerError { number, message: String::from_utf8_lossy(text).into_owned() })
}

/// Parses packets from pieces of any size, and buffers the bytes of their events.
#[derive(Debug)]
pub struct Framer {
    packets: Packets,
    events: Vec<u8>,
}

impl Framer {
    /// Starts before the first packet of a dump. With `semi_sync`, each packet begins with the two bytes that the
    /// server adds for replicas that have requested semi-synchronous replication.
    pub fn new(semi_sync: bool) -> Framer {
        Framer { packets: Packets::new(semi_sync, usize::MAX), events: Vec::new() }
    }

    /// Consumes whole packets from the start of `bytes`, and returns how many bytes were consumed. The caller must pass
    /// the remaining bytes again, followed by more bytes.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<usize> {
        let mut consumed = 0;
        while let Some((consumed_bytes, piece)) = self.packets.take(bytes.get(consumed..).unwrap_or_default())? {
            self.events.extend_from_slice(piece.bytes);
            consumed += consumed_bytes;
        }
        Ok(consumed)
    }

    /// Returns the buffered event bytes and leaves the buffer empty. The last event may be incomplete if it spans
    /// several packets.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.events)
    }

    /// The buffered event bytes. The caller reads them in place, then clears them.
    pub fn events(&self) -> &[u8] {
        &self.events
    }

    /// Clears the buffer and keeps its memory.
    pub fn clear(&mut self) {
        self.events.clear();
    }

    /// Whether the server ended the stream.
    pub fn ended(&self) -> bool {
        self.packets.ended()
    }

    /// The error that the server sent, if any.
    pub fn error(&self) -> Option<&ServerError> {
        self.packets.error()
    }

    /// Returns whether the server waits for an acknowledgement, and clears that state.
    pub fn take_acknowledge(&mut self) -> bool {
        self.packets.take_acknowledge()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(sequence: u8, payload: &[u8]) -> Vec<u8> {
        let length = payload.len() as u32;
        let mut bytes = length.to_le_bytes()[..3].to_vec();
        bytes.push(sequence);
        bytes.extend_from_slice(payload);
        bytes
    }

    #[test]
    fn packets_in_pieces_of_any_size_give_the_same_events() {
        let mut stream = packet(1, b"\x00first");
        stream.extend(packet(2, b"\x00second"));
        stream.extend(packet(3, b"\xfe\0\0\0\0"));
        for step in 1..stream.len() {
            let mut framer = Framer::new(false);
            let mut buffer: Vec<u8> = Vec::new();
            for piece in stream.chunks(step) {
                buffer.extend_from_slice(piece);
                let consumed = framer.feed(&buffer).unwrap();
                buffer.drain(..consumed);
            }
            assert_eq!(framer.take(), b"firstsecond");
            assert!(framer.ended());
        }
    }

    #[test]
    fn sequence_numbers_restart_after_an_acknowledgement_request() {
        let mut framer = Framer::new(true);
        framer.feed(&packet(6, b"\x00\xef\x00a")).unwrap();
        framer.feed(&packet(7, b"\x00\xef\x01b")).unwrap();
        assert!(framer.take_acknowledge());
        framer.feed(&packet(1, b"\x00\xef\x00c")).unwrap();
        assert_eq!(framer.take(), b"abc");
        assert_eq!(framer.feed(&packet(3, b"\x00\xef\x00d")).unwrap_err().kind(), ErrorKind::ConnectionLost);
    }

    #[test]
    fn a_full_packet_continues_in_the_next_packet() {
        let mut long = vec![0u8; PAYLOAD_BYTES_MAX];
        long[1] = 7;
        let mut stream = packet(1, &long);
        stream.extend(packet(2, &[9, 9]));
        stream.extend(packet(3, &[0, 5]));
        let mut framer = Framer::new(false);
        assert_eq!(framer.feed(&stream).unwrap(), stream.len());
        let events = framer.take();
        assert_eq!(events.len(), PAYLOAD_BYTES_MAX - 1 + 2 + 1);
        assert_eq!((events[0], events[events.len() - 1]), (7, 5));
    }

    #[test]
    fn server_errors_and_lost_packets_are_distinguished() {
        let mut framer = Framer::new(false);
        framer.feed(&packet(1, b"\xff\xd4\x04#HY000gone")).unwrap();
        assert_eq!(framer.error(), Some(&ServerError { number: 1236, message: "gone".into() }));
        let mut framer = Framer::new(false);
        let mut stream = packet(1, b"\x00a");
        stream.extend(packet(3, b"\x00b"));
        assert_eq!(framer.feed(&stream).unwrap_err().kind(), ErrorKind::ConnectionLost);
    }
}
