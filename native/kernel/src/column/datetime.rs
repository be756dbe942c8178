//! DATETIME in its three storage formats.
//!
//! Sources: `my_datetime_packed_from_binary` (packed), `Field_datetime` (classic: the number YYYYMMDDhhmmss), MariaDB's
//! `Field_datetime_hires` (counted: the number of units of the last digit, in mixed radix, big-endian).

use super::integer::write_digits;
use super::store::Appended;
use super::{date, fraction, Date, Layout};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Result};

/// A date and a time of day as stored; the date may be missing from the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct DateTime {
    pub date: Date,
    pub hour: u8,
    pub minute: u8,
    pub second: u8,
    pub micros: u32,
}

/// Size in bytes of MariaDB's counted format, by the number of fractional digits.
const COUNTED_BYTES: [u8; 7] = [5, 6, 6, 7, 7, 7, 8];

#[inline]
pub(super) fn width(fsp: u8, layout: Layout) -> usize {
    match layout {
        Layout::Packed => 5 + fraction::width(fsp),
        Layout::Classic => 8,
        Layout::Counted => COUNTED_BYTES.get(usize::from(fsp)).copied().unwrap_or(8).into(),
    }
}

#[inline(always)]
pub(super) fn read(fsp: u8, layout: Layout, cursor: &mut Cursor<'_>) -> Result<DateTime> {
    match layout {
        Layout::Packed => read_packed(fsp, cursor),
        Layout::Classic => from_number(cursor.u64()?),
        Layout::Counted => from_count(cursor.uint_be(width(fsp, layout))?, fsp),
    }
}

/// Always inlined, so that the parts of the value stay in registers. In memory, the parts would be written with narrow
/// stores and read back with wide loads, which stalls the processor.
#[inline(always)]
fn read_packed(fsp: u8, cursor: &mut Cursor<'_>) -> Result<DateTime> {
    let moment = unpack(cursor.u40_be()?)?;
    Ok(DateTime { micros: fraction::read(fsp, cursor)?, ..moment })
}

/// Reads and appends a value in one step.
#[inline(always)]
pub(super) fn append_read(fsp: u8, layout: Layout, cursor: &mut Cursor<'_>, values: &mut Vec<i64>) -> Appended {
    match layout {
        Layout::Packed => append(read_packed(fsp, cursor)?, fsp, values),
        _ => append(read(fsp, layout, cursor)?, fsp, values),
    }
}

/// Unpacks the 40 bits: a sign that is always set, 17 bits of year * 13 + month, then 5, 5, 6 and 6 bits.
#[inline(always)]
pub(super) fn unpack(bits: u64) -> Result<DateTime> {
    let Some(bits) = bits.checked_sub(1 << 39) else {
        return Err(value_malformed("a DATETIME before the year 0"));
    };
    let months = field(bits >> 22, 17);
    let year = u16::try_from(months / 13).unwrap_or(u16::MAX);
    let date = Date { year, month: small(months % 13), day: small(field(bits >> 17, 5)) };
    check_clock(date, field(bits >> 12, 5), field(bits >> 6, 6), field(bits, 6))
}

#[inline(always)]
fn field(bits: u64, width: u32) -> u64 {
    bits & ((1 << width) - 1)
}

#[inline(always)]
fn small(value: u64) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

/// The time of day must be valid; only the date may be missing from the calendar.
#[inline(always)]
fn check_clock(date: Date, hour: u64, minute: u64, second: u64) -> Result<DateTime> {
    if hour > 23 || minute > 59 || second > 59 {
        return Err(value_malformed(format!("a DATETIME at {hour}:{minute}:{second}")));
    }
    if date.year > 9999 || date.month > 12 || date.day > 31 {
        let Date { year, month, day } = date;
        return Err(value_malformed(format!("a DATETIME on {year}-{month}-{day}")));
    }
    Ok(DateTime { date, hour: small(hour), minute: small(minute), second: small(second), micros: 0 })
}

fn from_number(number: u64) -> Result<DateTime> {
    let (days, clock) = (number / 1_000_000, number % 1_000_000);
    let year = u16::try_from(days / 10_000).unwrap_or(u16::MAX);
    let date = Date { year, month: small(days / 100 % 100), day: small(days % 100) };
    check_clock(date, clock / 10_000, clock / 100 % 100, clock % 100)
}

/// MariaDB counts years of 13 months, months of 32 days, days of 24 hours, and so on.
fn from_count(count: u64, fsp: u8) -> Result<DateTime> {
    let per_second = u64::from(fraction::MICROS / fraction::unit(fsp));
    let (seconds, rest) = (count / per_second, count % per_second);
    let micros = u32::try_from(rest).unwrap_or(0) * fraction::unit(fsp);
    let (minutes, second) = (seconds / 60, seconds % 60);
    let (hours, minute) = (minutes / 60, minutes % 60);
    let (days, hour) = (hours / 24, hours % 24);
    let (months, day) = (days / 32, days % 32);
    let year = u16::try_from(months / 13).unwrap_or(u16::MAX);
    let date = Date { year, month: small(months % 13), day: small(day) };
    Ok(DateTime { micros, ..check_clock(date, hour, minute, second)? })
}

impl DateTime {
    /// Returns microseconds since 1970-01-01 00:00:00, or `None` if the calendar has no such day.
    #[inline(always)]
    pub fn micros(self) -> Option<i64> {
        let clock = (u32::from(self.hour) * 60 + u32::from(self.minute)) * 60 + u32::from(self.second);
        let seconds = i64::from(self.date.days()?) * 86_400 + i64::from(clock);
        Some(seconds * 1_000_000 + i64::from(self.micros))
    }
}

#[inline(always)]
pub(super) fn append(value: DateTime, fsp: u8, values: &mut Vec<i64>) -> Appended {
    match value.micros() {
        Some(micros) => {
            values.push(micros);
            Ok(None)
        }
        None => Ok(Some(text(value, fsp))),
    }
}

#[cold]
pub(super) fn text(value: DateTime, fsp: u8) -> String {
    let mut out = Vec::with_capacity(26);
    write_text(value, fsp, &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

pub(crate) fn write_text(value: DateTime, fsp: u8, out: &mut Vec<u8>) {
    write_separated(value, b' ', fsp, out);
}

/// Returns milliseconds since 1970-01-01 00:00:00, or microseconds for more than three fractional digits. Returns
/// `None` for a date that does not exist in the calendar. Debezium's value is then null, or 0 if the column is not
/// nullable.
pub(crate) fn debezium(value: DateTime, fsp: u8) -> Option<i64> {
    value.micros().map(|micros| if fsp > 3 { micros } else { micros.div_euclid(1_000) })
}

/// Writes the date and time with `separator` between them.
pub(crate) fn write_separated(value: DateTime, separator: u8, fsp: u8, out: &mut Vec<u8>) {
    date::write_text(value.date, out);
    for (separator, part) in [(separator, value.hour), (b':', value.minute), (b':', value.second)] {
        out.push(separator);
        write_digits(part.into(), 2, out);
    }
    fraction::write_text(value.micros, fsp, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(fsp: u8, layout: Layout, bytes: &[u8]) -> String {
        let mut cursor = Cursor::new(bytes);
        let value = read(fsp, layout, &mut cursor).unwrap();
        assert!(cursor.is_empty());
        text(value, fsp)
    }

    /// The packed bits of a date and time without fraction.
    fn packed(year: u64, month: u64, day: u64, clock: u64) -> [u8; 5] {
        let bits = 1 << 39 | (year * 13 + month) << 22 | day << 17 | clock;
        let [_, _, _, bytes @ ..] = u64::to_be_bytes(bits);
        bytes
    }

    #[test]
    fn packed_values_show_every_digit_of_their_fraction() {
        let clock = 23 << 12 | 59 << 6 | 58;
        let [a, b, c, d, e] = packed(2024, 2, 29, clock);
        assert_eq!(shown(0, Layout::Packed, &[a, b, c, d, e]), "2024-02-29 23:59:58");
        assert_eq!(shown(1, Layout::Packed, &[a, b, c, d, e, 90]), "2024-02-29 23:59:58.9");
        assert_eq!(shown(3, Layout::Packed, &[a, b, c, d, e, 0x26, 0xac]), "2024-02-29 23:59:58.990");
        assert_eq!(shown(6, Layout::Packed, &[a, b, c, d, e, 0x0f, 0x42, 0x3f]), "2024-02-29 23:59:58.999999");
    }

    #[test]
    fn classic_values_are_decimal_numbers() {
        let bytes = 19_991_231_235_958u64.to_le_bytes();
        assert_eq!(shown(0, Layout::Classic, &bytes), "1999-12-31 23:59:58");
    }

    #[test]
    fn counted_values_are_units_of_the_last_digit() {
        // The value 2001-09-09 01:46:40.12 as MariaDB stores it with mysql56_temporal_format=OFF.
        let days = (2001 * 13 + 9) * 32 + 9;
        let count: u64 = (((days * 24 + 1) * 60 + 46) * 60 + 40) * 100 + 12;
        let [_, _, bytes @ ..] = count.to_be_bytes();
        assert_eq!(shown(2, Layout::Counted, &bytes), "2001-09-09 01:46:40.12");
    }

    #[test]
    fn microseconds_count_from_1970() {
        let value = read(0, Layout::Packed, &mut Cursor::new(&packed(1969, 12, 31, 23 << 12 | 59 << 6 | 59))).unwrap();
        assert_eq!(value.micros(), Some(-1_000_000));
    }

    #[test]
    fn dates_missing_from_the_calendar_keep_their_text() {
        let mut values = Vec::new();
        for (date, text) in [((0, 0, 0), "0000-00-00 00:00:00"), ((2021, 2, 31), "2021-02-31 00:00:00")] {
            let (year, month, day) = date;
            let value = read(0, Layout::Packed, &mut Cursor::new(&packed(year, month, day, 0))).unwrap();
            assert_eq!(append(value, 0, &mut values).unwrap().as_deref(), Some(text));
        }
        assert!(values.is_empty());
    }

    #[test]
    fn invalid_times_of_day_are_malformed() {
        for clock in [24 << 12, 60 << 6, 60] {
            assert!(read(0, Layout::Packed, &mut Cursor::new(&packed(2020, 1, 1, clock))).is_err());
        }
        assert!(read(0, Layout::Packed, &mut Cursor::new(&[0; 5])).is_err());
        assert!(read(6, Layout::Packed, &mut Cursor::new(&[0x80, 0, 0, 0, 0, 0xff, 0xff, 0xff])).is_err());
    }
}
