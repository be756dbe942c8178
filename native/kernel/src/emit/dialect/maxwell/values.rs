//! Writes values in JSON like Maxwell's daemon: as the server's client shows them, except that a SET is a list, and an
//! invalid ENUM is null.

use crate::column::typed::Typed;
use crate::column::{set, Kind, Value};
use crate::error::Result;

/// Writes a value as JSON.
///
/// Raises `ValueMalformed` for values that are invalid for the kind, such as an ENUM member out of range, or a
/// malformed JSON document or geometry.
pub(crate) fn write(value: &Value<'_>, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
    match value.typed(kind)? {
        Typed::Enumeration { index: 0, .. } => out.extend_from_slice(b"null"),
        Typed::Set { bits, members } => set::write_list(bits, members, out)?,
        shown @ (Typed::Null
        | Typed::Int(_)
        | Typed::UInt(_)
        | Typed::Float(_)
        | Typed::Double(_)
        | Typed::Decimal(_)
        | Typed::Bit { .. }
        | Typed::Year(_)
        | Typed::Date(_)
        | Typed::DateTime { .. }
        | Typed::Timestamp { .. }
        | Typed::Time { .. }
        | Typed::Text { .. }
        | Typed::Bytes { .. }
        | Typed::CompressedText { .. }
        | Typed::CompressedBytes(_)
        | Typed::Enumeration { .. }
        | Typed::Json(_)
        | Typed::JsonText(_)
        | Typed::Geometry(_)
        | Typed::Vector(_)
        | Typed::Uuid(_)
        | Typed::Inet4(_)
        | Typed::Inet6(_)) => shown.write_shown(out)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::column::{Date, DateTime, Form, Layout, Time, Timestamp};
    use crate::cursor::Cursor;

    fn shown(value: &Value<'_>, kind: &Kind) -> String {
        let mut out = Vec::new();
        write(value, kind, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn numbers_are_numbers_of_any_length() {
        assert_eq!(shown(&Value::UInt(u64::MAX), &Kind::Integer { bytes: 8, unsigned: true }), "18446744073709551615");
        assert_eq!(shown(&Value::Bit(1), &Kind::Bit { bits: 1 }), "1");
        assert_eq!(shown(&Value::Bit(1 << 63), &Kind::Bit { bits: 64 }), "9223372036854775808");
        assert_eq!(shown(&Value::Year(1999), &Kind::Year), "1999");
        let decimal = Kind::Decimal { precision: 5, scale: 2 };
        let value = decimal.read(&mut Cursor::new(&[0x7f, 0xfe, 0xcd])).unwrap();
        assert_eq!(shown(&value, &decimal), "-1.50");
        assert_eq!(shown(&Value::Double(1.5), &Kind::Double), "1.5");
    }

    #[test]
    fn times_are_always_the_servers_text() {
        let zero = Date { year: 0, month: 0, day: 0 };
        let moment = DateTime { date: zero, hour: 0, minute: 0, second: 0, micros: 0 };
        assert_eq!(shown(&Value::Date(zero), &Kind::Date), r#""0000-00-00""#);
        let datetime = Kind::DateTime { fsp: 3, layout: Layout::Packed };
        assert_eq!(shown(&Value::DateTime(moment), &datetime), r#""0000-00-00 00:00:00.000""#);
        let timestamp = Kind::Timestamp { fsp: 0, layout: Layout::Packed };
        let value = Value::Timestamp(Timestamp { seconds: 1_000_000_000, micros: 0 });
        assert_eq!(shown(&value, &timestamp), r#""2001-09-09 01:46:40""#);
        let time = Kind::Time { fsp: 1, layout: Layout::Packed };
        let span = Time { negative: true, hours: 838, minutes: 59, seconds: 59, micros: 500_000 };
        assert_eq!(shown(&Value::Time(span), &time), r#""-838:59:59.5""#);
    }

    #[test]
    fn sets_are_lists_and_documents_are_documents() {
        let values: Arc<[Arc<str>]> = [Arc::from("a"), Arc::from("b\"")].into();
        let set = Kind::Set { bytes: 1, values: values.clone() };
        assert_eq!(shown(&Value::Set(3), &set), r#"["a","b\""]"#);
        assert_eq!(shown(&Value::Set(0), &set), "[]");
        assert!(write(&Value::Set(4), &set, &mut Vec::new()).is_err());
        let member = Kind::Enumeration { bytes: 1, values };
        assert_eq!(shown(&Value::Enumeration(0), &member), "null");
        assert_eq!(shown(&Value::Enumeration(2), &member), r#""b\"""#);
        assert_eq!(shown(&Value::JsonText("[1, 2]".to_owned()), &Kind::Json { prefix: 4 }), "[1, 2]");
        let blob = Kind::Binary { prefix: 1, form: Form::Large };
        assert_eq!(shown(&Value::Bytes(b"\xff"), &blob), r#""/w==""#);
        let point = b"\0\0\0\0\x01\x01\0\0\0\0\0\0\0\0\0\xf8\x3f\0\0\0\0\0\0\0\xc0";
        assert_eq!(shown(&Value::Geometry(point), &Kind::Geometry { prefix: 4 }), r#""POINT (1.5 -2)""#);
    }
}
