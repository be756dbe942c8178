//! Processes the events of compressed transactions while decompressing, so that memory never holds a whole transaction.

use zstd::stream::raw::{Decoder as Zstd, Operation};

use super::cutter::BlockCutter;
use super::decompressor::Decompressor;
use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::transaction_payload::{Compression, TransactionPayload};
use crate::event::{EventKind, Header};
use crate::frame::events::{event_size, Span};
use crate::frame::unpack::{decompression_error, unpack, CHUNK_BYTES};
use crate::limits::EVENT_HEADER_BYTES;

impl BlockCutter {
    /// Processes a payload. Its checksum is valid, so a payload that cannot be read is kept and marked as uncounted.
    pub(super) fn process_payload(&mut self, body: &[u8], span: Span) -> Result<()> {
        if self.open.is_none() || self.count_payload(body, span).is_err() {
            self.note_uncounted();
            // A payload always holds the rest of its transaction.
            self.end(span);
        }
        Ok(())
    }

    fn count_payload(&mut self, body: &[u8], span: Span) -> Result<()> {
        let head = TransactionPayload::read(body)?;
        let mut decompressor = std::mem::take(&mut self.decompressor);
        let outcome = self.decompress_events(&head, &mut decompressor, span);
        decompressor.buffer.clear();
        decompressor.buffer.shrink_to(2 * CHUNK_BYTES);
        self.decompressor = decompressor;
        outcome
    }

    fn decompress_events(
        &mut self,
        head: &TransactionPayload<'_>,
        decompressor: &mut Decompressor,
        span: Span,
    ) -> Result<()> {
        let mut zstd = match head.compression {
            Compression::Nothing => None,
            Compression::Zstd => Some(match decompressor.zstd.take() {
                Some(mut spare) => {
                    spare.reinit().map_err(decompression_error)?;
                    spare
                }
                None => Zstd::new().map_err(decompression_error)?,
            }),
        };
        let buffer = &mut decompressor.buffer;
        let (mut packed, mut plain_bytes) = (head.payload, 0);
        loop {
            // Allow one byte more than announced, to detect a payload that is too long.
            let due = head.plain_bytes.saturating_sub(plain_bytes).saturating_add(1);
            let bytes_max = usize::try_from(due).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let (consumed, written) = unpack(&mut zstd, packed, buffer, bytes_max)?;
            packed = packed.get(consumed..).unwrap_or_default();
            plain_bytes += written as u64;
            if plain_bytes > head.plain_bytes {
                return Err(malformed("a transaction payload is longer than it says"));
            }
            if consumed == 0 && written == 0 {
                break;
            }
            let processed_bytes = self.process_events(buffer, span)?;
            buffer.drain(..processed_bytes.min(buffer.len()));
        }
        if !buffer.is_empty() || plain_bytes != head.plain_bytes {
            return Err(malformed("a transaction payload ends inside an event"));
        }
        decompressor.zstd = zstd;
        Ok(())
    }

    /// Processes the complete events at the start of `plain` and returns their size in bytes.
    fn process_events(&mut self, plain: &[u8], span: Span) -> Result<usize> {
        let mut at = 0;
        loop {
            let rest = plain.get(at..).unwrap_or_default();
            let Some(size) = event_size(rest)? else { return Ok(at) };
            let event = rest.get(..size).unwrap_or_default();
            let header = Header::read(&mut Cursor::new(event))?;
            let kind = header.kind();
            let may_be_inside =
                !matches!(kind, Some(EventKind::TransactionPayload | EventKind::FormatDescription | EventKind::Rotate));
            if self.open.is_none() || !may_be_inside {
                return Err(malformed("a transaction payload holds what may not be inside one"));
            }
            self.dispatch(&header, kind, event.get(EVENT_HEADER_BYTES..).unwrap_or_default(), span)?;
            at += size;
        }
    }
}
