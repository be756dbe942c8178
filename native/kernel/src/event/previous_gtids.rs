//! The GTIDs of all earlier files (MySQL, code 35).

use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::tagged_gtid::varlen;
use crate::gtid::GtidSet;

/// Reads the body, without checksum (`Gtid_set::add_gtid_encoding`).
///
/// Layout: a count, then the intervals of each uuid (and tag). The highest byte of the count is the format: 1 means
/// that GTIDs have tags, and that the count is in the six bytes in the middle.
pub fn read(body: &[u8]) -> Result<GtidSet> {
    let mut cursor = Cursor::new(body);
    let raw = cursor.u64()?;
    let tagged = raw >> 56 == 1;
    let count = if tagged { raw << 8 >> 16 } else { raw };
    let mut set = GtidSet::default();
    for _ in 0..count {
        let mut uuid = [0u8; 16];
        uuid.copy_from_slice(cursor.take(16)?);
        let tag = if tagged {
            let length = usize::try_from(varlen(&mut cursor)?).map_err(|_| malformed("a tag's length"))?;
            std::str::from_utf8(cursor.take(length)?).map_err(|_| malformed("a tag"))?
        } else {
            ""
        };
        let mut previous_end = 0;
        for _ in 0..cursor.u64()? {
            let start = cursor.u64()?;
            let end = cursor.u64()?;
            if start <= previous_end || end <= start {
                return Err(malformed("GTID intervals that are empty or out of order"));
            }
            previous_end = end;
            set.add_interval(uuid, tag, start, end);
        }
    }
    Ok(set)
}
