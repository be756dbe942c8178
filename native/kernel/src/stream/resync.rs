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
