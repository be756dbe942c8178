//! Reads protobuf fields from bytes, without a copy.
//!
//! Source: protobuf's "Encoding" page. Fields that the caller does not know are skipped, as the format intends.

use crate::cursor::Cursor;
use crate::error::{malformed, Result};

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field<'a> {
    /// A number, an enumerator or a truth value.
    Number(u64),
    /// Bytes, text, a message, or packed numbers.
    Bytes(&'a [u8]),
    /// Four or eight bytes. None of the messages that the kernel reads has such a field.
    Fixed,
}

impl<'a> Field<'a> {
    /// Returns the number. Raises `EventMalformed` if the field has another type.
    pub fn number(self) -> Result<u64> {
        match self {
            Field::Number(value) => Ok(value),
            Field::Bytes(_) | Field::Fixed => Err(wrong_type()),
        }
    }

    /// Returns the number as the signed integer that it encodes.
    pub fn signed(self) -> Result<i64> {
        Ok(i64::from_ne_bytes(self.number()?.to_ne_bytes()))
    }

    /// Returns the bytes. Raises `EventMalformed` if the field has another type.
    pub fn bytes(self) -> Result<&'a [u8]> {
        match self {
            Field::Bytes(bytes) => Ok(bytes),
            Field::Number(_) | Field::Fixed => Err(wrong_type()),
        }
    }
}

#[cold]
fn wrong_type() -> crate::error::Error {
    malformed("a field of a TiDB payload has another type than its message defines")
}

/// Reads a number of at most ten bytes, in groups of seven bits.
#[inline]
pub fn varint(cursor: &mut Cursor<'_>) -> Result<u64> {
    let first = cursor.u8()?;
    if first < 0x80 {
        return Ok(u64::from(first));
    }
    let mut value = u64::from(first & 0x7f);
    for shift in (7..64).step_by(7) {
        let byte = cursor.u8()?;
        if shift == 63 && byte > 1 {
            break;
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(malformed("a number of a TiDB payload does not fit 64 bits"))
}

/// Reads the next field: its number and its value. Returns None at the end.
#[inline]
pub fn next<'a>(cursor: &mut Cursor<'a>) -> Result<Option<(u64, Field<'a>)>> {
    if cursor.is_empty() {
        return Ok(None);
    }
    let tag = varint(cursor)?;
    let field = match tag & 7 {
        0 => Field::Number(varint(cursor)?),
        2 => {
            let length = varint(cursor)?;
            Field::Bytes(cursor.take(usize::try_from(length).unwrap_or(usize::MAX))?)
        }
        1 => cursor.skip(8).map(|()| Field::Fixed)?,
        5 => cursor.skip(4).map(|()| Field::Fixed)?,
        wire => return Err(malformed(format!("a field of a TiDB payload has wire type {wire}"))),
    };
    match tag >> 3 {
        0 => Err(malformed("a field of a TiDB payload has number 0")),
        number => Ok(Some((number, field))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_in_order_and_unknown_ones_are_skipped() {
        let bytes = b"\x08\x96\x01\x12\x02ab\x1d\x01\x02\x03\x04\x21\x01\x02\x03\x04\x05\x06\x07\x08";
        let mut cursor = Cursor::new(bytes);
        assert_eq!(next(&mut cursor), Ok(Some((1, Field::Number(150)))));
        assert_eq!(next(&mut cursor), Ok(Some((2, Field::Bytes(b"ab")))));
        assert_eq!(next(&mut cursor), Ok(Some((3, Field::Fixed))));
        assert_eq!(next(&mut cursor), Ok(Some((4, Field::Fixed))));
        assert_eq!(next(&mut cursor), Ok(None));
    }

    #[test]
    fn numbers_have_at_most_64_bits() {
        let longest = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
        assert_eq!(varint(&mut Cursor::new(&longest)), Ok(u64::MAX));
        let mut long = longest;
        long[9] = 2;
        assert!(varint(&mut Cursor::new(&long)).is_err());
        assert!(varint(&mut Cursor::new(&[0x80; 11])).is_err());
    }

    #[test]
    fn damaged_fields_are_refused() {
        for bytes in
            [&b"\x08"[..], b"\x12\x05ab", b"\x0b", b"\x00\x01", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"]
        {
            assert!(next(&mut Cursor::new(bytes)).is_err(), "{bytes:?}");
        }
    }
}
