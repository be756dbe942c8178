//! Locates events by following their headers.
//!
//! An event may contain arbitrary bytes, even a copy of a whole transaction. Only a chain of headers that starts at a
//! known event proves where another event starts.

use super::Header;
use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::limits::{EVENT_BYTES_MAX, EVENT_HEADER_BYTES};

/// The end of a chain of headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Followed {
    /// Start of the last event whose header is in the bytes and that starts at or before the target.
    pub last: Option<u64>,
    /// Start of the event that follows. It is after the target, or its header is not in the bytes.
    pub next: u64,
}

/// Follows events up to `target`.
///
/// `bytes` starts with an event header at `offset` of its file. Bodies are skipped: checksums are not verified, and the
/// bytes do not have to contain the last body.
pub fn follow(bytes: &[u8], offset: u64, target: u64) -> Result<Followed> {
    let mut followed = Followed { last: None, next: offset };
    while followed.next <= target {
        let skipped = usize::try_from(followed.next - offset).unwrap_or(usize::MAX);
        let Some(head) = bytes.get(skipped..).and_then(|rest| rest.get(..EVENT_HEADER_BYTES)) else { break };
        let size = Header::read(&mut Cursor::new(head))?.size;
        if !(EVENT_HEADER_BYTES..=EVENT_BYTES_MAX).contains(&(size as usize)) {
            return Err(malformed(format!("the event at {} says it is {size} bytes long", followed.next)));
        }
        followed = Followed { last: Some(followed.next), next: followed.next + u64::from(size) };
    }
    Ok(followed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFSET: u64 = (1 << 32) - 30;

    fn header(size: u32) -> Vec<u8> {
        let mut bytes = vec![0; EVENT_HEADER_BYTES];
        bytes[9..13].copy_from_slice(&size.to_le_bytes());
        bytes
    }

    fn event(body: &[u8]) -> Vec<u8> {
        [header((EVENT_HEADER_BYTES + body.len()) as u32).as_slice(), body].concat()
    }

    #[test]
    fn an_event_inside_a_body_is_skipped() {
        let inner = event(b"forged");
        let bytes = [event(&inner), event(b"second")].concat();
        let second = OFFSET + (EVENT_HEADER_BYTES + inner.len()) as u64;
        for target in OFFSET..second {
            let followed = Followed { last: Some(OFFSET), next: second };
            assert_eq!(follow(&bytes, OFFSET, target), Ok(followed), "{target}");
        }
        let end = OFFSET + bytes.len() as u64;
        assert_eq!(follow(&bytes, OFFSET, second), Ok(Followed { last: Some(second), next: end }));
        assert_eq!(follow(&bytes, OFFSET, u64::MAX), Ok(Followed { last: Some(second), next: end }));
    }

    #[test]
    fn a_missing_body_is_accepted() {
        let bytes = header(1000);
        assert_eq!(follow(&bytes, 4, 500), Ok(Followed { last: Some(4), next: 1004 }));
        assert_eq!(follow(&bytes, 4, 5000), Ok(Followed { last: Some(4), next: 1004 }));
        assert_eq!(follow(&bytes[..18], 4, 500), Ok(Followed { last: None, next: 4 }));
        assert_eq!(follow(&bytes, 4, 3), Ok(Followed { last: None, next: 4 }));
    }

    #[test]
    fn an_impossible_size_is_rejected() {
        for size in [0, 18, u32::MAX] {
            assert!(follow(&header(size), 4, 500).is_err(), "{size}");
        }
        assert!(follow(&header(19), 4, 500).is_ok());
    }
}
