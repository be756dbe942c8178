//! The events inside payloads, one after the other.

use zstd::stream::raw::Decoder as Zstd;

use super::decoder::{Decoder, Flow};
use super::payload::{Packed, Payload};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::query::{Query, Verb};
use crate::event::transaction_payload::{Compression, TransactionPayload};
use crate::event::xa::XaId;
use crate::event::{EventKind, Header, FLAG_IGNORABLE};
use crate::frame::events::{declared_size, event_size, Span};
use crate::frame::unpack::{broken, unpack};
use crate::limits::{CHECKSUM_BYTES, EVENT_HEADER_BYTES};

/// A payload event is followed piece by piece from this length on; a shorter one is waited for.
const PIECEWISE_BYTES_MIN: usize = 256 << 10;

/// The event that begins an XA transaction is no longer: its text has a bound, and so have its variables.
const FIRST_EVENT_BYTES_MAX: usize = 64 << 10;

/// The fields before the payload are at most four of them, of at most 19 bytes each.
const FIELDS_BYTES_MAX: usize = 128;

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
