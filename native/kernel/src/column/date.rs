//! DATE: three bytes, little-endian: five bits of day, four of month, fifteen of year. This module also contains the
//! calendar.

use super::integer::write_digits;
use super::store::Appended;
use crate::cursor::Cursor;
use crate::error::Result;

/// A date as stored, which may be missing from the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Date {
    pub year: u16,
    pub month: u8,
    pub day: u8,
}

/// Days before each month of a common year.
const DAYS_BEFORE: [u16; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];

const DAYS_OF: [u8; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];

/// Days from 0001-01-01 to 1970-01-01.
const DAYS_TO_EPOCH: i32 = 719_162;

#[inline(always)]
fn is_leap(year: u16) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

impl Date {
    /// Returns the days since 1970-01-01, or `None` if the calendar has no such day. Such dates are zero dates, dates
    /// with a zero part, dates in the year 0, and invalid days that `ALLOW_INVALID_DATES` accepts.
    #[inline(always)]
    pub fn days(self) -> Option<i32> {
        let Date { year, month, day } = self;
        let slot = usize::from(month).wrapping_sub(1);
        let (before, &days) = (i32::from(*DAYS_BEFORE.get(slot)?), DAYS_OF.get(slot)?);
        let leap = is_leap(year);
        let days_in_month = days + u8::from(leap && month == 2);
        if year == 0 || day == 0 || day > days_in_month {
            return None;
        }
        let past = i32::from(year) - 1;
        let leap_day = i32::from(leap && month > 2);
        Some(past * 365 + past / 4 - past / 100 + past / 400 + before + leap_day + i32::from(day) - 1 - DAYS_TO_EPOCH)
    }

    /// Converts a number of days since 1970-01-01, at least 0, to a date.
    pub(super) fn from_days(days: u32) -> Date {
        // Count in 400-year cycles from 2000-03-01, so that the leap day comes last. 1970-01-01 is 11017 days earlier.
        // Adding a whole cycle of 146097 days keeps the number positive.
        let day = days + 146_097 - 11_017;
        let (cycle, day) = (day / 146_097, day % 146_097);
        let century = (day / 36_524).min(3);
        let day = day - century * 36_524;
        let (four, day) = (day / 1_461, day % 1_461);
        let odd = (day / 365).min(3);
        let day = day - odd * 365;
        // From March on, month lengths repeat every five months (153 days).
        let month = (day * 5 + 2) / 153;
        let day_of_month = day - (month * 153 + 2) / 5 + 1;
        let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
        let year = 1600 + cycle * 400 + century * 100 + four * 4 + odd + carry;
        let small = |value: u32| u8::try_from(value).unwrap_or(0);
        Date { year: u16::try_from(year).unwrap_or(0), month: small(month), day: small(day_of_month) }
    }
}

#[inline(always)]
pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Date> {
    let packed = cursor.u24()?;
    let [low, middle, high, _] = packed.to_le_bytes();
    let year = u16::from_le_bytes([middle, high]) >> 1;
    Ok(Date { year, month: (middle & 1) << 3 | low >> 5, day: low & 0x1f })
}

#[inline]
pub(super) fn append(value: Date, values: &mut Vec<i32>) -> Appended {
    match value.days() {
        Some(days) => {
            values.push(days);
            Ok(None)
        }
        None => Ok(Some(text(value))),
    }
}

#[cold]
fn text(value: Date) -> String {
    let mut out = Vec::with_capacity(10);
    write_text(value, &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

pub(crate) fn write_text(value: Date, out: &mut Vec<u8>) {
    write_digits(value.year.into(), 4, out);
    out.push(b'-');
    write_digits(value.month.into(), 2, out);
    out.push(b'-');
    write_digits(value.day.into(), 2, out);
}

/// Returns the days since 1970-01-01. Returns `None` for a date that does not exist in the calendar. Debezium's value
/// is then null, or 0 if the column is not nullable.
pub(crate) fn debezium(value: Date) -> Option<i64> {
    value.days().map(i64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn date(year: u16, month: u8, day: u8) -> Date {
        Date { year, month, day }
    }

    #[test]
    fn days_count_from_1970() {
        assert_eq!(date(1970, 1, 1).days(), Some(0));
        assert_eq!(date(1, 1, 1).days(), Some(-719_162));
        assert_eq!(date(9999, 12, 31).days(), Some(2_932_896));
        assert_eq!(date(2000, 2, 29).days(), Some(11_016));
        assert_eq!(date(2000, 3, 1).days(), Some(11_017));
        assert_eq!(date(1900, 3, 1).days(), Some(-25_508));
    }

    #[test]
    fn days_missing_from_the_calendar_are_none() {
        for (year, month, day) in [
            (0, 0, 0),
            (2020, 0, 0),
            (2020, 1, 0),
            (2020, 0, 1),
            (0, 1, 1),
            (2021, 2, 29),
            (1900, 2, 29),
            (2020, 4, 31),
            (2020, 13, 1),
        ] {
            assert_eq!(date(year, month, day).days(), None, "{year}-{month}-{day}");
        }
    }

    #[test]
    fn days_and_dates_are_inverse() {
        for days in 0..60_000 {
            let date = Date::from_days(days);
            assert_eq!(date.days(), i32::try_from(days).ok(), "{date:?}");
        }
    }

    #[test]
    fn three_bytes_hold_a_date() {
        // 2024-02-29: 2024 << 9 | 2 << 5 | 29.
        let packed: u32 = 2024 << 9 | 2 << 5 | 29;
        let bytes = packed.to_le_bytes();
        assert_eq!(read(&mut Cursor::new(&bytes)).unwrap(), date(2024, 2, 29));
        let packed: u32 = 9999 << 9 | 12 << 5 | 31;
        assert_eq!(read(&mut Cursor::new(&packed.to_le_bytes())).unwrap(), date(9999, 12, 31));
    }

    #[test]
    fn dates_missing_from_the_calendar_keep_their_text() {
        let mut values = Vec::new();
        assert_eq!(append(date(0, 0, 0), &mut values).unwrap(), Some("0000-00-00".to_owned()));
        assert_eq!(append(date(2021, 2, 31), &mut values).unwrap(), Some("2021-02-31".to_owned()));
        assert!(values.is_empty());
    }
}
