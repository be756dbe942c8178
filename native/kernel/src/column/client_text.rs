//! Writes Arrow values as the client shows them. Arrow does not keep the declared number of fractional digits, so
//! fractions are written with as few digits as possible.

use super::{date, datetime, float, time, Date, DateTime, Time};

const DAY_MICROS: i64 = 86_400_000_000;
const SECOND_MICROS: i64 = 1_000_000;

/// Writes a FLOAT.
pub(crate) fn single(value: f32, out: &mut Vec<u8>) {
    float::write_single(value, out);
}

/// Writes a DOUBLE.
pub(crate) fn double(value: f64, out: &mut Vec<u8>) {
    float::write_double(value, out);
}

/// Writes a DATE, given in days since 1970-01-01.
pub(crate) fn date(days: i32, out: &mut Vec<u8>) {
    date::write_text(day(days.into()), out);
}

/// Writes a DATETIME or TIMESTAMP, given in microseconds since 1970-01-01 00:00:00.
pub(crate) fn datetime(micros: i64, out: &mut Vec<u8>) {
    let moment = moment(micros);
    datetime::write_text(moment, digits(moment.micros), out);
}

/// Converts microseconds since 1970-01-01 00:00:00.
pub(super) fn moment(micros: i64) -> DateTime {
    let (days, clock) = (micros.div_euclid(DAY_MICROS), micros.rem_euclid(DAY_MICROS));
    let seconds = clock / SECOND_MICROS;
    let [hour, minute, second] = [seconds / 3_600, seconds / 60 % 60, seconds % 60].map(small);
    DateTime { date: day(days), hour, minute, second, micros: part(clock % SECOND_MICROS) }
}

/// Writes a TIME, given in microseconds.
pub(crate) fn time(micros: i64, out: &mut Vec<u8>) {
    let span = span(micros);
    time::write_text(span, digits(span.micros), out);
}

/// Converts microseconds to a TIME.
pub(super) fn span(span: i64) -> Time {
    let second = SECOND_MICROS.unsigned_abs();
    let (magnitude, micros) = (span.unsigned_abs() / second, span.unsigned_abs() % second);
    let micros = u32::try_from(micros).unwrap_or(0);
    let hours = u16::try_from(magnitude / 3_600).unwrap_or(u16::MAX);
    let [minutes, seconds] = [magnitude / 60 % 60, magnitude % 60].map(|value| u8::try_from(value).unwrap_or(0));
    Time { negative: span < 0, hours, minutes, seconds, micros }
}

fn small(value: i64) -> u8 {
    u8::try_from(value).unwrap_or(0)
}

fn part(micros: i64) -> u32 {
    u32::try_from(micros).unwrap_or(0)
}

/// Converts a day number. A day outside the calendar becomes the zero date; no value contains such a day.
pub(super) fn day(days: i64) -> Date {
    /// Cycles of 400 years to add, so that every day from year 1 on falls after 1970.
    const CYCLES: i64 = 5;
    const CYCLE_DAYS: i64 = 146_097;
    const CYCLE_YEARS: u16 = 400;
    match u32::try_from(days + CYCLES * CYCLE_DAYS) {
        Ok(days) => {
            let Date { year, month, day } = Date::from_days(days);
            Date { year: year.saturating_sub(5 * CYCLE_YEARS), month, day }
        }
        Err(_) => Date { year: 0, month: 0, day: 0 },
    }
}

/// Returns the smallest number of digits that represents the fraction.
fn digits(micros: u32) -> u8 {
    let mut digits = 6;
    let mut rest = micros;
    while digits > 0 && rest % 10 == 0 {
        rest /= 10;
        digits -= 1;
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown<T>(write: fn(T, &mut Vec<u8>), value: T) -> String {
        let mut out = Vec::new();
        write(value, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn days_of_every_century_round_trip() {
        for days in (-719_162..=2_932_896).step_by(97).chain([-719_162, -1, 0, 2_932_896]) {
            assert_eq!(day(days.into()).days(), Some(days));
        }
        assert_eq!([shown(date, -719_162), shown(date, 2_932_896)], ["0001-01-01", "9999-12-31"]);
    }

    #[test]
    fn fractions_have_as_many_digits_as_they_need() {
        assert_eq!(shown(datetime, 0), "1970-01-01 00:00:00");
        assert_eq!(shown(datetime, -1), "1969-12-31 23:59:59.999999");
        assert_eq!(shown(datetime, 86_400_120_000), "1970-01-02 00:00:00.12");
        assert_eq!(shown(time, -1), "-00:00:00.000001");
        assert_eq!(shown(time, -1_500_000), "-00:00:01.5");
        assert_eq!(shown(time, 3_020_399_000_000), "838:59:59");
        assert_eq!(shown(time, -3_020_398_999_999), "-838:59:58.999999");
    }
}
