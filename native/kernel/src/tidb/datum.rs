//! Datums: TiDB's self-describing values, which make up the rows of a payload.
//!
//! Source: TiDB's `util/codec`. A datum is a kind byte and a body. Rows of a payload always have this form, whatever
//! the format of the rows in TiKV.

use super::protobuf::varint;
use crate::column::Decimal;
use crate::cursor::Cursor;
use crate::error::{malformed, Error, Result};

/// A value as a view of its bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Datum<'a> {
    /// NULL.
    Null,
    /// A string or bytes.
    Bytes(&'a [u8]),
    /// A signed integer, a year, or a time in nanoseconds.
    Int(i64),
    /// An unsigned integer, a packed date and time, a bit string, an enumerator or a set.
    Uint(u64),
    /// A floating point number of either size.
    Float(f64),
    /// A decimal number, packed as MySQL does.
    Decimal(Decimal<'a>),
    /// A time in nanoseconds.
    Duration(i64),
    /// A document in TiDB's binary form, with its type byte.
    Json(&'a [u8]),
}

/// Kind bytes of the datums in rows. Other kinds occur only in keys.
mod kind {
    pub const NULL: u8 = 0;
    pub const COMPACT_BYTES: u8 = 2;
    pub const INT: u8 = 3;
    pub const UINT: u8 = 4;
    pub const FLOAT: u8 = 5;
    pub const DECIMAL: u8 = 6;
    pub const DURATION: u8 = 7;
    pub const VARINT: u8 = 8;
    pub const UVARINT: u8 = 9;
    pub const JSON: u8 = 10;
}

const SIGN: u64 = 1 << 63;

impl<'a> Datum<'a> {
    /// Reads the next datum. Raises `EventMalformed`.
    #[inline]
    pub fn read(cursor: &mut Cursor<'a>) -> Result<Datum<'a>> {
        Ok(match cursor.u8()? {
            kind::NULL => Datum::Null,
            kind::VARINT => Datum::Int(zigzag(varint(cursor)?)),
            kind::UVARINT => Datum::Uint(varint(cursor)?),
            kind::COMPACT_BYTES => {
                let length = usize::try_from(zigzag(varint(cursor)?)).map_err(|_| malformed("a negative length"))?;
                Datum::Bytes(cursor.take(length)?)
            }
            kind::INT => Datum::Int(comparable_int(cursor)?),
            kind::UINT => Datum::Uint(cursor.u64_be()?),
            kind::FLOAT => {
                let bits = cursor.u64_be()?;
                // Negative numbers are inverted, so that the bytes sort like the numbers.
                Datum::Float(f64::from_bits(if bits & SIGN != 0 { bits & !SIGN } else { !bits }))
            }
            kind::DECIMAL => {
                let (precision, scale) = (cursor.u8()?, cursor.u8()?);
                Datum::Decimal(Decimal::take(precision, scale, cursor)?)
            }
            kind::DURATION => Datum::Duration(comparable_int(cursor)?),
            kind::JSON => {
                let whole = cursor.peek();
                let length = document_length(whole)?;
                Datum::Json(cursor.take(length)?)
            }
            unknown => return Err(unknown_kind(unknown)),
        })
    }

    /// Returns the name of the datum's kind, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Datum::Null => "NULL",
            Datum::Bytes(_) => "bytes",
            Datum::Int(_) => "a signed integer",
            Datum::Uint(_) => "an unsigned integer",
            Datum::Float(_) => "a floating point number",
            Datum::Decimal(_) => "a decimal number",
            Datum::Duration(_) => "a time",
            Datum::Json(_) => "a document",
        }
    }
}

#[cold]
fn unknown_kind(kind: u8) -> Error {
    malformed(format!("a TiDB row has a datum of kind {kind}"))
}

/// Undoes zigzag encoding, which stores the sign in the lowest bit.
#[inline(always)]
fn zigzag(value: u64) -> i64 {
    i64::from_ne_bytes((value >> 1 ^ (value & 1).wrapping_neg()).to_ne_bytes())
}

#[inline]
fn comparable_int(cursor: &mut Cursor<'_>) -> Result<i64> {
    Ok(i64::from_ne_bytes((cursor.u64_be()? ^ SIGN).to_ne_bytes()))
}

/// Types of TiDB's binary documents.
pub(super) mod json_type {
    pub const OBJECT: u8 = 0x01;
    pub const ARRAY: u8 = 0x03;
    pub const LITERAL: u8 = 0x04;
    pub const INT64: u8 = 0x09;
    pub const UINT64: u8 = 0x0a;
    pub const DOUBLE: u8 = 0x0b;
    pub const STRING: u8 = 0x0c;
    pub const OPAQUE: u8 = 0x0d;
    pub const DATE: u8 = 0x0e;
    pub const DATETIME: u8 = 0x0f;
    pub const TIMESTAMP: u8 = 0x10;
    pub const DURATION: u8 = 0x11;
}

/// Returns the bytes of the document at the start of `bytes`, including its type byte.
fn document_length(bytes: &[u8]) -> Result<usize> {
    let mut cursor = Cursor::new(bytes);
    let code = cursor.u8()?;
    value_length(code, cursor.peek()).map(|length| length.saturating_add(1))
}

/// Returns the bytes of the document value at the start of `bytes`, without its type byte.
pub(super) fn value_length(code: u8, bytes: &[u8]) -> Result<usize> {
    let mut cursor = Cursor::new(bytes);
    let sized = |mut cursor: Cursor<'_>| -> Result<usize> {
        let length = varint(&mut cursor)?;
        let head = bytes.len() - cursor.remaining();
        Ok(usize::try_from(length).unwrap_or(usize::MAX).saturating_add(head))
    };
    Ok(match code {
        json_type::OBJECT | json_type::ARRAY => {
            cursor.skip(4)?;
            cursor.u32()? as usize
        }
        json_type::LITERAL => 1,
        json_type::INT64 | json_type::UINT64 | json_type::DOUBLE => 8,
        json_type::DATE | json_type::DATETIME | json_type::TIMESTAMP => 8,
        json_type::DURATION => 12,
        json_type::STRING => sized(cursor)?,
        json_type::OPAQUE => {
            cursor.skip(1)?;
            sized(cursor)?
        }
        _ => return Err(malformed(format!("a document of TiDB has a value of type {code:#04x}"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Datum<'_>> {
        let mut cursor = Cursor::new(bytes);
        let datum = Datum::read(&mut cursor)?;
        assert!(cursor.is_empty(), "{bytes:02x?}");
        Ok(datum)
    }

    #[test]
    fn datums_of_every_kind_are_read() {
        for (bytes, expected) in [
            (&b"\x00"[..], Datum::Null),
            (b"\x02\x02a", Datum::Bytes(b"a")),
            (b"\x08\x09", Datum::Int(-5)),
            (b"\x08\xfd\xff\xff\xff\xff\xff\xff\xff\xff\x01", Datum::Int(i64::MIN + 1)),
            (b"\x09\x80\xd0\xac\xf3\x0e", Datum::Uint(4_000_000_000)),
            (b"\x03\x7f\xff\xff\xff\xff\xff\xff\xff", Datum::Int(-1)),
            (b"\x04\x00\x00\x00\x00\x00\x00\x01\x00", Datum::Uint(256)),
            (b"\x05\xbf\xf8\x00\x00\x00\x00\x00\x00", Datum::Float(1.5)),
            (b"\x05\x3f\xfd\xff\xff\xff\xff\xff\xff", Datum::Float(-2.25)),
            (b"\x07\x80\x00\x00\x00\x00\x00\x00\x02", Datum::Duration(2)),
            (b"\x0a\x04\x01", Datum::Json(b"\x04\x01")),
            (b"\x0a\x0c\x02ab", Datum::Json(b"\x0c\x02ab")),
            (b"\x0a\x0d\xfe\x02ab", Datum::Json(b"\x0d\xfe\x02ab")),
            (b"\x0a\x03\x00\x00\x00\x00\x08\x00\x00\x00", Datum::Json(b"\x03\x00\x00\x00\x00\x08\x00\x00\x00")),
        ] {
            assert_eq!(read(bytes), Ok(expected), "{bytes:02x?}");
        }
    }

    #[test]
    fn a_decimal_number_has_its_own_precision() {
        let bytes = b"\x06\x14\x05\x7f\xff\xff\xff\xff\xcf\xc6\xfe\xf6\xcd";
        let Ok(Datum::Decimal(number)) = read(bytes) else { panic!("no decimal number") };
        let mut packed = Vec::new();
        number.repack(20, 5, &mut packed).unwrap();
        assert_eq!(packed, bytes.get(3..).unwrap());
        packed.clear();
        number.repack(11, 6, &mut packed).unwrap();
        let widened = Decimal::take(11, 6, &mut Cursor::new(&packed)).unwrap();
        let mut text = Vec::new();
        crate::column::Value::Decimal(widened)
            .write_text(&crate::column::Kind::Decimal { precision: 11, scale: 6 }, &mut text)
            .unwrap();
        assert_eq!(text, b"-12345.678900");
        assert!(number.repack(9, 5, &mut packed).is_err(), "four digits before the point");
    }

    #[test]
    fn damaged_datums_are_refused() {
        for bytes in [
            &b""[..],
            b"\x01",
            b"\x0b",
            b"\xfa",
            b"\x02\x01",
            b"\x02\x08ab",
            b"\x06\x00\x00",
            b"\x06\xff\x00\x80",
            b"\x0a\x02",
            b"\x0a\x03\x00\x00\x00\x00\xff\xff\xff\xff",
            b"\x0a\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        ] {
            assert!(read(bytes).is_err(), "{bytes:02x?}");
        }
    }
}
