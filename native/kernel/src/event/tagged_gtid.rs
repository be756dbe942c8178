//! The tagged GTID event (MySQL 8.3 and later, code 42).
//!
//! The server writes the body with its own serialization library (`mysql::serialization`): a version, the size of the
//! message, the id of the last field that readers must understand, then the fields, each after its id. Integers have
//! variable length: the number of trailing one bits in the first byte is the number of bytes that follow.

use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::gtid::TransactionHead;
use crate::gtid::Gtid;

const FIELD_FLAGS: u64 = 0;
const FIELD_UUID: u64 = 1;
const FIELD_NUMBER: u64 = 2;
const FIELD_TAG: u64 = 3;
const FIELD_LAST_COMMITTED: u64 = 4;
const FIELD_SEQUENCE: u64 = 5;
const FIELD_IMMEDIATE_US: u64 = 6;
const FIELD_LENGTH: u64 = 8;

/// Reads an unsigned integer of variable length.
pub fn varlen(cursor: &mut Cursor<'_>) -> Result<u64> {
    let first = cursor.u8()?;
    let following_bytes = first.trailing_ones();
    if following_bytes == 8 {
        return cursor.u64();
    }
    let low = u64::from(first) >> (following_bytes + 1);
    let high = cursor.uint(usize::try_from(following_bytes).unwrap_or(0))?;
    // If seven bytes follow, the first byte has no bits of the number.
    Ok(low | high << (7 - following_bytes))
}

/// Reads a signed integer. The lowest bit is the sign; a negative value is stored as its complement.
fn varlen_signed(cursor: &mut Cursor<'_>) -> Result<i64> {
    let raw = varlen(cursor)?;
    let magnitude = i64::try_from(raw >> 1).map_err(|_| malformed("a signed integer"))?;
    Ok(if raw & 1 == 1 { -magnitude - 1 } else { magnitude })
}

fn read_number(cursor: &mut Cursor<'_>) -> Result<u64> {
    u64::try_from(varlen_signed(cursor)?).map_err(|_| malformed("a negative transaction number"))
}

/// Reads the body, without checksum. Stops after the transaction's length, the last field that is needed.
pub fn read(body: &[u8]) -> Result<TransactionHead> {
    let mut cursor = Cursor::new(body);
    varlen(&mut cursor)?;
    varlen(&mut cursor)?;
    varlen(&mut cursor)?;
    let mut uuid = [0u8; 16];
    let mut tag = String::new();
    let mut count = 0;
    let mut head = TransactionHead::default();
    let mut clock = (0, 0);
    while !cursor.is_empty() {
        match varlen(&mut cursor)? {
            FIELD_FLAGS => {
                varlen(&mut cursor)?;
            }
            FIELD_UUID => {
                for byte in &mut uuid {
                    *byte = u8::try_from(varlen(&mut cursor)?).map_err(|_| malformed("a uuid's byte"))?;
                }
            }
            FIELD_NUMBER => count = read_number(&mut cursor)?,
            FIELD_TAG => {
                let length = usize::try_from(varlen(&mut cursor)?).map_err(|_| malformed("a tag's length"))?;
                let text = std::str::from_utf8(cursor.take(length)?).map_err(|_| malformed("a tag"))?;
                tag = text.to_owned();
            }
            FIELD_LAST_COMMITTED => clock.0 = varlen_signed(&mut cursor)?,
            FIELD_SEQUENCE => clock.1 = varlen_signed(&mut cursor)?,
            FIELD_IMMEDIATE_US => head.commit_us = Some(varlen(&mut cursor)?),
            FIELD_LENGTH => {
                head.length = Some(varlen(&mut cursor)?);
                break;
            }
            // Skip field 7 (original commit time), and fields that later versions may add before the length.
            _ => {
                varlen(&mut cursor)?;
            }
        }
    }
    head.gtid = Gtid::Mysql { uuid, tag, number: count };
    head.clock = Some(clock);
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_every_length_are_decoded() {
        for (bytes, value) in [
            (&[0x00][..], 0u64),
            (&[0xfe], 127),
            (&[0x01, 0x02], 128),
            (&[0xfd, 0xff], (1 << 14) - 1),
            (&[0xff, 1, 0, 0, 0, 0, 0, 0, 0x80], (1 << 63) + 1),
            (&[0x7f, 0, 0, 0, 0, 0, 0, 0x80], 1 << 55),
        ] {
            assert_eq!(varlen(&mut Cursor::new(bytes)).unwrap(), value, "{bytes:x?}");
        }
    }
}
