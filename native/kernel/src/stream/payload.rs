//! Transactions in one compressed event, followed as they decompress.
//!
//! Such an event may be a gigabyte long and hold many, so neither it nor what is in it is ever held whole: where its
//! end is not there yet, what is there is decompressed and let go. Its last event, which commits, is taken only after
//! the checksum of the whole was verified.

use std::io;

use zstd::stream::raw::{Decoder as Zstd, InBuffer, Operation, OutBuffer};

use super::frame::{declared_size, event_size, mismatch, Span};
use super::{Decoder, Flow};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::query::{Query, Verb};
use crate::event::transaction_payload::{Compression, TransactionPayload};
use crate::event::xa::XaId;
use crate::event::{EventKind, Header, FLAG_IGNORABLE};
use crate::limits::{CHECKSUM_BYTES, EVENT_HEADER_BYTES};

/// How much is decompressed at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// A payload event is followed piece by piece from this length on; a shorter one is waited for.
const PIECEWISE_BYTES_MIN: usize = 256 << 10;

/// The event that begins an XA transaction is no longer: its text has a bound, and so have its variables.
const FIRST_EVENT_BYTES_MAX: usize = 64 << 10;

/// The fields before the payload are at most four of them, of at most 19 bytes each.
const FIELDS_BYTES_MAX: usize = 128;

/// Where the packed bytes come from.
enum Packed {
    /// They were there at once, and their checksum was right.
    Whole { bytes: Vec<u8>, at: usize },
    /// They pass by in the input: so many of the payload, then so many behind it, are still to come.
    Passing { payload: u64, behind: u64, checksum: Option<crc32fast::Hasher> },
}

/// The payload being read.
pub(super) struct Payload {
    packed: Packed,
    /// None where the payload is not compressed.
    zstd: Option<Zstd<'static>>,
    buffer: Vec<u8>,
    at: usize,
    span: Span,
    plain_bytes: u64,
    read_bytes: u64,
    ended: bool,
}

impl Payload {
    fn new(head: &TransactionPayload<'_>, packed: Packed, span: Span, spare: Option<Zstd<'static>>) -> Result<Payload> {
        let zstd = match (head.compression, spare) {
            (Compression::Zstd, Some(mut spare)) => {
                spare.reinit().map_err(broken)?;
                Some(spare)
            }
            (Compression::Zstd, None) => Some(Zstd::new().map_err(broken)?),
            (Compression::Nothing, _) => None,
        };
        let plain_bytes = head.plain_bytes;
        Ok(Payload { packed, zstd, buffer: Vec::new(), at: 0, span, plain_bytes, read_bytes: 0, ended: false })
    }

    /// Drops what was read and decompresses more. Returns how much of `input` that took; None where more is needed.
    fn refill(&mut self, input: &[u8]) -> Result<Option<usize>> {
        self.buffer.drain(..self.at.min(self.buffer.len()));
        self.at = 0;
        // One byte more than was announced, so that a payload which is longer is found out.
        let due = self.plain_bytes.saturating_sub(self.read_bytes).saturating_add(1);
        let bytes_max = usize::try_from(due).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        let taken = match &mut self.packed {
            Packed::Whole { bytes, at } => {
                let rest = bytes.get(*at..).unwrap_or_default();
                let (taken, written) = unpack(&mut self.zstd, rest, &mut self.buffer, bytes_max)?;
                *at += taken;
                self.read_bytes += written as u64;
                self.ended = taken == 0 && written == 0;
                0
            }
            Packed::Passing { payload, behind, checksum } => {
                let left = usize::try_from(*payload).unwrap_or(usize::MAX);
                let piece = input.get(..left.min(input.len())).unwrap_or_default();
                if piece.is_empty() && left > 0 {
                    return Ok(None);
                }
                let (taken, written) = unpack(&mut self.zstd, piece, &mut self.buffer, bytes_max)?;
                if let Some(checksum) = checksum {
                    checksum.update(piece.get(..taken).unwrap_or_default());
                }
                *payload -= taken as u64;
                self.read_bytes += written as u64;
                if taken == 0 && written == 0 {
                    if *payload > 0 {
                        return Err(malformed("a transaction payload does not go on"));
                    }
                    if *behind > CHECKSUM_BYTES as u64 {
                        return Ok(pass(input, behind, checksum));
                    }
                    let Some(end) = usize::try_from(*behind).ok().and_then(|behind| input.get(..behind)) else {
                        return Ok(None);
                    };
                    verify(checksum.take(), end)?;
                    self.ended = true;
                    end.len()
                } else {
                    taken
                }
            }
        };
        if self.read_bytes > self.plain_bytes {
            return Err(malformed("a transaction payload is longer than it says"));
        }
        Ok(Some(taken))
    }
}

/// Decompresses one piece: how many bytes were taken, and how many, up to a bound, were added to `out`.
pub(crate) fn unpack(
    zstd: &mut Option<Zstd<'static>>,
    packed: &[u8],
    out: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<(usize, usize)> {
    let held = out.len();
    let Some(zstd) = zstd else {
        let piece = packed.get(..packed.len().min(bytes_max)).unwrap_or_default();
        out.extend_from_slice(piece);
        return Ok((piece.len(), piece.len()));
    };
    out.resize(held + bytes_max, 0);
    let space = out.get_mut(held..).unwrap_or_default();
    let mut input = InBuffer::around(packed);
    let mut output = OutBuffer::around(space);
    zstd.run(&mut input, &mut output).map_err(broken)?;
    let (taken, written) = (input.pos(), output.pos());
    out.truncate(held + written);
    Ok((taken, written))
}

/// The id of the XA transaction that a payload holds, if it holds one: its first event says so.
pub(super) fn xa_id_in(body: &[u8]) -> Result<Option<XaId>> {
    let head = TransactionPayload::read(body)?;
    let mut zstd = match head.compression {
        Compression::Zstd => Some(Zstd::new().map_err(broken)?),
        Compression::Nothing => None,
    };
    let mut plain = Vec::new();
    unpack(&mut zstd, head.payload, &mut plain, FIRST_EVENT_BYTES_MAX)?;
    let Some(size) = event_size(&plain)? else { return Ok(None) };
    let mut cursor = Cursor::new(plain.get(..size).unwrap_or_default());
    let header = Header::read(&mut cursor)?;
    if EventKind::from_code(header.code) != Some(EventKind::Query) {
        return Ok(None);
    }
    let query = Query::read(cursor.take_rest())?;
    let text = query.text;
    (query.verb(text) == Verb::Begin && text.starts_with(b"XA")).then(|| XaId::of_statement(text)).transpose()
}

/// Passes over what an event has between its payload and its checksum. None where more is needed.
fn pass(input: &[u8], behind: &mut u64, checksum: &mut Option<crc32fast::Hasher>) -> Option<usize> {
    let left = usize::try_from(*behind - CHECKSUM_BYTES as u64).unwrap_or(usize::MAX);
    let piece = input.get(..left.min(input.len())).filter(|piece| !piece.is_empty())?;
    *behind -= piece.len() as u64;
    if let Some(checksum) = checksum {
        checksum.update(piece);
    }
    Some(piece.len())
}

/// Compares the checksum of everything before the event's last four bytes with these.
fn verify(checksum: Option<crc32fast::Hasher>, behind: &[u8]) -> Result<()> {
    let Some(checksum) = checksum else { return Ok(()) };
    match behind.first_chunk::<CHECKSUM_BYTES>() {
        Some(wanted) if checksum.finalize() == u32::from_le_bytes(*wanted) => Ok(()),
        _ => Err(mismatch()),
    }
}

pub(crate) fn broken(error: io::Error) -> Error {
    malformed(format!("a transaction payload does not decompress: {error}"))
}

impl Decoder {
    pub(super) fn open_payload(&mut self, body: &[u8], span: Span) -> Result<Flow> {
        if self.open.as_ref().is_none_or(|open| open.skipped) {
            // Nothing inside is wanted, and the payload holds the transaction's own commit.
            if self.open.is_some() {
                self.note_passed_payload(body, span);
                self.end(span)?;
            }
            return Ok(Flow::Next);
        }
        let head = TransactionPayload::read(body)?;
        let packed = Packed::Whole { bytes: head.payload.to_vec(), at: 0 };
        self.payload = Some(Box::new(Payload::new(&head, packed, span, self.spare_zstd.take())?));
        Ok(Flow::Next)
    }

    /// Begins to follow a long payload event of which only a part is there. Returns how much of it was taken; None
    /// where the event is no such one, or too little of it is there.
    pub(super) fn open_passing_payload(&mut self, rest: &[u8]) -> Result<Option<usize>> {
        let Some(size) = declared_size(rest)?.filter(|size| *size >= PIECEWISE_BYTES_MIN) else { return Ok(None) };
        let mut cursor = Cursor::new(rest);
        let header = Header::read(&mut cursor)?;
        let wanted = self.open.as_ref().is_some_and(|open| !open.skipped);
        let is_payload = EventKind::from_code(header.code) == Some(EventKind::TransactionPayload);
        if !is_payload || !wanted || cursor.remaining() < FIELDS_BYTES_MAX {
            return Ok(None);
        }
        let has_checksum = self.format.as_ref().is_some_and(|format| format.checksum);
        let fields = cursor.peek().get(..FIELDS_BYTES_MAX).unwrap_or_default();
        let (head, fields_bytes, payload) = TransactionPayload::read_head(fields)?;
        let taken = EVENT_HEADER_BYTES + fields_bytes;
        let behind = (size as u64).checked_sub(taken as u64).and_then(|left| left.checked_sub(payload));
        let smallest = if has_checksum { CHECKSUM_BYTES as u64 } else { 0 };
        let Some(behind) = behind.filter(|behind| *behind >= smallest) else {
            return Err(malformed("a transaction payload is longer than its event"));
        };
        let checksum = (has_checksum && self.options.verify_checksum).then(|| {
            let mut checksum = crc32fast::Hasher::new();
            checksum.update(rest.get(..taken).unwrap_or_default());
            checksum
        });
        let span = self.span(&header)?;
        let packed = Packed::Passing { payload, behind, checksum };
        self.payload = Some(Box::new(Payload::new(&head, packed, span, self.spare_zstd.take())?));
        self.note_event(&header, EventKind::TransactionPayload, span, None);
        self.prove_joint(span)?;
        self.taken(size, span);
        Ok(Some(taken))
    }

    /// Reads one event of the payload, or decompresses more of it. Returns how much of `input` that took; None where
    /// more is needed.
    pub(super) fn step_payload(&mut self, input: &[u8]) -> Result<Option<usize>> {
        let Some(mut payload) = self.payload.take() else { return Ok(Some(0)) };
        let span = payload.span;
        let at_payload = |error: Error| error.at(&self.file, span.start);
        let rest = payload.buffer.get(payload.at..).unwrap_or_default();
        let size = event_size(rest).map_err(at_payload)?;
        // The last event commits, so it waits for the checksum.
        let size = size.filter(|size| payload.ended || rest.len() > *size);
        let Some(size) = size else {
            if !payload.ended {
                let taken = payload.refill(input).map_err(at_payload)?;
                self.payload = Some(payload);
                return Ok(taken);
            }
            let left = rest.len();
            if left > 0 || payload.read_bytes != payload.plain_bytes {
                let message = format!("a transaction payload ends {left} bytes into an event");
                return Err(malformed(message).at(&self.file, span.start));
            }
            self.spare_zstd = payload.zstd;
            return Ok(Some(0));
        };
        let event = rest.get(..size).unwrap_or_default();
        let flow = self.payload_event(event, span).map_err(|error| error.at(&self.file, span.start))?;
        if flow == Flow::Next {
            payload.at += size;
            self.counters.events += 1;
        }
        self.payload = Some(payload);
        Ok(Some(0))
    }

    fn payload_event(&mut self, event: &[u8], span: Span) -> Result<Flow> {
        let mut cursor = Cursor::new(event);
        let header = Header::read(&mut cursor)?;
        let body = event.get(EVENT_HEADER_BYTES..).unwrap_or_default();
        if self.open.is_none() {
            return Err(malformed("a transaction payload goes on after its commit"));
        }
        match EventKind::from_code(header.code) {
            Some(EventKind::TransactionPayload | EventKind::FormatDescription | EventKind::Rotate) => {
                Err(malformed("a transaction payload holds an event that may not be inside one"))
            }
            Some(kind) => self.dispatch(&header, kind, body, span),
            None if header.flags & FLAG_IGNORABLE != 0 => Ok(Flow::Next),
            None => {
                let message = format!("event type {} is not known", header.code);
                Err(Error::new(ErrorKind::EventUnknown, message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_between_a_payload_and_its_checksum_is_passed_piece_by_piece() {
        let mut behind = 6 + CHECKSUM_BYTES as u64;
        let mut checksum = Some(crc32fast::Hasher::new());
        assert_eq!(pass(b"", &mut behind, &mut checksum), None);
        assert_eq!(pass(b"abcd", &mut behind, &mut checksum), Some(4));
        assert_eq!(pass(b"efsum!next", &mut behind, &mut checksum), Some(2));
        assert_eq!(behind, CHECKSUM_BYTES as u64);
        assert_eq!(checksum.unwrap().finalize(), crc32fast::hash(b"abcdef"));
    }
}
