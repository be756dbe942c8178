//! Appends values in the form of row images: the inverse of [`Kind::read`].

use crate::column::{Date, DateTime, Form, Kind, Layout, Time, Timestamp, Value};
use crate::error::{value_malformed, Error, Result};

/// Appends a value of a column.
///
/// Raises `ValueMalformed` for a value that the column cannot store, instead of truncating it. Types that only MariaDB
/// has, and formats of old releases, are never written.
pub fn pack(kind: &Kind, value: &Value<'_>, out: &mut Vec<u8>) -> Result<()> {
    match (kind, value) {
        (Kind::Integer { bytes, unsigned: false }, Value::Int(value)) => signed(*bytes, *value, kind, out),
        (Kind::Integer { bytes, unsigned: true }, Value::UInt(value)) => unsigned(*bytes, *value, kind, out),
        (Kind::Text { prefix, form, .. }, Value::Text(bytes)) => string(*prefix, *form, bytes, kind, out),
        (Kind::Binary { prefix, form }, Value::Bytes(bytes)) => string(*prefix, *form, bytes, kind, out),
        (Kind::Decimal { precision, scale }, Value::Decimal(value)) => value.repack(*precision, *scale, out),
        (Kind::DateTime { fsp, layout: Layout::Packed }, Value::DateTime(value)) => {
            check_fraction(kind, value.micros, *fsp)?;
            datetime(*value, *fsp, out);
            Ok(())
        }
        (Kind::Timestamp { fsp, layout: Layout::Packed }, Value::Timestamp(Timestamp { seconds, micros })) => {
            check_fraction(kind, *micros, *fsp)?;
            out.extend_from_slice(&seconds.to_be_bytes());
            fraction(*micros, *fsp, out);
            Ok(())
        }
        _ => rare(kind, value, out),
    }
}

#[inline(never)]
fn rare(kind: &Kind, value: &Value<'_>, out: &mut Vec<u8>) -> Result<()> {
    match (kind, value) {
        (Kind::Float, Value::Float(value)) => out.extend_from_slice(&value.to_le_bytes()),
        (Kind::Double, Value::Double(value)) => out.extend_from_slice(&value.to_le_bytes()),
        (Kind::Bit { bits }, Value::Bit(value)) => {
            if value.checked_shr((*bits).into()).is_some_and(|beyond| beyond != 0) {
                return Err(outside(kind, value));
            }
            let bytes = value.to_be_bytes();
            out.extend_from_slice(bytes.get(8 - usize::from(*bits).div_ceil(8)..).unwrap_or_default());
        }
        (Kind::Year, Value::Year(year)) => match year.checked_sub(1900).map(u8::try_from) {
            Some(Ok(byte @ 1..)) => out.push(byte),
            _ if *year == 0 => out.push(0),
            _ => return Err(outside(kind, year)),
        },
        (Kind::Date, Value::Date(value)) => {
            let packed = u32::from(value.year) << 9 | u32::from(value.month) << 5 | u32::from(value.day);
            out.extend_from_slice(packed.to_le_bytes().get(..3).unwrap_or_default());
        }
        (Kind::Time { fsp, layout: Layout::Packed }, Value::Time(value)) => {
            check_fraction(kind, value.micros, *fsp)?;
            time(*value, *fsp, out);
        }
        (Kind::Enumeration { bytes, values }, Value::Enumeration(index)) => {
            if usize::from(*index) > values.len() {
                return Err(outside(kind, index));
            }
            out.extend_from_slice(index.to_le_bytes().get(..usize::from(*bytes)).unwrap_or_default());
        }
        (Kind::Set { bytes, values }, Value::Set(members)) => {
            if u32::try_from(values.len())
                .ok()
                .and_then(|count| members.checked_shr(count))
                .is_some_and(|rest| rest > 0)
            {
                return Err(outside(kind, members));
            }
            out.extend_from_slice(members.to_le_bytes().get(..usize::from(*bytes)).unwrap_or_default());
        }
        (Kind::Json { prefix }, Value::Json(document)) => {
            return string(*prefix, Form::Large, document, kind, out);
        }
        _ => return Err(value_malformed(format!("a value of another type in a column of {}", kind.type_text()))),
    }
    Ok(())
}

#[cold]
fn outside(kind: &Kind, value: &dyn std::fmt::Display) -> Error {
    value_malformed(format!("{value} in a column of {}", kind.type_text()))
}

#[inline]
fn signed(bytes: u8, value: i64, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
    let beyond = value.checked_shr(u32::from(bytes) * 8 - 1).unwrap_or(0);
    if beyond != 0 && beyond != -1 {
        return Err(outside(kind, &value));
    }
    push_le(bytes, value.to_le_bytes(), out);
    Ok(())
}

#[inline]
fn unsigned(bytes: u8, value: u64, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
    if value.checked_shr(u32::from(bytes) * 8).unwrap_or(0) != 0 {
        return Err(outside(kind, &value));
    }
    push_le(bytes, value.to_le_bytes(), out);
    Ok(())
}

#[inline]
fn push_le(bytes: u8, value: [u8; 8], out: &mut Vec<u8>) {
    out.extend_from_slice(value.get(..usize::from(bytes)).unwrap_or(&value));
}

/// Appends the length of the value in `prefix` bytes, then its bytes.
#[inline]
fn string(prefix: u8, form: Form, bytes: &[u8], kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
    let bytes_max = match form {
        Form::Fixed(bytes) | Form::Varying(bytes) => u64::from(bytes),
        Form::Large => (1u64 << (8 * u32::from(prefix))) - 1,
    };
    let length = bytes.len() as u64;
    if length > bytes_max {
        let message = format!("a value of {length} bytes in a column of {}, which holds {bytes_max}", kind.type_text());
        return Err(value_malformed(message));
    }
    push_le(prefix, length.to_le_bytes(), out);
    out.extend_from_slice(bytes);
    Ok(())
}

/// `my_datetime_packed_to_binary`.
fn datetime(value: DateTime, fsp: u8, out: &mut Vec<u8>) {
    let Date { year, month, day } = value.date;
    let months = u64::from(year) * 13 + u64::from(month);
    let clock = u64::from(value.hour) << 12 | u64::from(value.minute) << 6 | u64::from(value.second);
    let bits = 1 << 39 | (months << 5 | u64::from(day)) << 17 | clock;
    let [_, _, _, packed @ ..] = bits.to_be_bytes();
    out.extend_from_slice(&packed);
    fraction(value.micros, fsp, out);
}

/// Fails for a fraction with more digits than the column has, because it would be truncated.
#[inline]
fn check_fraction(kind: &Kind, micros: u32, fsp: u8) -> Result<()> {
    if micros % 10u32.pow(6 - u32::from(fsp.min(6))) == 0 {
        return Ok(());
    }
    Err(value_malformed(format!("a second and {micros} microseconds in a column of {}", kind.type_text())))
}

/// The fraction: two digits per byte, big-endian.
#[inline]
fn fraction(micros: u32, fsp: u8, out: &mut Vec<u8>) {
    let (value, width) = stored_fraction(micros, fsp);
    out.extend_from_slice(value.to_be_bytes().get(4 - width..).unwrap_or_default());
}

/// Returns a fraction in units of its last stored digit, and its width in bytes.
fn stored_fraction(micros: u32, fsp: u8) -> (u32, usize) {
    match fsp {
        0 => (0, 0),
        1 | 2 => (micros / 10_000, 1),
        3 | 4 => (micros / 100, 2),
        _ => (micros, 3),
    }
}

/// `my_time_packed_to_binary`: the whole value, including its fraction, is offset by a zero point.
fn time(value: Time, fsp: u8, out: &mut Vec<u8>) {
    let (part, width) = stored_fraction(value.micros, fsp);
    let clock = u64::from(value.hours) << 12 | u64::from(value.minutes) << 6 | u64::from(value.seconds);
    let magnitude = clock << (8 * width) | u64::from(part);
    let zero = 0x80_0000u64 << (8 * width);
    let bits = if value.negative { zero.wrapping_sub(magnitude) } else { zero + magnitude };
    out.extend_from_slice(bits.to_be_bytes().get(5 - width..).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charset::Charset;
    use crate::cursor::Cursor;

    fn kind(type_text: &str) -> Kind {
        Kind::declared(type_text, Some(Charset::Utf8mb4), false).unwrap()
    }

    /// Returns the value that a reader decodes from the packed value.
    fn shown(type_text: &str, value: &Value<'_>) -> String {
        let kind = kind(type_text);
        let mut image = Vec::new();
        pack(&kind, value, &mut image).unwrap();
        let mut cursor = Cursor::new(&image);
        let mut text = Vec::new();
        kind.read(&mut cursor).unwrap().write_text(&kind, &mut text).unwrap();
        assert!(cursor.is_empty(), "{type_text}");
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn values_are_read_as_they_were_packed() {
        let date = Date { year: 2024, month: 2, day: 29 };
        let zero = Date { year: 0, month: 0, day: 0 };
        let moment = DateTime { date, hour: 23, minute: 59, second: 58, micros: 123_456 };
        let span = Time { negative: true, hours: 838, minutes: 59, seconds: 58, micros: 120_000 };
        for (type_text, value, expected) in [
            ("tinyint", Value::Int(-128), "-128"),
            ("smallint", Value::Int(32_767), "32767"),
            ("mediumint", Value::Int(-8_388_608), "-8388608"),
            ("int", Value::Int(-1), "-1"),
            ("bigint", Value::Int(i64::MIN), "-9223372036854775808"),
            ("mediumint unsigned", Value::UInt(16_777_215), "16777215"),
            ("bigint unsigned", Value::UInt(u64::MAX), "18446744073709551615"),
            ("float", Value::Float(1.5), "1.5"),
            ("double", Value::Double(-2.25), "-2.25"),
            ("bit(10)", Value::Bit(0x141), "\u{1}A"),
            ("year", Value::Year(2155), "2155"),
            ("year", Value::Year(0), "0000"),
            ("date", Value::Date(date), "2024-02-29"),
            ("datetime", Value::DateTime(DateTime { micros: 0, ..moment }), "2024-02-29 23:59:58"),
            ("datetime(3)", Value::DateTime(DateTime { micros: 123_000, ..moment }), "2024-02-29 23:59:58.123"),
            ("datetime(6)", Value::DateTime(moment), "2024-02-29 23:59:58.123456"),
            (
                "datetime(6)",
                Value::DateTime(DateTime { date: zero, hour: 0, minute: 0, second: 0, micros: 0 }),
                "0000-00-00 00:00:00.000000",
            ),
            ("timestamp(1)", Value::Timestamp(Timestamp { seconds: 1, micros: 900_000 }), "1970-01-01 00:00:01.9"),
            ("time", Value::Time(Time { micros: 0, ..span }), "-838:59:58"),
            ("time(2)", Value::Time(span), "-838:59:58.12"),
            ("time(4)", Value::Time(Time { negative: false, ..span }), "838:59:58.1200"),
            ("time(6)", Value::Time(span), "-838:59:58.120000"),
            ("varchar(255)", Value::Text("h\u{e9}llo".as_bytes()), "h\u{e9}llo"),
            ("char(2)", Value::Text(b"ab"), "ab"),
            ("mediumtext", Value::Text(b"text"), "text"),
            ("enum('x','y')", Value::Enumeration(2), "y"),
            ("enum('x','y')", Value::Enumeration(0), ""),
            ("set('p','q','r')", Value::Set(0b101), "p,r"),
            ("json", Value::Json(b"\x04\x01"), "true"),
        ] {
            assert_eq!(shown(type_text, &value), expected, "{type_text}");
        }
    }

    #[test]
    fn values_that_a_column_cannot_hold_are_refused() {
        let date = Date { year: 2024, month: 2, day: 29 };
        let moment = DateTime { date, hour: 23, minute: 59, second: 58, micros: 120_000 };
        let span = Time { negative: true, hours: 838, minutes: 59, seconds: 58, micros: 123_450 };
        for (type_text, value) in [
            ("datetime", Value::DateTime(moment)),
            ("datetime(1)", Value::DateTime(moment)),
            ("timestamp(5)", Value::Timestamp(Timestamp { seconds: 1, micros: 1 })),
            ("time(4)", Value::Time(span)),
            ("tinyint", Value::Int(128)),
            ("int", Value::Int(-2_147_483_649)),
            ("tinyint unsigned", Value::UInt(256)),
            ("bit(10)", Value::Bit(1024)),
            ("year", Value::Year(1900)),
            ("year", Value::Year(2156)),
            ("enum('x','y')", Value::Enumeration(3)),
            ("set('p','q')", Value::Set(4)),
            ("tinytext", Value::Text(&[b'a'; 256])),
            ("varchar(2)", Value::Text(b"123456789")),
            ("int", Value::Text(b"1")),
            ("uuid", Value::Uuid([0; 16])),
        ] {
            let kind = Kind::declared(type_text, Some(Charset::Utf8mb4), type_text == "uuid").unwrap();
            assert!(pack(&kind, &value, &mut Vec::new()).is_err(), "{type_text}");
        }
    }
}
