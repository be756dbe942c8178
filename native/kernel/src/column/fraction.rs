//! The fraction of a second that TIME, DATETIME and TIMESTAMP share: zero to three big-endian bytes.

use super::integer::write_digits;
use super::parsed::Parsed;
use crate::cursor::Cursor;
use crate::error::{value_malformed, Result};

/// Microseconds in one unit of the last digit, by the number of digits.
const UNITS: [u32; 7] = [1_000_000, 100_000, 10_000, 1_000, 100, 10, 1];

pub(super) const MICROS: u32 = 1_000_000;

/// Returns the number of fractional digits of a declared type.
pub(super) fn declared(parsed: &Parsed<'_>) -> Result<u8> {
    parsed.small(0, 0, 6)
}

/// Returns the width in bytes of a fraction with `fsp` digits: two digits per byte.
#[inline(always)]
pub(super) fn width(fsp: u8) -> usize {
    usize::from(fsp).div_ceil(2)
}

/// Returns the number of microseconds in one unit of a stored fraction. Stored fractions have an even number of digits.
#[inline(always)]
pub(super) fn stored_unit(fsp: u8) -> u32 {
    match fsp {
        0 => 0,
        1 | 2 => 10_000,
        3 | 4 => 100,
        _ => 1,
    }
}

/// Returns the number of microseconds in one unit of the last of `fsp` digits.
#[inline(always)]
pub(super) fn unit(fsp: u8) -> u32 {
    UNITS.get(usize::from(fsp)).copied().unwrap_or(1)
}

/// Reads a stored fraction as microseconds.
#[inline(always)]
pub(super) fn read(fsp: u8, cursor: &mut Cursor<'_>) -> Result<u32> {
    let micros = match fsp {
        0 => return Ok(0),
        1 | 2 => u32::from(cursor.u8()?) * 10_000,
        3 | 4 => u32::from(cursor.u16_be()?) * 100,
        _ => cursor.u24_be()?,
    };
    check(micros)
}

/// Fails for a million microseconds or more, which are a full second.
#[inline(always)]
pub(super) fn check(micros: u32) -> Result<u32> {
    if micros < MICROS {
        Ok(micros)
    } else {
        Err(value_malformed(format!("{micros} microseconds in a second")))
    }
}

/// Writes the point and `fsp` digits, or nothing if `fsp` is 0.
pub(crate) fn write_text(micros: u32, fsp: u8, out: &mut Vec<u8>) {
    if fsp > 0 {
        out.push(b'.');
        write_digits((micros / unit(fsp)).into(), fsp.into(), out);
    }
}

/// Returns the SQL type with this many fractional digits.
pub(super) fn type_text(name: &str, fsp: u8) -> String {
    match fsp {
        0 => name.to_owned(),
        fsp => format!("{name}({fsp})"),
    }
}
