//! Compressed transactions: what is inside is looked at as it decompresses, and never held whole.

use zstd::stream::raw::{Decoder as Zstd, Operation};

use super::cutter::BlockCutter;
use super::unpacking::Unpacking;
use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::transaction_payload::{Compression, TransactionPayload};
use crate::event::{EventKind, Header};
use crate::frame::events::{event_size, Span};
use crate::frame::unpack::{broken, unpack, CHUNK_BYTES};
use crate::limits::EVENT_HEADER_BYTES;

impl BlockCutter {
    /// Looks into a payload. Its checksum has held, so what cannot be read is kept, and said to be uncounted.
    pub(super) fn payload(&mut self, body: &[u8], span: Span) -> Result<()> {
        if self.open.is_none() || self.look_into(body, span).is_err() {
            self.note_uncounted();
            // A payload holds the whole rest of its transaction.
            self.end(span);
        }
        Ok(())
    }

    fn look_into(&mut self, body: &[u8], span: Span) -> Result<()> {
        let head = TransactionPayload::read(body)?;
        let mut unpacking = std::mem::take(&mut self.unpacking);
        let done = self.walk_payload(&head, &mut unpacking, span);
        unpacking.buffer.clear();
        unpacking.buffer.shrink_to(2 * CHUNK_BYTES);
        self.unpacking = unpacking;
        done
    }

    fn walk_payload(&mut self, head: &TransactionPayload<'_>, unpacking: &mut Unpacking, span: Span) -> Result<()> {
        let mut zstd = match head.compression {
            Compression::Nothing => None,
            Compression::Zstd => Some(match unpacking.zstd.take() {
                Some(mut spare) => {
                    spare.reinit().map_err(broken)?;
                    spare
                }
                None => Zstd::new().map_err(broken)?,
            }),
        };
        let buffer = &mut unpacking.buffer;
        let (mut packed, mut plain_bytes) = (head.payload, 0);
        loop {
            // One byte more than was announced, so that a payload which is longer is found out.
            let due = head.plain_bytes.saturating_sub(plain_bytes).saturating_add(1);
            let bytes_max = usize::try_from(due).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let (taken, written) = unpack(&mut zstd, packed, buffer, bytes_max)?;
            packed = packed.get(taken..).unwrap_or_default();
            plain_bytes += written as u64;
            if plain_bytes > head.plain_bytes {
                return Err(malformed("a transaction payload is longer than it says"));
            }
            if taken == 0 && written == 0 {
                break;
            }
            let walked = self.walk_events(buffer, span)?;
            buffer.drain(..walked.min(buffer.len()));
        }
        if !buffer.is_empty() || plain_bytes != head.plain_bytes {
            return Err(malformed("a transaction payload ends inside an event"));
        }
        unpacking.zstd = zstd;
        Ok(())
    }

    /// Takes the whole events at the front and returns how many bytes they are.
    fn walk_events(&mut self, plain: &[u8], span: Span) -> Result<usize> {
        let mut at = 0;
        loop {
            let rest = plain.get(at..).unwrap_or_default();
            let Some(size) = event_size(rest)? else { return Ok(at) };
            let event = rest.get(..size).unwrap_or_default();
            let header = Header::read(&mut Cursor::new(event))?;
            let kind = EventKind::from_code(header.code);
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
