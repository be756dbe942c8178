//! TIME in its three storage formats: a span of up to 838:59:59 in either direction.
//!
//! Sources: `my_time_packed_from_binary` (packed), `Field_time` (classic: the number hhmmss), MariaDB's
//! `Field_time_hires` (counted: units of the last digit since -839:00:00, big-endian).

use super::integer::write_digits;
use super::{fraction, Layout};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Result};

/// A span of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Time {
    pub negative: bool,
    pub hours: u16,
    pub minutes: u8,
    pub seconds: u8,
    pub micros: u32,
}

/// Seconds of MariaDB's zero point: one more than the longest TIME.
const COUNTED_ZERO_SECONDS: u64 = 838 * 3_600 + 59 * 60 + 59 + 1;

/// Size in bytes of a TIME in MariaDB's counted format, by the number of fractional digits.
const COUNTED_BYTES: [u8; 7] = [3, 4, 4, 5, 5, 5, 6];

#[inline]
pub(super) fn width(fsp: u8, layout: Layout) -> usize {
    match layout {
        Layout::Packed => 3 + fraction::width(fsp),
        Layout::Classic => 3,
        Layout::Counted => COUNTED_BYTES.get(usize::from(fsp)).copied().unwrap_or(6).into(),
    }
}

#[inline(always)]
pub(super) fn read(fsp: u8, layout: Layout, cursor: &mut Cursor<'_>) -> Result<Time> {
    match layout {
        Layout::Packed => read_packed(fsp, cursor),
        Layout::Classic => from_number(cursor.u24()?),
        Layout::Counted => from_count(cursor.uint_be(width(fsp, layout))?, fsp),
    }
}

/// The bits of the whole value, including the fraction, are offset by a zero point, so that the bytes sort like the
/// spans.
#[inline(always)]
fn read_packed(fsp: u8, cursor: &mut Cursor<'_>) -> Result<Time> {
    let (bits, shift, zero) = match fsp {
        0 => (cursor.u24_be()?.into(), 0, 0x80_0000),
        1 | 2 => (cursor.u32_be()?.into(), 8, 0x8000_0000),
        3 | 4 => (cursor.u40_be()?, 16, 0x80_0000_0000),
        _ => (cursor.u48_be()?, 24, 0x8000_0000_0000),
    };
    let magnitude: u64 = u64::abs_diff(bits, zero);
    let clock = magnitude >> shift;
    let part = u32::try_from(magnitude - (clock << shift)).unwrap_or(u32::MAX);
    let micros = part.saturating_mul(fraction::stored_unit(fsp));
    check_clock(bits < zero, clock >> 12 & 0x7ff, clock >> 6 & 0x3f, clock & 0x3f, micros)
}

/// Unpacks a signed number from `TIME_to_longlong_time_packed`: hours, minutes and seconds, followed by 24 bits of
/// microseconds.
pub(super) fn unpack(packed: i64) -> Result<Time> {
    let magnitude = packed.unsigned_abs();
    let clock = magnitude >> 24;
    let micros = u32::try_from(magnitude & 0xff_ffff).unwrap_or(u32::MAX);
    check_clock(packed < 0, clock >> 12, clock >> 6 & 0x3f, clock & 0x3f, micros)
}

fn from_number(number: u32) -> Result<Time> {
    let negative = number & 0x80_0000 != 0;
    let magnitude = u64::from(if negative { 0x100_0000 - number } else { number });
    check_clock(negative, magnitude / 10_000, magnitude / 100 % 100, magnitude % 100, 0)
}

fn from_count(count: u64, fsp: u8) -> Result<Time> {
    let unit = fraction::unit(fsp);
    let per_second = u64::from(fraction::MICROS / unit);
    let zero = COUNTED_ZERO_SECONDS * per_second;
    let magnitude = count.abs_diff(zero);
    let (seconds, rest) = (magnitude / per_second, magnitude % per_second);
    let micros = u32::try_from(rest).unwrap_or(0) * unit;
    check_clock(count < zero, seconds / 3_600, seconds / 60 % 60, seconds % 60, micros)
}

#[inline(always)]
fn check_clock(negative: bool, hours: u64, minutes: u64, seconds: u64, micros: u32) -> Result<Time> {
    if hours > 838 || minutes > 59 || seconds > 59 || micros >= fraction::MICROS {
        return Err(value_malformed(format!("a TIME of {hours}:{minutes}:{seconds} and {micros} microseconds")));
    }
    let small = |value: u64| u8::try_from(value).unwrap_or(0);
    let hours = u16::try_from(hours).unwrap_or(0);
    Ok(Time { negative, hours, minutes: small(minutes), seconds: small(seconds), micros })
}

impl Time {
    /// Returns the span in microseconds.
    #[inline(always)]
    pub fn micros(self) -> i64 {
        let seconds = (i64::from(self.hours) * 60 + i64::from(self.minutes)) * 60 + i64::from(self.seconds);
        let micros = seconds * 1_000_000 + i64::from(self.micros);
        if self.negative {
            -micros
        } else {
            micros
        }
    }
}

/// Reads and appends a value in one step, keeping the parts in registers; see `datetime`.
#[inline(always)]
pub(super) fn append_read(fsp: u8, layout: Layout, cursor: &mut Cursor<'_>, values: &mut Vec<i64>) -> Result<()> {
    let value = match layout {
        Layout::Packed => read_packed(fsp, cursor)?,
        _ => read(fsp, layout, cursor)?,
    };
    append(value, values);
    Ok(())
}

#[inline(always)]
pub(super) fn append(value: Time, values: &mut Vec<i64>) {
    values.push(value.micros());
}

pub(crate) fn write_text(value: Time, fsp: u8, out: &mut Vec<u8>) {
    if value.negative {
        out.push(b'-');
    }
    write_digits(value.hours.into(), 2, out);
    for part in [value.minutes, value.seconds] {
        out.push(b':');
        write_digits(part.into(), 2, out);
    }
    fraction::write_text(value.micros, fsp, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(fsp: u8, layout: Layout, bytes: &[u8]) -> (String, i64) {
        let mut cursor = Cursor::new(bytes);
        let value = read(fsp, layout, &mut cursor).unwrap();
        assert!(cursor.is_empty());
        let mut out = Vec::new();
        write_text(value, fsp, &mut out);
        (String::from_utf8(out).unwrap(), value.micros())
    }

    #[test]
    fn packed_values_are_signed() {
        let cases: [(u8, &[u8], &str, i64); 6] = [
            (0, &[0x80, 0, 0], "00:00:00", 0),
            (0, &[0x7f, 0xff, 0xff], "-00:00:01", -1_000_000),
            (0, &[0xb4, 0x6e, 0xfb], "838:59:59", 3_020_399_000_000),
            (1, &[0x7f, 0xff, 0xff, 0xce], "-00:00:00.5", -500_000),
            (3, &[0x80, 0x00, 0x01, 0x00, 0x0a], "00:00:01.001", 1_001_000),
            (6, &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff], "-00:00:00.000001", -1),
        ];
        for (fsp, bytes, text, micros) in cases {
            assert_eq!(shown(fsp, Layout::Packed, bytes), (text.to_owned(), micros));
        }
    }

    #[test]
    fn classic_values_are_decimal_numbers() {
        let [a, b, c, _] = 8_385_959u32.to_le_bytes();
        assert_eq!(shown(0, Layout::Classic, &[a, b, c]).0, "838:59:59");
        let [a, b, c, _] = (-10_203i32).to_le_bytes();
        assert_eq!(shown(0, Layout::Classic, &[a, b, c]).0, "-01:02:03");
    }

    #[test]
    fn counted_values_start_at_the_longest_negative_time() {
        let zero = COUNTED_ZERO_SECONDS * 1_000;
        let [_, _, _, bytes @ ..] = (zero - 1_500).to_be_bytes();
        assert_eq!(shown(3, Layout::Counted, &bytes), ("-00:00:01.500".to_owned(), -1_500_000));
    }

    #[test]
    fn times_out_of_the_servers_range_are_malformed() {
        assert!(read(0, Layout::Packed, &mut Cursor::new(&[0x80, 0x00, 0x3c])).is_err());
        assert!(read(0, Layout::Packed, &mut Cursor::new(&[0xff, 0xff, 0xff])).is_err());
        assert!(read(2, Layout::Packed, &mut Cursor::new(&[0x80, 0, 0, 100])).is_err());
    }
}
