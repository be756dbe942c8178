//! Transactions in one compressed event, followed as they decompress.
//!
//! Such an event may be a gigabyte long and hold many, so neither it nor what is in it is ever held whole: where its
//! end is not there yet, what is there is decompressed and let go. Its last event, which commits, is taken only after
//! the checksum of the whole was verified.

use zstd::stream::raw::{Decoder as Zstd, Operation};

use crate::error::{malformed, Result};
use crate::event::transaction_payload::{Compression, TransactionPayload};
use crate::frame::events::{mismatch, Span};
use crate::frame::unpack::{broken, unpack, CHUNK_BYTES};
use crate::limits::CHECKSUM_BYTES;

/// Where the packed bytes come from.
pub(super) enum Packed {
    /// They were there at once, and their checksum was right.
    Whole { bytes: Vec<u8>, at: usize },
    /// They pass by in the input: so many of the payload, then so many behind it, are still to come.
    Passing { payload: u64, behind: u64, checksum: Option<crc32fast::Hasher> },
}

/// The payload being read.
pub(super) struct Payload {
    pub(super) packed: Packed,
    /// None where the payload is not compressed.
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
    pub fn refill(&mut self, input: &[u8]) -> Result<Option<usize>> {
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

/// Passes over what an event has between its payload and its checksum. None where more is needed.
pub(super) fn pass(input: &[u8], behind: &mut u64, checksum: &mut Option<crc32fast::Hasher>) -> Option<usize> {
    let left = usize::try_from(*behind - CHECKSUM_BYTES as u64).unwrap_or(usize::MAX);
    let piece = input.get(..left.min(input.len())).filter(|piece| !piece.is_empty())?;
    *behind -= piece.len() as u64;
    if let Some(checksum) = checksum {
        checksum.update(piece);
    }
    Some(piece.len())
}

/// Compares the checksum of everything before the event's last four bytes with these.
pub(super) fn verify(checksum: Option<crc32fast::Hasher>, behind: &[u8]) -> Result<()> {
    let Some(checksum) = checksum else { return Ok(()) };
    match behind.first_chunk::<CHECKSUM_BYTES>() {
        Some(wanted) if checksum.finalize() == u32::from_le_bytes(*wanted) => Ok(()),
        _ => Err(mismatch()),
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
