//! Writes values as JSON in the same way as Debezium's MySQL connector, in the formats of its handling modes.

use super::column_traits::ColumnTraits;
use super::handling::{BinaryMode, DecimalMode, TimeMode, UnsignedMode};
use crate::column::typed::Typed;
use crate::column::{
    base64, binary, bit, compressed, date, datetime, decimal, enumeration, float, geometry, inet, integer, json,
    quoted, set, text, timestamp, uuid, vector, Kind, Time, Value,
};
use crate::error::{Error, ErrorKind, Result};

/// Writes a value as JSON.
///
/// Raises `ValueMalformed` for values that are invalid for the kind, such as an ENUM member out of range, or a
/// malformed JSON document or geometry, and `EventUnsupported` for a TIME that its mode cannot represent.
#[inline(always)]
pub(crate) fn write(value: &Value<'_>, kind: &Kind, traits: ColumnTraits, out: &mut Vec<u8>) -> Result<()> {
    match value.typed(kind)? {
        Typed::Null => out.extend_from_slice(b"null"),
        Typed::Int(value) => integer::write_signed(value, out),
        Typed::UInt(value) if is_precise(kind, traits) => decimal::write_unsigned_debezium(value, out),
        // The value is written as a long, so values above its range become negative.
        Typed::UInt(value) => integer::write_signed(i64::from_ne_bytes(value.to_ne_bytes()), out),
        Typed::Float(value) if traits.has_digits => float::write_json(value.into(), out),
        Typed::Float(value) => float::write_json_single(value, out),
        Typed::Double(value) => float::write_json(value, out),
        Typed::Decimal(value) => match traits.handling.decimal {
            DecimalMode::Precise => decimal::write_debezium(value, out)?,
            DecimalMode::Double => float::write_json(decimal::to_double(value)?, out),
            DecimalMode::String => quoted::within(out, |out| decimal::write_text(value, out))?,
        },
        Typed::Bit { value, bits } => bit::write_debezium(value, bits, out),
        Typed::Year(value) => integer::write_unsigned(value.into(), out),
        Typed::Date(value) => write_number(date::debezium(value), traits, out),
        Typed::DateTime { value, fsp } => {
            write_number(datetime::debezium(value, datetime_digits(fsp, traits)), traits, out);
        }
        Typed::Timestamp { value, .. } if traits.nullable && timestamp::is_zero(value) => {
            out.extend_from_slice(b"null");
        }
        Typed::Timestamp { value, fsp } => quoted::plain(out, |out| timestamp::write_debezium(value, fsp, out)),
        Typed::Time { value, fsp } => integer::write_signed(time_of(value, fsp, traits)?, out),
        Typed::Text { bytes, charset } => text::write_json(bytes, charset, out),
        Typed::Bytes { bytes, form } => match traits.handling.binary {
            BinaryMode::Bytes | BinaryMode::Base64 => binary::write_json(bytes, form, out),
            mode => quoted::plain(out, |out| write_binary(mode, &binary::padded(bytes, form), out)),
        },
        Typed::CompressedText { bytes, charset } => compressed::write_json(bytes, charset, out)?,
        Typed::CompressedBytes(bytes) => match traits.handling.binary {
            BinaryMode::Bytes | BinaryMode::Base64 => compressed::write_base64(bytes, out)?,
            mode => {
                let plain = compressed::plain(bytes)?;
                quoted::plain(out, |out| write_binary(mode, &plain, out));
            }
        },
        Typed::Enumeration { index, members } => {
            quoted::within(out, |out| enumeration::write_text(index, members, out))?;
        }
        Typed::Set { bits, members } => quoted::within(out, |out| set::write_text(bits, members, out))?,
        Typed::Json(document) => quoted::within(out, |out| json::write_text(document, out))?,
        Typed::JsonText(text) => quoted::write(text.as_bytes(), out),
        Typed::Geometry(bytes) => geometry::write_debezium(bytes, traits.is_point, out)?,
        Typed::Vector(bytes) => vector::write_list(bytes, out),
        Typed::Uuid(bytes) => quoted::plain(out, |out| uuid::write_text(bytes, out)),
        Typed::Inet4(bytes) => quoted::plain(out, |out| inet::write_text4(bytes, out)),
        Typed::Inet6(bytes) => quoted::plain(out, |out| inet::write_text6(bytes, out)),
    }
    Ok(())
}

/// Writes a number. None becomes null, or 0 in a column that is not nullable.
fn write_number(value: Option<i64>, traits: ColumnTraits, out: &mut Vec<u8>) {
    match value {
        None if traits.nullable => out.extend_from_slice(b"null"),
        value => integer::write_signed(value.unwrap_or(0), out),
    }
}

/// Returns the number of fractional digits that determines the unit of a DATETIME.
pub(super) fn datetime_digits(fsp: u8, traits: ColumnTraits) -> u8 {
    match traits.handling.time {
        TimeMode::Connect => 3,
        TimeMode::Microseconds => 6,
        TimeMode::Adaptive | TimeMode::AdaptiveTimeMicroseconds => fsp,
    }
}

/// Returns a TIME in the unit of its mode. Raises `EventUnsupported` if the mode cannot represent it.
pub(super) fn time_of(value: Time, fsp: u8, traits: ColumnTraits) -> Result<i64> {
    Ok(match traits.handling.time {
        TimeMode::Connect => of_one_day(value)?.div_euclid(1_000),
        TimeMode::Adaptive if fsp <= 3 => of_one_day(value)?.div_euclid(1_000),
        TimeMode::Adaptive => of_one_day(value)?,
        TimeMode::AdaptiveTimeMicroseconds | TimeMode::Microseconds => value.micros(),
    })
}

/// Whether a column is a BIGINT UNSIGNED that is written as a decimal.
pub(super) fn is_precise(kind: &Kind, traits: ColumnTraits) -> bool {
    traits.handling.bigint_unsigned == UnsignedMode::Precise
        && matches!(kind, Kind::Integer { bytes: 8, unsigned: true })
}

/// Writes bytes as text, in the given handling mode.
pub(super) fn write_binary(mode: BinaryMode, bytes: &[u8], out: &mut Vec<u8>) {
    match mode {
        BinaryMode::Hex => {
            for byte in bytes {
                out.extend([byte >> 4, byte & 15].map(|half| if half < 10 { b'0' + half } else { b'a' + half - 10 }));
            }
        }
        BinaryMode::Base64UrlSafe => {
            let start = out.len();
            base64::write(bytes, out);
            for letter in out.iter_mut().skip(start) {
                match letter {
                    b'+' => *letter = b'-',
                    b'/' => *letter = b'_',
                    _ => {}
                }
            }
        }
        BinaryMode::Bytes | BinaryMode::Base64 => base64::write(bytes, out),
    }
}

/// Returns the microseconds of a TIME. The value must be a time of day, because the millisecond types represent only
/// times of day.
fn of_one_day(time: Time) -> Result<i64> {
    let micros = time.micros();
    if (0..86_400_000_000).contains(&micros) {
        return Ok(micros);
    }
    let message =
        format!("a TIME of {} s is no time of day, and time.precision.mode allows no other", micros / 1_000_000);
    Err(Error::new(ErrorKind::EventUnsupported, message).hint("take adaptive_time_microseconds for the messages"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::charset::Charset;
    use crate::column::{Date, DateTime, Form, Layout, Timestamp};
    use crate::cursor::Cursor;
    use crate::emit::dialect::debezium::handling::Handling;

    const DEFAULT: Handling = Handling {
        decimal: DecimalMode::Precise,
        time: TimeMode::AdaptiveTimeMicroseconds,
        bigint_unsigned: UnsignedMode::Long,
        binary: BinaryMode::Bytes,
    };
    const REQUIRED: ColumnTraits =
        ColumnTraits { nullable: false, is_point: false, has_digits: false, handling: DEFAULT };
    const OPTIONAL: ColumnTraits = ColumnTraits { nullable: true, ..REQUIRED };

    fn shown(value: &Value<'_>, kind: &Kind, traits: ColumnTraits) -> String {
        let mut out = Vec::new();
        write(value, kind, traits, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn required(value: Value<'_>, kind: Kind) -> String {
        shown(&value, &kind, REQUIRED)
    }

    #[test]
    fn numbers_are_longs_and_booleans_are_bits() {
        let bigint = |unsigned| Kind::Integer { bytes: 8, unsigned };
        assert_eq!(required(Value::Int(i64::MIN), bigint(false)), "-9223372036854775808");
        assert_eq!(required(Value::UInt(u64::MAX), bigint(true)), "-1");
        assert_eq!(required(Value::Bit(1), Kind::Bit { bits: 1 }), "true");
        assert_eq!(required(Value::Bit(0), Kind::Bit { bits: 1 }), "false");
        // 0x201 as two bytes, the lowest first: 01 02.
        assert_eq!(required(Value::Bit(0x201), Kind::Bit { bits: 10 }), r#""AQI=""#);
        assert_eq!(required(Value::Year(0), Kind::Year), "0");
        assert_eq!(required(Value::Float(0.1), Kind::Float), "0.1");
        let with_digits = ColumnTraits { has_digits: true, ..REQUIRED };
        assert_eq!(shown(&Value::Float(999.0001), &Kind::Float, with_digits), "999.0001220703125");
        assert_eq!(required(Value::Double(-2.0), Kind::Double), "-2.0");
        assert_eq!(shown(&Value::Null, &Kind::Year, OPTIONAL), "null");
    }

    #[test]
    fn decimals_are_their_unscaled_bytes() {
        // The server's encoding of 1234567890.1234, and of its negative: all bits inverted.
        let stored = [0x81, 0x0d, 0xfb, 0x38, 0xd2, 0x04, 0xd2];
        let negative = stored.map(|byte: u8| !byte);
        let kind = Kind::Decimal { precision: 14, scale: 4 };
        let decimal = |bytes: &[u8]| shown(&kind.read(&mut Cursor::new(bytes)).unwrap(), &kind, REQUIRED);
        // 12345678901234 is 0x0b3a73ce2ff2, and its negative 0xf4c58c31d00e.
        assert_eq!(decimal(&stored), r#""Czpzzi/y""#);
        assert_eq!(decimal(&negative), r#""9MWMMdAO""#);
    }

    #[test]
    fn modes_change_the_form_of_their_types_alone() {
        let handled = |value: Value<'_>, kind: &Kind, handling: Handling| {
            shown(&value, kind, ColumnTraits { handling, ..REQUIRED })
        };
        let stored = [0x81, 0x0d, 0xfb, 0x38, 0xd2, 0x04, 0xd2].map(|byte: u8| !byte);
        let kind = Kind::Decimal { precision: 14, scale: 4 };
        let decimal = |mode| {
            let value = kind.read(&mut Cursor::new(&stored)).unwrap();
            handled(value, &kind, Handling { decimal: mode, ..DEFAULT })
        };
        assert_eq!(decimal(DecimalMode::Double), "-1234567890.1234");
        assert_eq!(decimal(DecimalMode::String), r#""-1234567890.1234""#);
        let unsigned = Kind::Integer { bytes: 8, unsigned: true };
        let precise = Handling { bigint_unsigned: UnsignedMode::Precise, ..DEFAULT };
        // 2^64 - 1 needs a leading zero byte; 0 is a single byte.
        assert_eq!(handled(Value::UInt(u64::MAX), &unsigned, precise), r#""AP//////////""#);
        assert_eq!(handled(Value::UInt(0), &unsigned, precise), r#""AA==""#);
        assert_eq!(handled(Value::UInt(127), &unsigned, precise), r#""fw==""#);
        assert_eq!(handled(Value::UInt(7), &Kind::Integer { bytes: 4, unsigned: true }, precise), "7");
        let fixed = Kind::Binary { prefix: 1, form: Form::Fixed(3) };
        let binary = |mode| handled(Value::Bytes(b"\xfb\xff"), &fixed, Handling { binary: mode, ..DEFAULT });
        assert_eq!(binary(BinaryMode::Base64), r#""+/8A""#);
        assert_eq!(binary(BinaryMode::Base64UrlSafe), r#""-_8A""#);
        assert_eq!(binary(BinaryMode::Hex), r#""fbff00""#);
    }

    #[test]
    fn times_in_milliseconds_are_times_of_day() {
        let span = |negative, hours| Time { negative, hours, minutes: 2, seconds: 3, micros: 456_789 };
        let time = |fsp, mode, value: Time| {
            let traits = ColumnTraits { handling: Handling { time: mode, ..DEFAULT }, ..REQUIRED };
            let mut out = Vec::new();
            write(&Value::Time(value), &Kind::Time { fsp, layout: Layout::Packed }, traits, &mut out)?;
            Ok::<_, Error>(String::from_utf8(out).unwrap())
        };
        assert_eq!(time(0, TimeMode::Adaptive, span(false, 1)).unwrap(), "3723456");
        assert_eq!(time(6, TimeMode::Adaptive, span(false, 1)).unwrap(), "3723456789");
        assert_eq!(time(6, TimeMode::Connect, span(false, 23)).unwrap(), "82923456");
        assert_eq!(time(0, TimeMode::Microseconds, span(true, 24)).unwrap(), "-86523456789");
        for (mode, value) in [(TimeMode::Connect, span(false, 24)), (TimeMode::Adaptive, span(true, 0))] {
            assert_eq!(time(0, mode, value).unwrap_err().kind(), ErrorKind::EventUnsupported);
        }
    }

    #[test]
    fn decimals_of_every_width_are_equal() {
        // Both decimals end with two groups of nine digits. In DECIMAL(65), 47 zeros precede them, stored in one byte
        // and five groups.
        let (narrow, wide) = (Kind::Decimal { precision: 18, scale: 0 }, Kind::Decimal { precision: 65, scale: 0 });
        let decimal = |kind: &Kind, zeros: usize, groups: [u32; 2], negative: bool| {
            let mut bytes = [vec![0; zeros], groups.map(u32::to_be_bytes).concat()].concat();
            bytes[0] ^= 0x80;
            if negative {
                bytes.iter_mut().for_each(|byte| *byte = !*byte);
            }
            shown(&kind.read(&mut Cursor::new(&bytes)).unwrap(), kind, REQUIRED)
        };
        for low in [0, 127, 128, 255, 256, 32_767, 32_768, 987_654_321] {
            for groups in [[0, low], [123_456_789, low]] {
                for negative in [false, true] {
                    let expected = decimal(&narrow, 0, groups, negative);
                    assert_eq!(decimal(&wide, 21, groups, negative), expected);
                }
            }
        }
        let nines = [&[0x80 | 99][..], &999_999_999u32.to_be_bytes().repeat(7)].concat();
        // 10**65 - 1 takes 28 bytes, which base64 writes as 40 characters between two quotes.
        assert_eq!(shown(&wide.read(&mut Cursor::new(&nines)).unwrap(), &wide, REQUIRED).len(), 42);
    }

    #[test]
    fn the_unit_of_times_depends_on_their_fraction() {
        let date = Date { year: 2024, month: 2, day: 29 };
        let moment = DateTime { date, hour: 1, minute: 2, second: 3, micros: 456_000 };
        let datetime = |fsp| Kind::DateTime { fsp, layout: Layout::Packed };
        assert_eq!(required(Value::Date(date), Kind::Date), "19782");
        assert_eq!(required(Value::DateTime(moment), datetime(3)), "1709168523456");
        assert_eq!(required(Value::DateTime(moment), datetime(4)), "1709168523456000");
        let before = DateTime { date: Date { year: 1969, month: 12, day: 31 }, hour: 23, ..moment };
        assert_eq!(required(Value::DateTime(before), datetime(3)), "-3476544");
        let timestamp = |fsp| Kind::Timestamp { fsp, layout: Layout::Packed };
        let value = Value::Timestamp(Timestamp { seconds: 1_000_000_000, micros: 120_000 });
        assert_eq!(required(value.clone(), timestamp(0)), r#""2001-09-09T01:46:40Z""#);
        assert_eq!(required(value, timestamp(3)), r#""2001-09-09T01:46:40.120Z""#);
        let span = Time { negative: true, hours: 838, minutes: 59, seconds: 59, micros: 0 };
        let time = Kind::Time { fsp: 0, layout: Layout::Packed };
        assert_eq!(required(Value::Time(span), time), "-3020399000000");
    }

    #[test]
    fn dates_missing_from_the_calendar_are_null_or_the_first_day() {
        let zero = Date { year: 0, month: 0, day: 0 };
        let moment = DateTime { date: zero, hour: 0, minute: 0, second: 0, micros: 0 };
        let cases = [
            (Value::Date(zero), Kind::Date, "0"),
            (Value::DateTime(moment), Kind::DateTime { fsp: 0, layout: Layout::Packed }, "0"),
            (
                Value::Timestamp(Timestamp { seconds: 0, micros: 0 }),
                Kind::Timestamp { fsp: 3, layout: Layout::Packed },
                r#""1970-01-01T00:00:00Z""#,
            ),
        ];
        for (value, kind, first) in cases {
            assert_eq!(shown(&value, &kind, OPTIONAL), "null");
            assert_eq!(shown(&value, &kind, REQUIRED), first);
        }
    }

    #[test]
    fn texts_are_strings_and_bytes_are_base64() {
        let text = Kind::Text { prefix: 1, form: Form::Varying(40), charset: Charset::Utf8mb4 };
        assert_eq!(required(Value::Text(b"say \"yes\"\n"), text), r#""say \"yes\"\n""#);
        let fixed = Kind::Binary { prefix: 1, form: Form::Fixed(3) };
        assert_eq!(required(Value::Bytes(b"a"), fixed), r#""YQAA""#);
        let values: Arc<[Arc<str>]> = [Arc::from("it's"), Arc::from("a\"b")].into();
        let set = Kind::Set { bytes: 1, values: values.clone() };
        assert_eq!(required(Value::Set(3), set), r#""it's,a\"b""#);
        let member = Kind::Enumeration { bytes: 1, values };
        assert_eq!(required(Value::Enumeration(2), member.clone()), r#""a\"b""#);
        assert_eq!(required(Value::Enumeration(0), member.clone()), r#""""#);
        assert!(write(&Value::Enumeration(3), &member, REQUIRED, &mut Vec::new()).is_err());
        assert!(write(&Value::Year(1), &member, REQUIRED, &mut Vec::new()).is_err());
        assert!(write(&Value::Bit(1), &member, REQUIRED, &mut Vec::new()).is_err());
        let json = Kind::Json { prefix: 4 };
        assert_eq!(required(Value::JsonText(r#"{"a": "b"}"#.to_owned()), json), r#""{\"a\": \"b\"}""#);
        let vector = Kind::Vector { prefix: 4, dimensions: None };
        assert_eq!(required(Value::Vector(b"\0\0\x80\x3f\0\0\x20\xc0"), vector), "[1.0,-2.5]");
        assert_eq!(required(Value::Inet4([10, 0, 0, 1]), Kind::Inet4), r#""10.0.0.1""#);
    }
}
