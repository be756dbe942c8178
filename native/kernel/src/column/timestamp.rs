//! TIMESTAMP: seconds since 1970 in UTC, and a fraction.
//!
//! Sources: `my_timestamp_from_binary` (packed, big-endian), `Field_timestamp` (classic, little-endian), MariaDB's
//! `Field_timestamp_hires` (counted: big-endian seconds, then units of the last digit). 0 is the zero date. MariaDB
//! since 11.5 counts seconds up to the year 2106, MySQL to 2038: this module reads both as unsigned numbers.

use super::store::Appended;
use super::{datetime, fraction, Date, DateTime, Layout};
use crate::cursor::Cursor;
use crate::error::Result;

/// The time zone of the Arrow type.
pub(super) const ZONE: &str = "UTC";

/// A point in time in UTC; 0 seconds and 0 microseconds is the zero date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Timestamp {
    pub seconds: u32,
    pub micros: u32,
}

#[inline]
pub(super) fn width(fsp: u8, layout: Layout) -> usize {
    match layout {
        Layout::Packed | Layout::Counted => 4 + fraction::width(fsp),
        Layout::Classic => 4,
    }
}

#[inline(always)]
pub(super) fn read(fsp: u8, layout: Layout, cursor: &mut Cursor<'_>) -> Result<Timestamp> {
    Ok(match layout {
        Layout::Packed => Timestamp { seconds: cursor.u32_be()?, micros: fraction::read(fsp, cursor)? },
        Layout::Classic => Timestamp { seconds: cursor.u32()?, micros: 0 },
        Layout::Counted => {
            let seconds = cursor.u32_be()?;
            let count = u32::try_from(cursor.uint_be(fraction::width(fsp))?).unwrap_or(u32::MAX);
            let micros = fraction::check(count.saturating_mul(fraction::unit(fsp)))?;
            Timestamp { seconds, micros }
        }
    })
}

#[inline]
pub(super) fn append(value: Timestamp, fsp: u8, values: &mut Vec<i64>) -> Appended {
    if value.seconds == 0 {
        return Ok(Some(datetime::text(civil(value), fsp)));
    }
    values.push(i64::from(value.seconds) * 1_000_000 + i64::from(value.micros));
    Ok(None)
}

/// Converts to date and time in UTC. The server shows second 0 as the zero date, whatever its fraction.
fn civil(value: Timestamp) -> DateTime {
    let Timestamp { seconds, micros } = value;
    if seconds == 0 {
        return DateTime { date: Date { year: 0, month: 0, day: 0 }, hour: 0, minute: 0, second: 0, micros };
    }
    let part = |value: u32| u8::try_from(value).unwrap_or(0);
    let clock = seconds % 86_400;
    DateTime {
        date: Date::from_days(seconds / 86_400),
        hour: part(clock / 3_600),
        minute: part(clock / 60 % 60),
        second: part(clock % 60),
        micros,
    }
}

/// Writes the time in the zone whose offset from UTC is `zone_seconds`.
pub(crate) fn write_text_in(value: Timestamp, fsp: u8, zone_seconds: i32, out: &mut Vec<u8>) {
    const DAY: i64 = 86_400;
    if value.seconds == 0 || zone_seconds == 0 {
        return write_text(value, fsp, out);
    }
    let seconds = i64::from(value.seconds) + i64::from(zone_seconds);
    // West of UTC the first hours of 1970 belong to 1969. East of UTC the calendar continues after 2106.
    let days = u32::try_from(seconds.div_euclid(DAY));
    let date = days.map_or(Date { year: 1969, month: 12, day: 31 }, Date::from_days);
    let clock = u32::try_from(seconds.rem_euclid(DAY)).unwrap_or(0);
    let clock = civil(Timestamp { seconds: clock + 86_400, micros: value.micros });
    datetime::write_text(DateTime { date, ..clock }, fsp, out);
}

pub(crate) fn write_text(value: Timestamp, fsp: u8, out: &mut Vec<u8>) {
    datetime::write_text(civil(value), fsp, out);
}

/// Whether the timestamp is the zero date, which Debezium's messages show as null in a nullable column.
pub(crate) fn is_zero(value: Timestamp) -> bool {
    value.seconds == 0
}

/// Writes the time in UTC in ISO 8601 format with the column's fractional digits. The zero date becomes second 0.
pub(crate) fn write_debezium(value: Timestamp, fsp: u8, out: &mut Vec<u8>) {
    if is_zero(value) {
        return out.extend_from_slice(b"1970-01-01T00:00:00Z");
    }
    datetime::write_separated(civil(value), b'T', fsp, out);
    out.push(b'Z');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(fsp: u8, layout: Layout, bytes: &[u8]) -> String {
        let mut out = Vec::new();
        write_text(read(fsp, layout, &mut Cursor::new(bytes)).unwrap(), fsp, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn seconds_show_as_utc() {
        assert_eq!(shown(0, Layout::Packed, &[0x3b, 0x9a, 0xca, 0x00]), "2001-09-09 01:46:40");
        assert_eq!(shown(0, Layout::Classic, &[0x00, 0xca, 0x9a, 0x3b]), "2001-09-09 01:46:40");
        assert_eq!(shown(1, Layout::Counted, &[0x3b, 0x9a, 0xca, 0x00, 7]), "2001-09-09 01:46:40.7");
        assert_eq!(shown(0, Layout::Packed, &[0xff; 4]), "2106-02-07 06:28:15");
    }

    #[test]
    fn second_zero_is_the_zero_date() {
        let mut values = Vec::new();
        let zero = read(3, Layout::Packed, &mut Cursor::new(&[0; 6])).unwrap();
        assert_eq!(append(zero, 3, &mut values).unwrap().as_deref(), Some("0000-00-00 00:00:00.000"));
        assert!(values.is_empty());
        let first_second = read(0, Layout::Packed, &mut Cursor::new(&[0, 0, 0, 1])).unwrap();
        assert_eq!(append(first_second, 0, &mut values).unwrap(), None);
        assert_eq!(values, [1_000_000]);
    }

    #[test]
    fn a_fraction_over_a_second_is_malformed() {
        assert!(read(1, Layout::Counted, &mut Cursor::new(&[0, 0, 0, 1, 10])).is_err());
        assert!(read(2, Layout::Packed, &mut Cursor::new(&[0, 0, 0, 1, 100])).is_err());
    }
}
