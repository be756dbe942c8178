//! Reads back the texts of values that their Arrow types cannot represent.

use crate::charset::Charset;
use crate::error::{value_malformed, Result};

use super::{hex, text, Date, DateTime, Kind, Timestamp, Value};

/// A value that its Arrow type cannot represent: a date that is missing from the calendar, or invalid text.
#[derive(Debug, Clone, PartialEq)]
pub enum Noted {
    /// DATE.
    Date(Date),
    /// DATETIME.
    DateTime(DateTime),
    /// TIMESTAMP.
    Timestamp(Timestamp),
    /// Text in UTF-8, with replacement characters for invalid bytes.
    Text(Vec<u8>),
}

impl Noted {
    /// Returns the value.
    pub fn value(&self) -> Value<'_> {
        match self {
            Noted::Date(date) => Value::Date(*date),
            Noted::DateTime(moment) => Value::DateTime(*moment),
            Noted::Timestamp(moment) => Value::Timestamp(*moment),
            Noted::Text(text) => Value::Text(text),
        }
    }
}

/// Parses the text that the decoder wrote for a value of a kind. Raises `ValueMalformed` for any other text.
pub fn noted(text: &str, kind: &Kind, charset: Charset) -> Result<Noted> {
    let wrong = || value_malformed(format!("`{text}` stands for no value of type {}", kind.type_text()));
    match kind {
        Kind::Date => Ok(Noted::Date(moment(text).ok_or_else(wrong)?.date)),
        Kind::DateTime { .. } => Ok(Noted::DateTime(moment(text).ok_or_else(wrong)?)),
        // The only timestamp that Arrow cannot represent is the zero date.
        Kind::Timestamp { .. } => {
            let micros = moment(text).ok_or_else(wrong)?.micros;
            Ok(Noted::Timestamp(Timestamp { seconds: 0, micros }))
        }
        Kind::Text { .. } | Kind::CompressedText { .. } => {
            let bytes = hex::read_literal(text).ok_or_else(wrong)?;
            let mut out = Vec::with_capacity(bytes.len());
            text::write_lossy(&bytes, charset, &mut out);
            Ok(Noted::Text(out))
        }
        Kind::Null
        | Kind::Integer { .. }
        | Kind::Float
        | Kind::Double
        | Kind::Decimal { .. }
        | Kind::Bit { .. }
        | Kind::Year
        | Kind::Time { .. }
        | Kind::Binary { .. }
        | Kind::CompressedBinary { .. }
        | Kind::Enumeration { .. }
        | Kind::Set { .. }
        | Kind::Json { .. }
        | Kind::Geometry { .. }
        | Kind::Vector { .. }
        | Kind::Uuid
        | Kind::Inet4
        | Kind::Inet6 => Err(wrong()),
    }
}

/// Parses a date, optionally followed by a time of day.
fn moment(text: &str) -> Option<DateTime> {
    let (clock, part) = text.split_once('.').unwrap_or((text, ""));
    let mut numbers = clock.split(['-', ' ', ':']).map(str::parse::<u16>);
    let mut next = || numbers.next().unwrap_or(Ok(0)).ok();
    let small = |value: u16| u8::try_from(value).ok();
    let date = Date { year: next()?, month: small(next()?)?, day: small(next()?)? };
    let [hour, minute, second] = [small(next()?)?, small(next()?)?, small(next()?)?];
    let micros = format!("{part:0<6}").parse().ok()?;
    Some(DateTime { date, hour, minute, second, micros })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::column::{Form, Layout};

    #[test]
    fn noted_texts_round_trip() {
        let datetime = Kind::DateTime { fsp: 3, layout: Layout::Packed };
        let date = Date { year: 2024, month: 2, day: 30 };
        let expected = DateTime { date, hour: 1, minute: 2, second: 3, micros: 40_000 };
        assert_eq!(noted("2024-02-30 01:02:03.04", &datetime, Charset::Utf8mb4).unwrap(), Noted::DateTime(expected));
        assert_eq!(noted("2024-02-30", &Kind::Date, Charset::Utf8mb4).unwrap(), Noted::Date(date));
        let timestamp = Kind::Timestamp { fsp: 0, layout: Layout::Packed };
        let zero = Noted::Timestamp(Timestamp { seconds: 0, micros: 0 });
        assert_eq!(noted("0000-00-00 00:00:00", &timestamp, Charset::Utf8mb4).unwrap(), zero);
        let text = Kind::Text { prefix: 1, form: Form::Varying(9), charset: Charset::Utf8mb4 };
        assert_eq!(noted("0x61FF", &text, Charset::Utf8mb4).unwrap(), Noted::Text("a\u{fffd}".into()));
        for (text, kind) in [("x", &Kind::Date), ("0x6", &text), ("1", &Kind::Year)] {
            assert!(noted(text, kind, Charset::Utf8mb4).is_err());
        }
    }
}
