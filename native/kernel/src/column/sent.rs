//! Appends values that a server sends in a text result set, with the same result as values of a row image.
//!
//! The session must have `character_set_results` NULL and the time zone +00:00: texts are in the column's own charset,
//! and timestamps are in UTC. A FLOAT must be selected as a DOUBLE (`column * 1e0`), because the server shows only six
//! digits of a FLOAT. Other columns are selected as they are.

use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, Result};

use super::kind::misplaced;
use super::store::{Appended, Store};
use super::{binary, bit, date, datetime, decimal, fraction, inet, integer, text, time, timestamp, uuid, vector, year};
use super::{Date, DateTime, Kind, Time, Timestamp, Value};

const DAY_SECONDS: i64 = 86_400;

/// Appends a value from a text result set; `sent` is its text or its bytes. `charset` is the column's character set,
/// which ENUM and SET columns have as well.
#[inline(always)]
pub(super) fn append(store: &mut Store, kind: &Kind, charset: Charset, sent: &[u8]) -> Appended {
    match (kind, store) {
        (Kind::Integer { unsigned: false, .. }, store) => append_signed(sent, store),
        (Kind::Integer { unsigned: true, .. }, store) => integer::append_unsigned(unsigned(sent)?, store),
        (Kind::Text { charset, .. } | Kind::CompressedText { charset, .. }, Store::Utf8(runs)) => {
            text::append(sent, *charset, runs)
        }
        (Kind::Decimal { precision, scale }, store) => decimal::append_sent(sent, *precision, *scale, store),
        (Kind::DateTime { fsp, .. }, Store::Timestamp { values, .. }) => {
            datetime::append(moment(sent, kind)?, *fsp, values)
        }
        (Kind::Timestamp { fsp, .. }, Store::Timestamp { values, .. }) => {
            timestamp::append(stamp(moment(sent, kind)?)?, *fsp, values)
        }
        (kind, store) => append_rare(store, kind, charset, sent),
    }
}

#[inline(never)]
fn append_rare(store: &mut Store, kind: &Kind, charset: Charset, sent: &[u8]) -> Appended {
    match (kind, store) {
        (Kind::Float, Store::Float32(values)) => {
            // A DOUBLE represents every FLOAT exactly, so nothing is rounded.
            values.push(number(sent)? as f32);
            Ok(None)
        }
        (Kind::Double, Store::Float64(values)) => {
            values.push(number(sent)?);
            Ok(None)
        }
        (Kind::Bit { bits }, store) => {
            bit::append(bit::read(*bits, &mut whole(sent, bit::width(*bits), kind)?)?, store)
        }
        (Kind::Year, Store::Int16(values)) => year::append(year_of(sent)?, values),
        (Kind::Date, Store::Date32(values)) => date::append(day(sent, kind)?, values),
        (Kind::Time { .. }, Store::Duration(values)) => {
            time::append(span(sent, kind)?, values);
            Ok(None)
        }
        (Kind::Enumeration { .. } | Kind::Set { .. }, Store::Utf8(runs)) => text::append(sent, charset, runs),
        (Kind::Json { .. }, Store::Utf8(runs)) => text::append(sent, Charset::Utf8mb4, runs),
        (Kind::Binary { form, .. }, Store::Binary(runs)) => binary::append(sent, *form, runs),
        (Kind::CompressedBinary { .. } | Kind::Geometry { .. }, Store::Binary(runs)) => {
            binary::append_plain(sent, runs)
        }
        (Kind::Vector { .. }, Store::Floats(runs)) if sent.len() % 4 == 0 => vector::append(sent, runs),
        (Kind::Uuid, Store::Utf8(runs)) => match ascii(sent).and_then(uuid::parse) {
            Some(bytes) => uuid::append(&bytes, runs),
            None => Err(wrong(sent, kind)),
        },
        (Kind::Inet4, Store::Utf8(runs)) => match ascii(sent).and_then(inet::parse4) {
            Some(bytes) => inet::append4(&bytes, runs),
            None => Err(wrong(sent, kind)),
        },
        (Kind::Inet6, Store::Utf8(runs)) => match ascii(sent).and_then(inet::parse6) {
            Some(bytes) => inet::append6(&bytes, runs),
            None => Err(wrong(sent, kind)),
        },
        (Kind::Vector { .. }, _) => Err(vector::odd(sent)),
        (kind, _) => Err(misplaced("a value of a result set", kind)),
    }
}

#[cold]
fn wrong(sent: &[u8], kind: &Kind) -> Error {
    let shown = String::from_utf8_lossy(sent.get(..40).unwrap_or(sent)).into_owned();
    value_malformed(format!("{shown:?} is no value of {}", kind.type_text()))
}

fn ascii(sent: &[u8]) -> Option<&str> {
    std::str::from_utf8(sent).ok()
}

/// Returns the bytes of a value that must have this width.
fn whole<'a>(sent: &'a [u8], width: usize, kind: &Kind) -> Result<Cursor<'a>> {
    match sent.len() == width {
        true => Ok(Cursor::new(sent)),
        false => Err(wrong(sent, kind)),
    }
}

#[inline(always)]
fn digit(byte: u8) -> Option<u8> {
    Some(byte.wrapping_sub(b'0')).filter(|digit| *digit < 10)
}

#[inline(always)]
fn unsigned(sent: &[u8]) -> Result<u64> {
    let mut value = 0u64;
    // Nineteen digits always fit into 64 bits.
    if sent.len() < 20 {
        for byte in sent {
            match digit(*byte) {
                Some(digit) => value = value * 10 + u64::from(digit),
                None => return Err(not_an_integer(sent)),
            }
        }
        return if sent.is_empty() { Err(not_an_integer(sent)) } else { Ok(value) };
    }
    ascii(sent).and_then(|text| text.parse().ok()).ok_or_else(|| not_an_integer(sent))
}

#[cold]
fn not_an_integer(sent: &[u8]) -> Error {
    value_malformed(format!("{:?} is no integer", String::from_utf8_lossy(sent.get(..40).unwrap_or(sent))))
}

#[inline(always)]
fn signed(sent: &[u8]) -> Result<i64> {
    let (negative, magnitude) = match sent.split_first() {
        Some((b'-', digits)) => (true, unsigned(digits)?),
        _ => (false, unsigned(sent)?),
    };
    let value = match negative {
        true => 0i64.checked_sub_unsigned(magnitude),
        false => i64::try_from(magnitude).ok(),
    };
    value.ok_or_else(|| not_an_integer(sent))
}

/// Parses the text of a value whose type is not stored as text.
///
/// Raises `ValueMalformed` for a text that is not a value of the kind, and for kinds that this function does not parse.
pub(crate) fn value<'a>(kind: &Kind, sent: &'a [u8]) -> Result<Value<'a>> {
    Ok(match kind {
        Kind::Integer { unsigned: false, .. } => Value::Int(signed(sent)?),
        Kind::Integer { unsigned: true, .. } => Value::UInt(unsigned(sent)?),
        Kind::Bit { .. } => Value::Bit(unsigned(sent)?),
        Kind::Float => Value::Float(ascii(sent).and_then(|text| text.parse().ok()).ok_or_else(|| wrong(sent, kind))?),
        Kind::Double => Value::Double(number(sent)?),
        Kind::Year => Value::Year(year_of(sent)?),
        Kind::Date => Value::Date(day(sent, kind)?),
        Kind::DateTime { .. } => Value::DateTime(moment(sent, kind)?),
        Kind::Timestamp { .. } => Value::Timestamp(stamp(moment(sent, kind)?)?),
        Kind::Time { .. } => Value::Time(span(sent, kind)?),
        Kind::Text { .. } => Value::Text(sent),
        Kind::Binary { .. } => Value::Bytes(sent),
        kind => return Err(wrong(sent, kind)),
    })
}

#[inline(always)]
fn append_signed(sent: &[u8], store: &mut Store) -> Appended {
    let value = signed(sent)?;
    match store {
        Store::Int64(values) => values.push(value),
        Store::Int32(values) => match i32::try_from(value) {
            Ok(value) => values.push(value),
            Err(_) => return Err(not_an_integer(sent)),
        },
        store => return integer::append_signed(value, store),
    }
    Ok(None)
}

fn number(sent: &[u8]) -> Result<f64> {
    let parsed = ascii(sent).and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| value_malformed(format!("{:?} is no number", String::from_utf8_lossy(sent))))
}

/// MariaDB still has YEAR(2), which shows the last two digits of 1970 to 2069.
fn year_of(sent: &[u8]) -> Result<u16> {
    let year = unsigned(sent)?;
    let year = match (sent.len(), year) {
        (2, 70..) => 1900 + year,
        (2, _) => 2000 + year,
        _ => year,
    };
    u16::try_from(year).ok().filter(|year| *year < 2156).ok_or_else(|| not_an_integer(sent))
}

/// Parses two digits at the start.
#[inline(always)]
fn pair(text: &[u8]) -> Option<(u8, &[u8])> {
    let ([tens, ones], rest) = text.split_first_chunk::<2>()?;
    Some((digit(*tens)? * 10 + digit(*ones)?, rest))
}

/// Parses two digits after a separator.
#[inline(always)]
fn pair_after(separator: u8, text: &[u8]) -> Option<(u8, &[u8])> {
    match text.split_first() {
        Some((first, rest)) if *first == separator => pair(rest),
        _ => None,
    }
}

#[inline(always)]
fn date_front(text: &[u8]) -> Option<(Date, &[u8])> {
    let (century, rest) = pair(text)?;
    let (year, rest) = pair(rest)?;
    let (month, rest) = pair_after(b'-', rest)?;
    let (day, rest) = pair_after(b'-', rest)?;
    let fits = month <= 12 && day <= 31;
    fits.then_some((Date { year: u16::from(century) * 100 + u16::from(year), month, day }, rest))
}

/// Parses the optional fraction after the seconds: a point and up to six digits; returns microseconds.
#[inline(always)]
fn micros_rest(text: &[u8]) -> Option<u32> {
    let Some((first, digits)) = text.split_first() else { return Some(0) };
    if *first != b'.' || digits.is_empty() || digits.len() > 6 {
        return None;
    }
    let mut value = 0;
    for byte in digits {
        value = value * 10 + u32::from(digit(*byte)?);
    }
    Some(value * fraction::unit(u8::try_from(digits.len()).unwrap_or(6)))
}

#[inline(always)]
fn clock_rest(text: &[u8]) -> Option<(u8, u8, u32)> {
    let (minute, rest) = pair_after(b':', text)?;
    let (second, rest) = pair_after(b':', rest)?;
    let micros = micros_rest(rest)?;
    (minute < 60 && second < 60).then_some((minute, second, micros))
}

fn day(sent: &[u8], kind: &Kind) -> Result<Date> {
    match date_front(sent) {
        Some((date, [])) => Ok(date),
        _ => Err(wrong(sent, kind)),
    }
}

#[inline(always)]
fn moment(sent: &[u8], kind: &Kind) -> Result<DateTime> {
    let parsed = date_front(sent).and_then(|(date, rest)| {
        let (hour, rest) = pair_after(b' ', rest)?;
        let (minute, second, micros) = clock_rest(rest)?;
        (hour < 24).then_some(DateTime { date, hour, minute, second, micros })
    });
    parsed.ok_or_else(|| wrong(sent, kind))
}

/// Converts a date and time in UTC to seconds since 1970. The zero date becomes second 0 and keeps its fraction.
#[inline(always)]
fn stamp(moment: DateTime) -> Result<Timestamp> {
    let DateTime { date, micros, .. } = moment;
    if date == (Date { year: 0, month: 0, day: 0 }) {
        return Ok(Timestamp { seconds: 0, micros });
    }
    let clock = (i64::from(moment.hour) * 60 + i64::from(moment.minute)) * 60 + i64::from(moment.second);
    let seconds = date.days().map(|days| i64::from(days) * DAY_SECONDS + clock);
    match seconds.and_then(|seconds| u32::try_from(seconds).ok()) {
        Some(seconds) => Ok(Timestamp { seconds, micros }),
        None => Err(value_malformed(format!("a TIMESTAMP in the year {}", date.year))),
    }
}

/// Parses a time span: an optional sign, and hours of at least two digits.
fn span(sent: &[u8], kind: &Kind) -> Result<Time> {
    let (negative, text) = match sent.split_first() {
        Some((b'-', rest)) => (true, rest),
        _ => (false, sent),
    };
    let digits = text.iter().take_while(|byte| **byte != b':').count();
    let parsed = text.split_at_checked(digits).and_then(|(hours, rest)| {
        let hours = u16::try_from(unsigned(hours).ok()?).ok().filter(|hours| *hours <= 838)?;
        let (minutes, seconds, micros) = clock_rest(rest)?;
        Some(Time { negative, hours, minutes, seconds, micros })
    });
    parsed.ok_or_else(|| wrong(sent, kind))
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;
    use arrow_array::types::{Decimal128Type, TimestampMicrosecondType};
    use arrow_array::{Array, ArrayRef};

    use super::*;
    use crate::column::ColumnBuilder;
    use crate::error::ErrorKind;

    fn sent(type_text: &str, values: &[&[u8]]) -> Result<(ArrayRef, Vec<String>)> {
        let kind = Kind::declared(type_text, Some(Charset::Latin1), true)?;
        let mut builder = ColumnBuilder::new(&kind);
        let mut refused = Vec::new();
        for value in values {
            refused.extend(builder.append_sent(&kind, Charset::Latin1, value)?);
        }
        Ok((builder.finish(), refused))
    }

    fn refusal(type_text: &str, value: &[u8]) -> ErrorKind {
        sent(type_text, &[value]).unwrap_err().kind()
    }

    #[test]
    fn integers_keep_their_extremes_and_lose_their_zeros() {
        let (array, _) = sent("bigint", &[b"-9223372036854775808", b"9223372036854775807", b"-0"]).unwrap();
        assert_eq!(array.as_primitive::<arrow_array::types::Int64Type>().values(), &[i64::MIN, i64::MAX, 0]);
        let (array, _) =
            sent("bigint(20) unsigned zerofill", &[b"00000000000000000007", b"18446744073709551615"]).unwrap();
        assert_eq!(array.as_primitive::<Decimal128Type>().values(), &[7, i128::from(u64::MAX)]);
        for (type_text, value) in [
            ("tinyint", "128"),
            ("int", "2147483648"),
            ("bigint", "9223372036854775808"),
            ("int", ""),
            ("int", "1a"),
            ("bigint unsigned", "18446744073709551616"),
            ("int unsigned", "-1"),
        ] {
            assert!(sent(type_text, &[value.as_bytes()]).is_err(), "{type_text} {value}");
        }
    }

    #[test]
    fn decimals_are_digits_whatever_their_zeros() {
        let (array, _) = sent("decimal(10,2)", &[b"-0.05", b"00012345678.90", b"0.00"]).unwrap();
        assert_eq!(array.as_primitive::<Decimal128Type>().values(), &[-5, 1_234_567_890, 0]);
        let (array, _) =
            sent("decimal(40,2) zerofill", &[b"00000000000000000000000000000000000012.30", b"-0.10"]).unwrap();
        assert_eq!(array.as_string::<i32>().iter().flatten().collect::<Vec<_>>(), ["12.30", "-0.10"]);
        for value in ["", "-", "1.234", "1.2", "123456789.00", "1,2", "1.-2"] {
            assert_eq!(refusal("decimal(10,2)", value.as_bytes()), ErrorKind::ValueMalformed, "{value}");
        }
    }

    #[test]
    fn dates_missing_from_the_calendar_are_reported_as_shown() {
        let (array, refused) = sent("timestamp(1)", &[b"2001-09-09 01:46:40.5", b"0000-00-00 00:00:00.0"]).unwrap();
        assert_eq!(array.as_primitive::<TimestampMicrosecondType>().value(0), 1_000_000_000_500_000);
        assert!(array.is_null(1));
        assert_eq!(refused, ["0000-00-00 00:00:00.0"]);
        assert_eq!(sent("datetime(3)", &[b"2021-02-31 23:59:59.001"]).unwrap().1, ["2021-02-31 23:59:59.001"]);
        assert_eq!(sent("date", &[b"0000-05-00"]).unwrap().1, ["0000-05-00"]);
        for (type_text, value) in [
            ("date", "2020-1-01"),
            ("date", "2020-13-01"),
            ("datetime", "2020-01-01 24:00:00"),
            ("time", "839:00:00"),
            ("timestamp", "2107-01-01 00:00:00"),
            ("timestamp", "1969-12-31 23:59:59"),
            ("time", "1"),
            ("datetime(6)", "2020-01-01 00:00:00.1234567"),
            ("date", ""),
            ("year", "20x1"),
        ] {
            assert_eq!(refusal(type_text, value.as_bytes()), ErrorKind::ValueMalformed, "{type_text} {value}");
        }
    }

    #[test]
    fn texts_are_decoded_from_the_charset_of_their_column() {
        let (array, _) = sent("enum('x')", &[b"\xe4"]).unwrap();
        assert_eq!(array.as_string::<i32>().value(0), "ä");
        let (array, _) = sent("uuid", &[b"01234567-89AB-4def-8123-456789abcd00"]).unwrap();
        assert_eq!(array.as_string::<i32>().value(0), "01234567-89ab-4def-8123-456789abcd00");
        for (type_text, value) in [("uuid", &b"1"[..]), ("inet6", b"1"), ("inet4", b"::"), ("vector(1)", b"abc")] {
            assert_eq!(refusal(type_text, value), ErrorKind::ValueMalformed, "{type_text}");
        }
        assert_eq!(refusal("bit(9)", b"\x01"), ErrorKind::ValueMalformed);
    }
}
