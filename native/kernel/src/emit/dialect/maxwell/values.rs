//! Writes values in JSON like Maxwell's daemon: numbers of any length as numbers, times as the server's text,
//! documents as documents.

use crate::column::typed::Typed;
use crate::column::{
    binary, compressed, date, datetime, decimal, enumeration, float, geometry, inet, integer, json, quoted, set, text,
    time, timestamp, uuid, vector, Kind, Value,
};
use crate::error::Result;

/// Writes a value as JSON.
///
/// Raises `ValueMalformed` for values that are invalid for the kind, such as a member out of range or a malformed
/// document or geometry.
pub(crate) fn write(value: &Value<'_>, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
    match value.typed(kind)? {
        Typed::Null | Typed::Enumeration { index: 0, .. } => out.extend_from_slice(b"null"),
        Typed::Int(value) => integer::write_signed(value, out),
        Typed::UInt(value) | Typed::Bit { value, .. } => integer::write_unsigned(value, out),
        Typed::Float(value) => float::write_json_single(value, out),
        Typed::Double(value) => float::write_json(value, out),
        Typed::Decimal(value) => decimal::write_text(value, out)?,
        Typed::Year(value) => integer::write_unsigned(value.into(), out),
        Typed::Date(value) => quoted::plain(out, |out| date::write_text(value, out)),
        Typed::DateTime { value, fsp } => quoted::plain(out, |out| datetime::write_text(value, fsp, out)),
        Typed::Timestamp { value, fsp } => quoted::plain(out, |out| timestamp::write_text(value, fsp, out)),
        Typed::Time { value, fsp } => quoted::plain(out, |out| time::write_text(value, fsp, out)),
        Typed::Text { bytes, charset } => text::write_json(bytes, charset, out),
        Typed::Bytes { bytes, form } => binary::write_json(bytes, form, out),
        Typed::CompressedText { bytes, charset } => compressed::write_json(bytes, charset, out)?,
        Typed::CompressedBytes(bytes) => compressed::write_base64(bytes, out)?,
        Typed::Enumeration { index, members } => {
            quoted::within(out, |out| enumeration::write_text(index, members, out))?;
        }
        Typed::Set { bits, members } => set::write_list(bits, members, out)?,
        Typed::Json(document) => json::write_text(document, out)?,
        Typed::JsonText(text) => out.extend_from_slice(text.as_bytes()),
        Typed::Geometry(bytes) => quoted::within(out, |out| geometry::write_wkt(bytes, out))?,
        Typed::Vector(bytes) => vector::write_list(bytes, out),
        Typed::Uuid(bytes) => quoted::plain(out, |out| uuid::write_text(bytes, out)),
        Typed::Inet4(bytes) => quoted::plain(out, |out| inet::write_text4(bytes, out)),
        Typed::Inet6(bytes) => quoted::plain(out, |out| inet::write_text6(bytes, out)),
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
