//! BIT(1) to BIT(64): big-endian and right-aligned, in as few bytes as possible.

use arrow_schema::DataType;

use super::parsed::Parsed;
use super::store::{Appended, Store};
use super::{base64, integer};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Result};

/// Returns the number of bits of a declared BIT.
pub(super) fn declared(parsed: &Parsed<'_>) -> Result<u8> {
    match parsed.small(0, 1, 64)? {
        0 => Err(parsed.invalid("no bits")),
        bits => Ok(bits),
    }
}

/// Returns a DECIMAL for BIT(64), because an unsigned 64-bit number does not fit into Spark's widest integer, which is
/// signed.
pub(super) fn arrow_type(bits: u8) -> DataType {
    if bits < 64 {
        DataType::Int64
    } else {
        DataType::Decimal128(20, 0)
    }
}

#[inline]
pub(super) fn width(bits: u8) -> usize {
    usize::from(bits).div_ceil(8)
}

#[inline(always)]
pub(super) fn read(bits: u8, cursor: &mut Cursor<'_>) -> Result<u64> {
    let value = cursor.uint_be(width(bits))?;
    match value.checked_shr(bits.into()) {
        None | Some(0) => Ok(value),
        Some(_) => Err(value_malformed(format!("a BIT({bits}) holds {value:#x}"))),
    }
}

#[inline]
pub(super) fn append(value: u64, store: &mut Store) -> Appended {
    if let (Store::Int64(values), Ok(value)) = (&mut *store, i64::try_from(value)) {
        values.push(value);
        return Ok(None);
    }
    integer::append_unsigned(value, store)
}

/// Writes the bits as bytes, highest byte first, which is what the client shows.
pub(crate) fn write_text(value: u64, bits: u8, out: &mut Vec<u8>) {
    let bytes = value.to_be_bytes();
    out.extend_from_slice(bytes.get(bytes.len() - width(bits).min(bytes.len())..).unwrap_or(&bytes));
}

/// Writes a boolean for BIT(1), otherwise the bytes in base64, lowest byte first.
pub(crate) fn write_debezium(value: u64, bits: u8, out: &mut Vec<u8>) {
    match (bits, value) {
        (1, 0) => out.extend_from_slice(b"false"),
        (1, _) => out.extend_from_slice(b"true"),
        _ => with_low_bytes(value, bits, |bytes| base64::write_quoted(bytes, out)),
    }
}

/// Calls `write` with the bytes of the value, lowest byte first.
pub(crate) fn with_low_bytes(value: u64, bits: u8, write: impl FnOnce(&[u8])) {
    let bytes = value.to_le_bytes();
    write(bytes.get(..width(bits)).unwrap_or(&bytes));
}

/// Returns the type in SQL.
pub(super) fn type_text(bits: u8) -> String {
    format!("bit({bits})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_right_aligned_and_big_endian() {
        assert_eq!(read(1, &mut Cursor::new(&[1])).unwrap(), 1);
        assert_eq!(read(10, &mut Cursor::new(&[0x02, 0x01])).unwrap(), 0x201);
        assert_eq!(read(64, &mut Cursor::new(&[0xff; 8])).unwrap(), u64::MAX);
    }

    #[test]
    fn undeclared_bits_are_malformed() {
        assert!(read(3, &mut Cursor::new(&[8])).is_err());
        assert!(read(9, &mut Cursor::new(&[2, 0])).is_err());
    }

    #[test]
    fn the_text_of_a_bit_value_is_its_bytes() {
        let mut out = Vec::new();
        write_text(0x201, 10, &mut out);
        assert_eq!(out, [2, 1]);
    }
}
