//! Compressed transactions, decoded while they are decompressed.
//!
//! A payload event may be a gigabyte long and decompress to a multiple of that, so memory never holds a whole payload:
//! bytes are decompressed and dropped as they arrive. The last event, which commits the transaction, is processed only
//! after the checksum of the whole payload event has been verified.

use zstd::stream::raw::{Decoder as Zstd, Operation};

use crate::error::{malformed, Result};
use crate::event::transaction_payload::{Compression, TransactionPayload};
use crate::frame::events::{mismatch, Span};
use crate::frame::unpack::{decompression_error, unpack, CHUNK_BYTES};
use crate::limits::CHECKSUM_BYTES;

/// The source of the compressed bytes.
pub(super) enum Packed {
    /// All bytes were available, and the checksum was correct.
    Whole { bytes: Vec<u8>, at: usize },
    /// The bytes arrive with the input. `payload` and `trailing` count the bytes that have not arrived yet: those of
    /// the payload, and those after it.
    Streaming { payload: u64, trailing: u64, checksum: Option<crc32fast::Hasher> },
}

/// The payload being read.
pub(super) struct Payload {
    pub(super) packed: Packed,
    /// The zstd decoder; None if the payload is not compressed.
    pub(super) zstd: Option<Zstd<'static>>,
    pub(super) buffer: Vec<u8>,
    pub(super) at: usize,
    pub(super) span: Span,
    pub(super) plain_bytes: u64,
    pub(super) read_bytes: u64,
    pub(super) ended: bool,
}

impl Payload {
    pub fn new(
        head: &TransactionPayload<'_>,
        packed: Packed,
        span: Span,
        spare: Option<Zstd<'static>>,
    ) -> Result<Payload> {
        let zstd = match (head.compression, spare) {
            (Compression::Zstd, Some(mut spare)) => {
                spare.reinit().map_err(decompression_error)?;
                Some(spare)
            }
            (Compression::Zstd, None) => Some(Zstd::new().map_err(decompression_error)?),
            (Compression::Nothing, _) => None,
        };
        let plain_bytes = head.plain_bytes;
        Ok(Payload { packed, zstd, buffer: Vec::new(), at: 0, span, plain_bytes, read_bytes: 0, ended: false })
    }

    /// Drops processed bytes and decompresses more. Returns how many bytes of `input` were consumed; None if more are
    /// needed.
    pub fn refill(&mut self, input: &[u8]) -> Result<Option<usize>> {
        self.buffer.drain(..self.at.min(self.buffer.len()));
        self.at = 0;
        // Allow one byte more than announced, to detect a payload that is too long.
        let due = self.plain_bytes.saturating_sub(self.read_bytes).saturating_add(1);
        let bytes_max = usize::try_from(due).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        let consumed = match &mut self.packed {
            Packed::Whole { bytes, at } => {
                let rest = bytes.get(*at..).unwrap_or_default();
                let (consumed, written) = unpack(&mut self.zstd, rest, &mut self.buffer, bytes_max)?;
                *at += consumed;
                self.read_bytes += written as u64;
                self.ended = consumed == 0 && written == 0;
                0
            }
            Packed::Streaming { payload, trailing, checksum } => {
                let left = usize::try_from(*payload).unwrap_or(usize::MAX);
                let piece = input.get(..left.min(input.len())).unwrap_or_default();
                if piece.is_empty() && left > 0 {
                    return Ok(None);
                }
                let (consumed, written) = unpack(&mut self.zstd, piece, &mut self.buffer, bytes_max)?;
                if let Some(checksum) = checksum {
                    checksum.update(piece.get(..consumed).unwrap_or_default());
                }
                *payload -= consumed as u64;
                self.read_bytes += written as u64;
                if consumed == 0 && written == 0 {
                    if *payload > 0 {
                        return Err(malformed("a transaction payload does not go on"));
                    }
                    if *trailing > CHECKSUM_BYTES as u64 {
                        return Ok(skip_trailing(input, trailing, checksum));
                    }
                    let Some(end) = usize::try_from(*trailing).ok().and_then(|trailing| input.get(..trailing)) else {
                        return Ok(None);
                    };
                    verify(checksum.take(), end)?;
                    self.ended = true;
                    end.len()
                } else {
                    consumed
                }
            }
        };
        if self.read_bytes > self.plain_bytes {
            return Err(malformed("a transaction payload is longer than it says"));
        }
        Ok(Some(consumed))
    }
}

/// Skips the bytes between an event's payload and its checksum. Returns None if more bytes are needed.
pub(super) fn skip_trailing(
    input: &[u8],
    trailing: &mut u64,
    checksum: &mut Option<crc32fast::Hasher>,
) -> Option<usize> {
    let left = usize::try_from(*trailing - CHECKSUM_BYTES as u64).unwrap_or(usize::MAX);
    let piece = input.get(..left.min(input.len())).filter(|piece| !piece.is_empty())?;
    *trailing -= piece.len() as u64;
    if let Some(checksum) = checksum {
        checksum.update(piece);
    }
    Some(piece.len())
}

/// Compares the checksum of all preceding bytes with the last four bytes of the event.
pub(super) fn verify(checksum: Option<crc32fast::Hasher>, trailing: &[u8]) -> Result<()> {
    let Some(checksum) = checksum else { return Ok(()) };
    match trailing.first_chunk::<CHECKSUM_BYTES>() {
        Some(expected) if checksum.finalize() == u32::from_le_bytes(*expected) => Ok(()),
        _ => Err(mismatch()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailing_bytes_are_skipped_piece_by_piece() {
        let mut trailing = 6 + CHECKSUM_BYTES as u64;
        let mut checksum = Some(crc32fast::Hasher::new());
        assert_eq!(skip_trailing(b"", &mut trailing, &mut checksum), None);
        assert_eq!(skip_trailing(b"abcd", &mut trailing, &mut checksum), Some(4));
        assert_eq!(skip_trailing(b"efsum!next", &mut trailing, &mut checksum), Some(2));
        assert_eq!(trailing, CHECKSUM_BYTES as u64);
        assert_eq!(checksum.unwrap().finalize(), crc32fast::hash(b"abcdef"));
    }
}
