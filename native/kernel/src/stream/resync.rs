//! Finding the first event behind any byte.
//!
//! An event header says where the event ends in its file, so a place where that agrees with the place itself is an
//! event but for one chance in 2^32; the checksum makes it one in 2^64. From there whole events are followed up to
//! the first that opens a transaction.

use super::frame::checksum_holds;
use super::Decoder;
use crate::cursor::Cursor;
use crate::error::Result;
use crate::event::{EventKind, Header};
use crate::limits::{EVENT_BYTES_MAX, EVENT_HEADER_BYTES};

/// What a place in the bytes turned out to be.
enum Candidate {
    No,
    Event,
    NeedsMore,
}

impl Decoder {
    /// Passes over bytes up to the next event; None where more bytes are needed to tell.
    pub(super) fn search(&mut self, rest: &[u8]) -> Result<Option<usize>> {
        let checksum = self.format.as_ref().is_some_and(|format| format.checksum);
        let places = (rest.len() + 1).saturating_sub(EVENT_HEADER_BYTES);
        for at in 0..places {
            let bytes = rest.get(at..).unwrap_or_default();
            match candidate(bytes, self.offset + at as u64, checksum)? {
                Candidate::No => {}
                Candidate::Event => {
                    self.searching = false;
                    self.offset += at as u64;
                    self.boundary = (self.file.clone(), self.offset);
                    return Ok(Some(at));
                }
                Candidate::NeedsMore if at > 0 => {
                    self.offset += at as u64;
                    return Ok(Some(at));
                }
                Candidate::NeedsMore => return Ok(None),
            }
        }
        if places == 0 {
            return Ok(None);
        }
        self.offset += places as u64;
        Ok(Some(places))
    }
}

#[inline]
fn candidate(bytes: &[u8], offset: u64, checksum: bool) -> Result<Candidate> {
    let Some(mut head) = bytes.get(..EVENT_HEADER_BYTES).map(Cursor::new) else { return Ok(Candidate::NeedsMore) };
    let header = Header::read(&mut head)?;
    let size = header.size as usize;
    if header.end_position == 0 || (offset + size as u64) as u32 != header.end_position {
        return Ok(Candidate::No);
    }
    if !(EVENT_HEADER_BYTES..=EVENT_BYTES_MAX).contains(&size) || EventKind::from_code(header.code).is_none() {
        return Ok(Candidate::No);
    }
    if !checksum {
        // Without a checksum the next header has to agree as well.
        let Some(mut next) = bytes.get(size..size + EVENT_HEADER_BYTES).map(Cursor::new) else {
            return Ok(if bytes.len() == size { Candidate::Event } else { Candidate::NeedsMore });
        };
        let next = Header::read(&mut next)?;
        let agrees = EventKind::from_code(next.code).is_some()
            && (next.end_position == 0 || header.end_position.wrapping_add(next.size) == next.end_position);
        return Ok(if agrees { Candidate::Event } else { Candidate::No });
    }
    match bytes.get(..size) {
        Some(event) if checksum_holds(event) => Ok(Candidate::Event),
        Some(_) => Ok(Candidate::No),
        None => Ok(Candidate::NeedsMore),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::crc32;

    const OFFSET: u64 = 1000;
    const XID: u8 = 16;

    fn event(offset: u64, checksum: bool) -> Vec<u8> {
        let size = EVENT_HEADER_BYTES + 8 + if checksum { 4 } else { 0 };
        let end_position = offset as u32 + size as u32;
        let mut bytes = [1_u32.to_le_bytes().as_slice(), &[XID], &7_u32.to_le_bytes()].concat();
        bytes.extend((size as u32).to_le_bytes());
        bytes.extend(end_position.to_le_bytes());
        bytes.extend([0; 10]);
        if checksum {
            bytes.extend(crc32(&bytes).to_le_bytes());
        }
        assert_eq!(bytes.len(), size);
        bytes
    }

    fn two_events() -> Vec<u8> {
        let first = event(OFFSET, false);
        let second = event(OFFSET + first.len() as u64, false);
        [first, second].concat()
    }

    #[test]
    fn a_checksum_proves_an_event() {
        let whole = event(OFFSET, true);
        assert!(matches!(candidate(&whole, OFFSET, true), Ok(Candidate::Event)));
        assert!(matches!(candidate(&whole[..whole.len() - 1], OFFSET, true), Ok(Candidate::NeedsMore)));
        let mut damaged = whole;
        damaged[EVENT_HEADER_BYTES] ^= 1;
        // The next header agrees; without the checksum this would be an event.
        damaged.extend(event(OFFSET + damaged.len() as u64, true));
        assert!(matches!(candidate(&damaged, OFFSET, true), Ok(Candidate::No)));
    }

    #[test]
    fn the_next_header_proves_an_event_without_a_checksum() {
        let bytes = two_events();
        let size = bytes.len() / 2;
        assert!(matches!(candidate(&bytes, OFFSET, false), Ok(Candidate::Event)));
        assert!(matches!(candidate(&bytes[..size], OFFSET, false), Ok(Candidate::Event)));
        assert!(matches!(candidate(&bytes[..size + 1], OFFSET, false), Ok(Candidate::NeedsMore)));
        let mut unknown = bytes.clone();
        unknown[size + 4] = 250;
        assert!(matches!(candidate(&unknown, OFFSET, false), Ok(Candidate::No)));
        let mut elsewhere = bytes;
        elsewhere[size + 13] ^= 1;
        assert!(matches!(candidate(&elsewhere, OFFSET, false), Ok(Candidate::No)));
    }

    #[test]
    fn an_event_at_another_offset_is_refused() {
        assert!(matches!(candidate(&event(OFFSET, true), OFFSET + 1, true), Ok(Candidate::No)));
        assert!(matches!(candidate(&two_events(), OFFSET - 1, false), Ok(Candidate::No)));
    }
}
