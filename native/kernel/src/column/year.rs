//! YEAR: a byte, the year minus 1900, or 0 for the zero year.

use super::integer::write_digits;
use super::store::Appended;
use crate::cursor::Cursor;
use crate::error::Result;

#[inline(always)]
pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<u16> {
    Ok(match cursor.u8()? {
        0 => 0,
        year => 1900 + u16::from(year),
    })
}

/// Appends the year; the zero year is the number 0.
pub(super) fn append(value: u16, values: &mut Vec<i16>) -> Appended {
    match i16::try_from(value) {
        Ok(year) => {
            values.push(year);
            Ok(None)
        }
        Err(_) => Ok(Some(value.to_string())),
    }
}

pub(crate) fn write_text(value: u16, out: &mut Vec<u8>) {
    write_digits(value.into(), 4, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_zero_year_shows_four_zeros() {
        for (byte, year, text) in [(0, 0, "0000"), (1, 1901, "1901"), (255, 2155, "2155")] {
            assert_eq!(read(&mut Cursor::new(&[byte])).unwrap(), year);
            let mut out = Vec::new();
            write_text(year, &mut out);
            assert_eq!(out, text.as_bytes());
        }
    }
}
