//! TINYINT to BIGINT: little-endian, two's complement where signed.

use arrow_schema::DataType;

use super::parsed::Parsed;
use super::store::{Appended, Store};
use crate::cursor::Cursor;
use crate::error::{Error, ErrorKind, Result};

/// Whether a declared integer is unsigned.
pub(super) fn declared_unsigned(parsed: &Parsed<'_>) -> bool {
    parsed.has("unsigned") || parsed.has("zerofill")
}

/// Unsigned types map to the next wider signed type, because Spark has no unsigned integers.
pub(super) fn arrow_type(bytes: u8, unsigned: bool) -> DataType {
    match (bytes, unsigned) {
        (1, false) => DataType::Int8,
        (1, true) | (2, false) => DataType::Int16,
        (2, true) | (3, _) | (4, false) => DataType::Int32,
        (_, false) | (4, true) => DataType::Int64,
        (_, true) => DataType::Decimal128(20, 0),
    }
}

#[inline(always)]
fn signed8(value: u8) -> i8 {
    i8::from_ne_bytes([value])
}

#[inline(always)]
fn signed16(value: u16) -> i16 {
    i16::from_ne_bytes(value.to_ne_bytes())
}

/// Extends the sign from 24 to 32 bits.
#[inline(always)]
fn signed24(value: u32) -> i32 {
    signed32(value << 8) >> 8
}

#[inline(always)]
fn signed32(value: u32) -> i32 {
    i32::from_ne_bytes(value.to_ne_bytes())
}

#[inline(always)]
fn signed64(value: u64) -> i64 {
    i64::from_ne_bytes(value.to_ne_bytes())
}

#[inline(always)]
pub(super) fn read_signed(bytes: u8, cursor: &mut Cursor<'_>) -> Result<i64> {
    Ok(match bytes {
        1 => signed8(cursor.u8()?).into(),
        2 => signed16(cursor.u16()?).into(),
        3 => signed24(cursor.u24()?).into(),
        4 => signed32(cursor.u32()?).into(),
        _ => signed64(cursor.u64()?),
    })
}

#[inline(always)]
pub(super) fn read_unsigned(bytes: u8, cursor: &mut Cursor<'_>) -> Result<u64> {
    Ok(match bytes {
        1 => cursor.u8()?.into(),
        2 => cursor.u16()?.into(),
        3 => cursor.u24()?.into(),
        4 => cursor.u32()?.into(),
        _ => cursor.u64()?,
    })
}

/// Reads and appends a value in one step, the most common operation of all.
#[inline(always)]
pub(super) fn append_read(bytes: u8, unsigned: bool, cursor: &mut Cursor<'_>, store: &mut Store) -> Appended {
    match (bytes, unsigned, store) {
        (1, false, Store::Int8(values)) => values.push(signed8(cursor.u8()?)),
        (1, true, Store::Int16(values)) => values.push(cursor.u8()?.into()),
        (2, false, Store::Int16(values)) => values.push(signed16(cursor.u16()?)),
        (2, true, Store::Int32(values)) => values.push(cursor.u16()?.into()),
        (3, false, Store::Int32(values)) => values.push(signed24(cursor.u24()?)),
        (3, true, Store::Int32(values)) => values.push(signed32(cursor.u24()?)),
        (4, false, Store::Int32(values)) => values.push(signed32(cursor.u32()?)),
        (4, true, Store::Int64(values)) => values.push(cursor.u32()?.into()),
        (8, false, Store::Int64(values)) => values.push(signed64(cursor.u64()?)),
        (8, true, Store::Decimal128 { values, .. }) => values.push(cursor.u64()?.into()),
        (_, false, store) => return append_signed(read_signed(bytes, cursor)?, store),
        (_, true, store) => return append_unsigned(read_unsigned(bytes, cursor)?, store),
    }
    Ok(None)
}

pub(super) fn append_signed(value: i64, store: &mut Store) -> Appended {
    append_wide(value.into(), store)
}

pub(super) fn append_unsigned(value: u64, store: &mut Store) -> Appended {
    append_wide(value.into(), store)
}

fn append_wide(value: i128, store: &mut Store) -> Appended {
    let fits = match store {
        Store::Int8(values) => i8::try_from(value).map(|value| values.push(value)).is_ok(),
        Store::Int16(values) => i16::try_from(value).map(|value| values.push(value)).is_ok(),
        Store::Int32(values) => i32::try_from(value).map(|value| values.push(value)).is_ok(),
        Store::Int64(values) => i64::try_from(value).map(|value| values.push(value)).is_ok(),
        Store::Decimal128 { values, scale: 0, .. } => {
            values.push(value);
            true
        }
        _ => false,
    };
    if fits {
        return Ok(None);
    }
    Err(Error::new(ErrorKind::SchemaMismatch, format!("the integer {value} does not fit its Arrow column")))
}

pub(crate) fn write_signed(value: i64, out: &mut Vec<u8>) {
    if value < 0 {
        out.push(b'-');
    }
    write_unsigned(value.unsigned_abs(), out);
}

pub(crate) fn write_unsigned(value: u64, out: &mut Vec<u8>) {
    write_digits(value, 1, out);
}

#[inline(always)]
fn digit(value: u64) -> u8 {
    b'0' + u8::try_from(value % 10).unwrap_or(0)
}

/// Writes `value` in decimal, padded with zeros to `width` (at most 20) digits.
#[inline]
pub(crate) fn write_digits(value: u64, width: usize, out: &mut Vec<u8>) {
    match (value, width) {
        (0..=9, 0 | 1) => out.push(digit(value)),
        (0..=99, 2) => out.extend_from_slice(&[digit(value / 10), digit(value)]),
        _ => write_long(value, width, out),
    }
}

/// The digits of 0 to 99.
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[0u8; 2]; 100];
    let mut value = 0;
    while value < 100 {
        pairs[value] = [b'0' + (value / 10) as u8, b'0' + (value % 10) as u8];
        value += 1;
    }
    pairs
};

fn write_long(mut value: u64, width: usize, out: &mut Vec<u8>) {
    let mut digits = [[b'0'; 2]; 10];
    let mut count = 0;
    for digits_slot in digits.iter_mut().rev() {
        let pair = value % 100;
        *digits_slot = PAIRS.get(usize::try_from(pair).unwrap_or(0)).copied().unwrap_or(*digits_slot);
        value /= 100;
        count += 2;
        if value == 0 {
            // The first pair may have a single digit.
            count -= usize::from(pair < 10);
            break;
        }
    }
    let digits = digits.as_flattened();
    out.extend_from_slice(digits.get(digits.len().saturating_sub(count.max(width))..).unwrap_or(digits));
}

/// Returns the type in SQL.
pub(super) fn type_text(bytes: u8, unsigned: bool) -> String {
    let name = match bytes {
        1 => "tinyint",
        2 => "smallint",
        3 => "mediumint",
        4 => "int",
        _ => "bigint",
    };
    format!("{name}{}", if unsigned { " unsigned" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::column::{ColumnBuilder, Kind, Value};

    fn text(value: Value<'_>) -> String {
        let mut out = Vec::new();
        value.write_text(&Kind::Integer { bytes: 8, unsigned: false }, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn every_width_keeps_its_extremes() {
        let cases: [(u8, &[u8], i64, u64); 8] = [
            (1, &[0x80], -128, 128),
            (1, &[0xff], -1, 255),
            (2, &[0x00, 0x80], -32768, 32768),
            (3, &[0x00, 0x00, 0x80], -8_388_608, 8_388_608),
            (3, &[0xff, 0xff, 0xff], -1, 16_777_215),
            (4, &[0, 0, 0, 0x80], -2_147_483_648, 2_147_483_648),
            (8, &[0, 0, 0, 0, 0, 0, 0, 0x80], i64::MIN, 1 << 63),
            (8, &[0xff; 8], -1, u64::MAX),
        ];
        for (bytes, image, signed, unsigned) in cases {
            let kind = |unsigned| Kind::Integer { bytes, unsigned };
            assert_eq!(kind(false).read(&mut Cursor::new(image)).unwrap(), Value::Int(signed));
            assert_eq!(kind(true).read(&mut Cursor::new(image)).unwrap(), Value::UInt(unsigned));
            for kind in [kind(false), kind(true)] {
                let mut fused = ColumnBuilder::new(&kind);
                let mut plain = ColumnBuilder::new(&kind);
                fused.append_from(&kind, &mut Cursor::new(image)).unwrap();
                let value = kind.read(&mut Cursor::new(image)).unwrap();
                plain.append(&kind, value).unwrap();
                assert_eq!(&fused.finish(), &plain.finish());
                let shorter = image.get(1..).unwrap();
                assert!(fused.append_from(&kind, &mut Cursor::new(shorter)).is_err());
                assert_eq!(fused.len(), 0);
            }
        }
    }

    #[test]
    fn text_is_plain_decimal() {
        assert_eq!(text(Value::Int(i64::MIN)), "-9223372036854775808");
        assert_eq!(text(Value::Int(0)), "0");
        assert_eq!(text(Value::UInt(u64::MAX)), "18446744073709551615");
    }

    #[test]
    fn digits_are_padded_with_zeros() {
        let mut out = Vec::new();
        write_digits(42, 6, &mut out);
        write_digits(1234, 2, &mut out);
        assert_eq!(out, b"0000421234");
    }
}
