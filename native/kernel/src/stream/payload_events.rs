//! Processes the events inside payloads.

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
use crate::frame::unpack::{decompression_error, unpack, CHUNK_BYTES};
use crate::limits::{CHECKSUM_BYTES, EVENT_HEADER_BYTES};

/// Payload events of at least this length are streamed; shorter events are buffered until complete.
const PIECEWISE_BYTES_MIN: usize = 256 << 10;

/// Maximum size of the event that begins an XA transaction, since its text and its variables have limited lengths.
const FIRST_EVENT_BYTES_MAX: usize = 64 << 10;

/// There are at most four fields before the payload, of at most 19 bytes each.
const FIELDS_BYTES_MAX: usize = 128;

/// Returns the id of the XA transaction in a payload, if the payload's first event begins an XA transaction.
pub(super) fn read_xa_id(body: &[u8]) -> Result<Option<XaId>> {
    let head = TransactionPayload::read(body)?;
    let mut zstd = match head.compression {
        Compression::Zstd => Some(Zstd::new().map_err(decompression_error)?),
        Compression::Nothing => None,
    };
    let mut plain = Vec::new();
    unpack(&mut zstd, head.payload, &mut plain, FIRST_EVENT_BYTES_MAX)?;
    let Some(size) = event_size(&plain)? else { return Ok(None) };
    let mut cursor = Cursor::new(plain.get(..size).unwrap_or_default());
    let header = Header::read(&mut cursor)?;
    if header.kind() != Some(EventKind::Query) {
        return Ok(None);
    }
    let query = Query::read(cursor.take_rest())?;
    let text = query.text;
    (query.verb(text) == Verb::Begin && text.starts_with(b"XA")).then(|| XaId::of_statement(text)).transpose()
}

/// Calls `visit` with the header and the body of each event in a payload. Raises `EventMalformed` if the payload ends
/// inside an event, and propagates errors from `visit`.
pub(super) fn visit_payload(body: &[u8], mut visit: impl FnMut(&Header, &[u8]) -> Result<()>) -> Result<()> {
    let head = TransactionPayload::read(body)?;
    let mut zstd = match head.compression {
        Compression::Zstd => Some(Zstd::new().map_err(decompression_error)?),
        Compression::Nothing => None,
    };
    let (mut packed, mut plain) = (head.payload, Vec::new());
    loop {
        let (consumed, written) = unpack(&mut zstd, packed, &mut plain, CHUNK_BYTES)?;
        if consumed == 0 && written == 0 {
            return match plain.len() {
                0 => Ok(()),
                left => Err(malformed(format!("a transaction payload ends {left} bytes into an event"))),
            };
        }
        packed = packed.get(consumed..).unwrap_or_default();
        let mut at = 0;
        while let Some(size) = event_size(plain.get(at..).unwrap_or_default())? {
            let mut cursor = Cursor::new(plain.get(at..at + size).unwrap_or_default());
            let header = Header::read(&mut cursor)?;
            visit(&header, cursor.take_rest())?;
            at += size;
        }
        plain.drain(..at);
    }
}

impl Decoder {
    pub(super) fn open_payload(&mut self, body: &[u8], span: Span) -> Result<Flow> {
        if self.open.as_ref().is_none_or(|open| open.skipped) {
            // Skip the payload: its rows are not needed, and it includes the commit of its transaction.
            if self.open.is_some() {
                self.note_skipped_payload(body, span);
                self.end(span)?;
            }
            return Ok(Flow::Next);
        }
        let head = TransactionPayload::read(body)?;
        let packed = Packed::Whole { bytes: head.payload.to_vec(), at: 0 };
        self.payload = Some(Box::new(Payload::new(&head, packed, span, self.spare_zstd.take())?));
        Ok(Flow::Next)
    }

    /// Starts to stream a long payload event that has not arrived completely. Returns how many bytes were consumed, or
    /// `None` if the event is not a long payload, or if more bytes are needed.
    pub(super) fn open_streaming_payload(&mut self, rest: &[u8]) -> Result<Option<usize>> {
        let Some(size) = declared_size(rest)?.filter(|size| *size >= PIECEWISE_BYTES_MIN) else { return Ok(None) };
        let mut cursor = Cursor::new(rest);
        let header = Header::read(&mut cursor)?;
        let in_range = self.open.as_ref().is_some_and(|open| !open.skipped);
        let is_payload = header.kind() == Some(EventKind::TransactionPayload);
        if !is_payload || !in_range || cursor.remaining() < FIELDS_BYTES_MAX {
            return Ok(None);
        }
        let has_checksum = self.format.as_ref().is_some_and(|format| format.checksum);
        let fields = cursor.peek().get(..FIELDS_BYTES_MAX).unwrap_or_default();
        let (head, fields_bytes, payload) = TransactionPayload::read_head(fields)?;
        let consumed = EVENT_HEADER_BYTES + fields_bytes;
        let trailing = (size as u64).checked_sub(consumed as u64).and_then(|left| left.checked_sub(payload));
        let smallest = if has_checksum { CHECKSUM_BYTES as u64 } else { 0 };
        let Some(trailing) = trailing.filter(|trailing| *trailing >= smallest) else {
            return Err(malformed("a transaction payload is longer than its event"));
        };
        let checksum = (has_checksum && self.options.verify_checksum).then(|| {
            let mut checksum = crc32fast::Hasher::new();
            checksum.update(rest.get(..consumed).unwrap_or_default());
            checksum
        });
        let span = self.locate_event(&header)?;
        let packed = Packed::Streaming { payload, trailing, checksum };
        self.payload = Some(Box::new(Payload::new(&head, packed, span, self.spare_zstd.take())?));
        self.note_event(&header, EventKind::TransactionPayload, span, None);
        self.prove_joint(span)?;
        self.move_past(size, span);
        Ok(Some(consumed))
    }

    /// Processes one event of the payload, or decompresses more of the payload. Returns how many bytes of `input` were
    /// consumed, or `None` if more are needed.
    pub(super) fn step_payload(&mut self, input: &[u8]) -> Result<Option<usize>> {
        let Some(mut payload) = self.payload.take() else { return Ok(Some(0)) };
        let span = payload.span;
        let at_payload = |error: Error| error.at(&self.file, span.start);
        let rest = payload.buffer.get(payload.at..).unwrap_or_default();
        let size = event_size(rest).map_err(at_payload)?;
        // The last event commits, so it waits until the checksum is verified.
        let size = size.filter(|size| payload.ended || rest.len() > *size);
        let Some(size) = size else {
            if !payload.ended {
                let consumed = payload.refill(input).map_err(at_payload)?;
                self.payload = Some(payload);
                return Ok(consumed);
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
        let flow = self.process_payload_event(event, span).map_err(|error| error.at(&self.file, span.start))?;
        if flow == Flow::Next {
            payload.at += size;
            self.counters.events += 1;
        }
        self.payload = Some(payload);
        Ok(Some(0))
    }

    fn process_payload_event(&mut self, event: &[u8], span: Span) -> Result<Flow> {
        let mut cursor = Cursor::new(event);
        let header = Header::read(&mut cursor)?;
        let body = event.get(EVENT_HEADER_BYTES..).unwrap_or_default();
        if self.open.is_none() {
            return Err(malformed("a transaction payload goes on after its commit"));
        }
        match header.kind() {
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
