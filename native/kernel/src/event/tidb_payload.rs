//! A payload of TiDB's pump client, or a part of a payload that is too large for one event.
//!
//! ```text
//! bytes of the whole payload u64 │ start of this part u64 │ the part
//! ```

use crate::cursor::Cursor;
use crate::error::{malformed, Result};

/// A part of a payload; usually the whole payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadPart<'a> {
    /// Size of the whole payload in bytes.
    pub total: u64,
    /// The offset of the part in the payload.
    pub start: u64,
    /// The part.
    pub bytes: &'a [u8],
}

impl<'a> PayloadPart<'a> {
    /// Reads the body, without checksum.
    pub fn read(body: &'a [u8]) -> Result<PayloadPart<'a>> {
        let mut cursor = Cursor::new(body);
        let (total, start) = (cursor.u64()?, cursor.u64()?);
        let bytes = cursor.take_rest();
        match start.checked_add(bytes.len() as u64) {
            Some(end) if end <= total && (!bytes.is_empty() || total == 0) => Ok(PayloadPart { total, start, bytes }),
            _ => Err(malformed(format!("{} bytes from {start} of a payload of {total} bytes", bytes.len()))),
        }
    }

    /// Appends the body in the format that `read` expects.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.total.to_le_bytes());
        out.extend_from_slice(&self.start.to_le_bytes());
        out.extend_from_slice(self.bytes);
    }

    /// Whether the payload ends with this part.
    pub fn is_last(&self) -> bool {
        self.start + self.bytes.len() as u64 == self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_lies_inside_its_payload() {
        for (total, start, bytes, valid) in [
            (5, 0, &b"whole"[..], true),
            (9, 4, b"part.", true),
            (0, 0, b"", true),
            (9, 5, b"part.", false),
            (9, 4, b"", false),
            (9, u64::MAX, b"part.", false),
        ] {
            let part = PayloadPart { total, start, bytes };
            let mut body = Vec::new();
            part.write(&mut body);
            assert_eq!(PayloadPart::read(&body).ok(), valid.then_some(part), "{part:?}");
        }
    }
}
