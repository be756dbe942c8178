//! The id, with a tag, of the transaction that follows (MySQL 8.3 and later, code 42).
//!
//! The body is written by the server's own serialization library (`mysql::serialization`): a version, the message's
//! size, the id of the last field that must be understood, then fields, each behind its id. Integers are of variable
//! length: the count of trailing ones in the first byte is the number of bytes that follow it.

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

/// Reads one unsigned integer of variable length.
pub fn varlen(cursor: &mut Cursor<'_>) -> Result<u64> {
    let first = cursor.u8()?;
    let more = first.trailing_ones();
    if more == 8 {
        return cursor.u64();
    }
    let low = u64::from(first) >> (more + 1);
    let high = cursor.uint(usize::try_from(more).unwrap_or(0))?;
    // With seven bytes to follow the first byte holds no bit of the number.
    Ok(low | high << (7 - more))
}

/// Reads one signed integer: the lowest bit is the sign, a negative value is stored as its complement.
fn varlen_signed(cursor: &mut Cursor<'_>) -> Result<i64> {
    let raw = varlen(cursor)?;
    let magnitude = i64::try_from(raw >> 1).map_err(|_| malformed("a signed integer"))?;
    Ok(if raw & 1 == 1 { -magnitude - 1 } else { magnitude })
}

fn number(cursor: &mut Cursor<'_>) -> Result<u64> {
    u64::try_from(varlen_signed(cursor)?).map_err(|_| malformed("a negative transaction number"))
}

/// Reads the body, without checksum. Fields after the transaction's length are not needed and not read.
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
            FIELD_NUMBER => count = number(&mut cursor)?,
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
            // The original commit time, field 7, and whatever a later version puts before the length.
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
    fn integers_of_every_length_read_back() {
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
