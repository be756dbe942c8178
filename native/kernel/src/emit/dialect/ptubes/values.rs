//! Writes values as in Ptubes' events. Dates and times are milliseconds since 1970, computed in the server's time zone.
//! Nanoseconds, and the text of values that milliseconds do not determine, are written in addition.

use crate::column::typed::Typed;
use crate::column::{
    binary, bit, compressed, date, datetime, float, geometry, integer, text, time, Date, DateTime, Kind, Time,
    Timestamp, Value,
};
use crate::error::Result;

/// A date or time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// Milliseconds since 1970.
    pub millis: i64,
    /// Nanoseconds within the second; None for a DATE.
    pub nanos: Option<u32>,
    /// The value's text, for values that the milliseconds do not determine: every TIME, and dates that Java changes.
    pub shown: Option<String>,
}

/// The day since 1970 from which Java's calendar is Gregorian: 1582-10-15.
const GREGORIAN_FROM: i64 = -141_427;

/// The day number of 1970-01-01 in the formulas below.
const DAYS_TO_EPOCH: i64 = 2_440_588;

/// Java's calendar changes dates before this year.
const YEAR_MIN: u16 = 1000;

const DAY_SECONDS: i64 = 86_400;

/// Returns the day that Java's lenient calendar assigns to any year, month and day, counted from 1970. Excess months
/// and days carry over, and days before the start of the Gregorian calendar are Julian.
fn lenient_days(date: Date) -> i64 {
    let months = i64::from(date.year) * 12 + i64::from(date.month) - 1;
    let (year, month) = (months.div_euclid(12), months.rem_euclid(12) + 1);
    // In years that begin in March, the leap day is the last day.
    let past = i64::from(month <= 2);
    let (years, months) = (year + 4800 - past, month + 12 * past - 3);
    let days = (153 * months + 2) / 5 + 365 * years + years / 4 + i64::from(date.day);
    let gregorian = days - years / 100 + years / 400 - 32_045 - DAYS_TO_EPOCH;
    let julian = days - 32_083 - DAYS_TO_EPOCH;
    if gregorian >= GREGORIAN_FROM {
        gregorian
    } else {
        julian
    }
}

/// Returns the day of a date, and whether Java shows exactly this date.
fn days(date: Date) -> (i64, bool) {
    match date.days().filter(|_| date.year >= YEAR_MIN) {
        Some(days) => (i64::from(days), true),
        None => (lenient_days(date), false),
    }
}

fn write_to_text(write: impl FnOnce(&mut Vec<u8>)) -> Option<String> {
    let mut out = Vec::with_capacity(26);
    write(&mut out);
    Some(String::from_utf8_lossy(&out).into_owned())
}

fn of_date(value: Date, zone_seconds: i32) -> Moment {
    let (days, exact) = days(value);
    Moment {
        millis: (days * DAY_SECONDS - i64::from(zone_seconds)) * 1000,
        nanos: None,
        shown: if exact { None } else { write_to_text(|out| date::write_text(value, out)) },
    }
}

fn of_datetime(value: DateTime, zone_seconds: i32) -> Moment {
    let (days, exact) = days(value.date);
    let clock = (i64::from(value.hour) * 60 + i64::from(value.minute)) * 60 + i64::from(value.second);
    let seconds = days * DAY_SECONDS + clock - i64::from(zone_seconds);
    Moment {
        millis: seconds * 1000 + i64::from(value.micros / 1000),
        nanos: Some(value.micros * 1000),
        shown: if exact { None } else { write_to_text(|out| datetime::write_text(value, 6, out)) },
    }
}

fn of_timestamp(value: Timestamp) -> Moment {
    Moment {
        millis: i64::from(value.seconds) * 1000 + i64::from(value.micros / 1000),
        nanos: Some(value.micros * 1000),
        shown: (value.seconds == 0).then(|| "0000-00-00 00:00:00.000000".to_owned()),
    }
}

fn of_time(value: Time, zone_seconds: i32) -> Moment {
    let micros = value.micros() - i64::from(zone_seconds) * 1_000_000;
    Moment {
        millis: micros.div_euclid(1000),
        nanos: Some(u32::try_from(micros.rem_euclid(1_000_000)).unwrap_or(0) * 1000),
        shown: write_to_text(|out| time::write_text(value, 6, out)),
    }
}

/// Whether the values of a column are dates or times.
pub(super) fn has_moments(kind: &Kind) -> bool {
    match kind {
        Kind::Date | Kind::Time { .. } | Kind::DateTime { .. } | Kind::Timestamp { .. } => true,
        Kind::Null
        | Kind::Integer { .. }
        | Kind::Float
        | Kind::Double
        | Kind::Decimal { .. }
        | Kind::Bit { .. }
        | Kind::Year
        | Kind::Text { .. }
        | Kind::Binary { .. }
        | Kind::CompressedText { .. }
        | Kind::CompressedBinary { .. }
        | Kind::Enumeration { .. }
        | Kind::Set { .. }
        | Kind::Json { .. }
        | Kind::Geometry { .. }
        | Kind::Vector { .. }
        | Kind::Uuid
        | Kind::Inet4
        | Kind::Inet6 => false,
    }
}

/// Returns the value as a date or time; None for other values. The server's time zone is `zone_seconds` ahead of UTC.
#[inline]
pub(super) fn moment(value: &Value<'_>, zone_seconds: i32) -> Option<Moment> {
    Some(match value {
        Value::Date(value) => of_date(*value, zone_seconds),
        Value::DateTime(value) => of_datetime(*value, zone_seconds),
        Value::Timestamp(value) => of_timestamp(*value),
        Value::Time(value) => of_time(*value, zone_seconds),
        _ => return None,
    })
}

/// Writes the text of a value.
///
/// Raises `ValueMalformed` if the value is invalid for the kind.
#[inline]
pub(super) fn write(value: &Value<'_>, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
    match value.typed(kind)? {
        Typed::Null => {}
        Typed::Int(value) => integer::write_signed(value, out),
        Typed::UInt(value) | Typed::Set { bits: value, .. } => integer::write_unsigned(value, out),
        Typed::Year(value) => integer::write_unsigned(value.into(), out),
        Typed::Enumeration { index, .. } => integer::write_unsigned(index.into(), out),
        Typed::Float(value) => float::write_java_single(value, out),
        Typed::Double(value) => float::write_java_double(value, out),
        Typed::Bit { value, bits } => {
            let mut bytes = Vec::with_capacity(8);
            bit::write_text(value, bits, &mut bytes);
            binary::write_latin1_plain(&bytes, out);
        }
        Typed::Geometry(bytes) => geometry::write_wkt(bytes, out)?,
        Typed::Text { bytes, charset } => text::write_lossy(bytes, charset, out),
        Typed::Bytes { bytes, form } => binary::write_latin1(bytes, form, out),
        Typed::Vector(bytes) => binary::write_latin1_plain(bytes, out),
        Typed::CompressedBytes(bytes) => {
            let mut plain = Vec::new();
            compressed::write_bytes(bytes, &mut plain)?;
            binary::write_latin1_plain(&plain, out);
        }
        plain @ (Typed::Decimal(_)
        | Typed::Date(_)
        | Typed::DateTime { .. }
        | Typed::Timestamp { .. }
        | Typed::Time { .. }
        | Typed::CompressedText { .. }
        | Typed::Json(_)
        | Typed::JsonText(_)
        | Typed::Uuid(_)
        | Typed::Inet4(_)
        | Typed::Inet6(_)) => plain.write_text(out)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn date(year: u16, month: u8, day: u8) -> Date {
        Date { year, month, day }
    }

    #[test]
    fn dates_are_midnights_and_keep_their_text_if_java_changes_them() {
        assert_eq!(of_date(date(1970, 1, 2), 0), Moment { millis: 86_400_000, nanos: None, shown: None });
        assert_eq!(of_date(date(1970, 1, 2), 3600).millis, 82_800_000);
        // Java shows 0000-00-00 as the last day of November of the year 2 BC.
        let zero = of_date(date(0, 0, 0), 0);
        assert_eq!((zero.millis, zero.shown.as_deref()), (-62_170_156_800_000, Some("0000-00-00")));
        let carried = of_date(date(2021, 2, 31), 0);
        assert_eq!(carried.millis, of_date(date(2021, 3, 3), 0).millis);
        assert_eq!(carried.shown.as_deref(), Some("2021-02-31"));
        assert_eq!(lenient_days(date(2024, 2, 29)), i64::from(date(2024, 2, 29).days().unwrap()));
    }

    #[test]
    fn spans_have_their_text_and_a_fraction_that_is_never_negative() {
        let span = |negative, micros| Time { negative, hours: 100, minutes: 0, seconds: 1, micros };
        let moment = of_time(span(true, 500_000), 0);
        assert_eq!((moment.millis, moment.nanos), (-360_001_500, Some(500_000_000)));
        assert_eq!(moment.shown.as_deref(), Some("-100:00:01.500000"));
        assert_eq!(of_time(span(false, 0), 0).millis, 360_001_000);
    }
}
