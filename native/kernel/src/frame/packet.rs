//! Replication packets of a live server: frames off, event bytes out.
//!
//! ```text
//! ┌────────────┬────────┬────┬────────────────────┬───────┐
//! │ length u24 │ seq u8 │ 00 │ (semi-sync: ef, f) │ event │
//! └────────────┴────────┴────┴────────────────────┴───────┘
//! ```
//!
//! The byte before the event is 00 for an event, fe for the end of the stream, ff for an error. A packet of
//! 0xffffff bytes goes on in the next, which has no such byte (manual of the protocol, "Sending more than 16 MB").

use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};

const HEADER_BYTES: usize = 4;
const PAYLOAD_BYTES_MAX: usize = 0xff_ffff;
const SEMI_SYNC_MAGIC: u8 = 0xef;

/// The first piece of a packet holds at least its marks and an event's header.
const PIECE_BYTES_MIN: usize = 64;

/// An error packet that the server sent instead of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerError {
    /// The server's error number.
    pub number: u16,
    /// Its message.
    pub message: String,
}

/// A part of an event, as one packet or a piece of one brings it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Its bytes; those of the event alone.
    pub bytes: &'a [u8],
    /// Whether the event begins here.
    pub begins: bool,
    /// Whether the event ends here.
    pub ends: bool,
}

/// Takes packets apart one at a time, and keeps none of their bytes.
#[derive(Debug)]
pub struct Packets {
    semi_sync: bool,
    /// A packet of at least this length is handed out as far as it is there.
    piecewise_bytes_min: usize,
    sequence: Option<u8>,
    /// The packet before was full, so the next one goes on with its event.
    continued: bool,
    /// How much of a packet of which the front was handed out is still to come.
    left: usize,
    ended: bool,
    acknowledge: bool,
    /// The event at hand asks for an acknowledgement: the server counts anew behind it.
    recounted: bool,
    error: Option<ServerError>,
}

impl Packets {
    /// Starts before the first packet of a dump. `semi_sync` expects the two bytes that the server adds for
    /// replicas which asked to acknowledge.
    pub fn new(semi_sync: bool, piecewise_bytes_min: usize) -> Packets {
        Packets {
            semi_sync,
            piecewise_bytes_min,
            sequence: None,
            continued: false,
            left: 0,
            ended: false,
            acknowledge: false,
            recounted: false,
            error: None,
        }
    }

    /// Takes one packet, or a piece of a long one, from the front of `bytes`: how many bytes that was, and what of an
    /// event it brought. None where too little is there, or nothing more comes.
    #[inline]
    pub fn take<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<(usize, Piece<'a>)>> {
        if self.left > 0 {
            return Ok(self.take_left(bytes));
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
        let there = cursor.remaining();
        if there < length && (length < self.piecewise_bytes_min || there < PIECE_BYTES_MIN) {
            return Ok(None);
        }
        if let Some(wanted) = self.sequence.filter(|wanted| *wanted != sequence) {
            return Err(out_of_order(wanted, sequence));
        }
        self.sequence = Some(sequence.wrapping_add(1));
        let payload = cursor.take(length.min(there))?;
        let begins = !self.continued;
        let bytes = if begins { self.mark(payload, length)? } else { payload };
        self.continued = length == PAYLOAD_BYTES_MAX;
        self.left = length - payload.len();
        let ends = self.event_ends();
        Ok(Some((HEADER_BYTES + payload.len(), Piece { bytes, begins, ends })))
    }

    #[cold]
    fn take_left<'a>(&mut self, bytes: &'a [u8]) -> Option<(usize, Piece<'a>)> {
        let bytes = bytes.get(..self.left.min(bytes.len())).filter(|piece| !piece.is_empty())?;
        self.left -= bytes.len();
        let ends = self.event_ends();
        Some((bytes.len(), Piece { bytes, begins: false, ends }))
    }

    /// Whether the event at hand ends with what was taken. The packets behind one that asks for an acknowledgement
    /// are numbered from the start again.
    #[inline]
    fn event_ends(&mut self) -> bool {
        let ends = !self.continued && self.left == 0;
        if ends && self.recounted {
            self.recounted = false;
            self.sequence = None;
        }
        ends
    }

    /// Reads what stands before an event, and returns the event. A packet that holds none leaves nothing.
    #[inline]
    fn mark<'a>(&mut self, payload: &'a [u8], length: usize) -> Result<&'a [u8]> {
        let mut cursor = Cursor::new(payload);
        match cursor.u8()? {
            0x00 => {
                if self.semi_sync {
                    if cursor.u8()? != SEMI_SYNC_MAGIC {
                        return Err(malformed("a semi-synchronous packet without its mark"));
                    }
                    self.recounted = cursor.u8()? == 1;
                    self.acknowledge |= self.recounted;
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
            other => Err(malformed(format!("a packet starts with {other:#04x}"))),
        }
    }

    /// Whether the server ended the stream.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// The error the server sent, if it did.
    pub fn error(&self) -> Option<&ServerError> {
        self.error.as_ref()
    }

    /// Whether a packet since the last question asked for an acknowledgement.
    #[inline]
    pub fn take_acknowledge(&mut self) -> bool {
        std::mem::take(&mut self.acknowledge)
    }
}

#[cold]
fn out_of_order(wanted: u8, sequence: u8) -> Error {
    Error::new(ErrorKind::ConnectionLost, format!("packet {sequence} arrives where {wanted} is due"))
}

#[cold]
pub(crate) fn server_error(mut cursor: Cursor<'_>) -> Result<ServerError> {
    let number = cursor.u16()?;
    let text = cursor.take_rest();
    // From protocol 4.1 on `#` and five characters of SQLSTATE come first.
    let text = if text.first() == Some(&b'#') { text.get(6..).unwrap_or_default() } else { text };
    Ok(ServerError { number, message: String::from_utf8_lossy(text).into_owned() })
}

/// Takes packets apart, whatever the pieces in which they arrive, and gathers the bytes of their events.
#[derive(Debug)]
pub struct Framer {
    packets: Packets,
    events: Vec<u8>,
}

impl Framer {
    /// Starts before the first packet of a dump. `semi_sync` expects the two bytes that the server adds for
    /// replicas which asked to acknowledge.
    pub fn new(semi_sync: bool) -> Framer {
        Framer { packets: Packets::new(semi_sync, usize::MAX), events: Vec::new() }
    }

    /// Takes whole packets from the front of `bytes` and returns how many bytes that were. The rest must be offered
    /// again with more behind it.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<usize> {
        let mut consumed = 0;
        while let Some((taken, piece)) = self.packets.take(bytes.get(consumed..).unwrap_or_default())? {
            self.events.extend_from_slice(piece.bytes);
            consumed += taken;
        }
        Ok(consumed)
    }

    /// The event bytes gathered so far, in an order that leaves nothing behind. The last event may lack its end when
    /// it spans several packets.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.events)
    }

    /// The event bytes gathered so far, to be read in place and then cleared.
    pub fn events(&self) -> &[u8] {
        &self.events
    }

    /// Forgets the gathered bytes and keeps their memory.
    pub fn clear(&mut self) {
        self.events.clear();
    }

    /// Whether the server ended the stream.
    pub fn ended(&self) -> bool {
        self.packets.ended()
    }

    /// The error the server sent, if it did.
    pub fn error(&self) -> Option<&ServerError> {
        self.packets.error()
    }

    /// Whether the server waits for an acknowledgement; asking clears it.
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
    fn packets_give_the_same_events_whatever_the_pieces() {
        let mut stream = packet(1, b"\x00first");
        stream.extend(packet(2, b"\x00second"));
        stream.extend(packet(3, b"\xfe\0\0\0\0"));
        for step in 1..stream.len() {
            let mut framer = Framer::new(false);
            let mut held: Vec<u8> = Vec::new();
            for piece in stream.chunks(step) {
                held.extend_from_slice(piece);
                let consumed = framer.feed(&held).unwrap();
                held.drain(..consumed);
            }
            assert_eq!(framer.take(), b"firstsecond");
            assert!(framer.ended());
        }
    }

    #[test]
    fn packets_are_counted_anew_behind_a_wish_for_an_acknowledgement() {
        let mut framer = Framer::new(true);
        framer.feed(&packet(6, b"\x00\xef\x00a")).unwrap();
        framer.feed(&packet(7, b"\x00\xef\x01b")).unwrap();
        assert!(framer.take_acknowledge());
        framer.feed(&packet(1, b"\x00\xef\x00c")).unwrap();
        assert_eq!(framer.take(), b"abc");
        assert_eq!(framer.feed(&packet(3, b"\x00\xef\x00d")).unwrap_err().kind(), ErrorKind::ConnectionLost);
    }

    #[test]
    fn a_full_packet_goes_on_in_the_next() {
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
    fn errors_and_lost_packets_are_told_apart() {
        let mut framer = Framer::new(false);
        framer.feed(&packet(1, b"\xff\xd4\x04#HY000gone")).unwrap();
        assert_eq!(framer.error(), Some(&ServerError { number: 1236, message: "gone".into() }));
        let mut framer = Framer::new(false);
        let mut stream = packet(1, b"\x00a");
        stream.extend(packet(3, b"\x00b"));
        assert_eq!(framer.feed(&stream).unwrap_err().kind(), ErrorKind::ConnectionLost);
    }
}
