//! Values as Maxwell's daemon writes them in JSON: numbers as numbers of any length, times as the server's text,
//! documents as documents.

use crate::error::{value_malformed, Result};

use super::{base64, binary, compressed, date, datetime, decimal, enumeration, float, geometry, inet, integer, json};
use super::{quoted, set, text, time, timestamp, uuid, vector, Kind, Value};

impl Value<'_> {
    /// Adds the value as JSON.
    ///
    /// Raises `ValueMalformed` for values that the kind cannot hold: a member out of range, a broken document or
    /// geometry.
    pub fn write_maxwell(&self, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
        match (self, kind) {
            (Value::Null | Value::Enumeration(0), _) => out.extend_from_slice(b"null"),
            (Value::Int(value), _) => integer::write_signed(*value, out),
            (Value::UInt(value) | Value::Bit(value), _) => integer::write_unsigned(*value, out),
            (Value::Float(value), _) => float::write_json_single(*value, out),
            (Value::Double(value), _) => float::write_json(*value, out),
            (Value::Decimal(value), _) => decimal::write_text(value, out)?,
            (Value::Year(value), _) => integer::write_unsigned((*value).into(), out),
            (Value::Date(value), _) => quoted::plain(out, |out| date::write_text(*value, out)),
            (Value::DateTime(value), Kind::DateTime { fsp, .. }) => {
                quoted::plain(out, |out| datetime::write_text(*value, *fsp, out));
            }
            (Value::Timestamp(value), Kind::Timestamp { fsp, .. }) => {
                quoted::plain(out, |out| timestamp::write_text(*value, *fsp, out));
            }
            (Value::Time(value), Kind::Time { fsp, .. }) => {
                quoted::plain(out, |out| time::write_text(*value, *fsp, out));
            }
            (Value::Text(bytes), Kind::Text { charset, .. }) => text::write_json(bytes, *charset, out),
            (Value::Bytes(bytes), Kind::Binary { form, .. }) => binary::write_json(bytes, *form, out),
            (Value::Compressed(bytes), Kind::CompressedText { charset, .. }) => {
                compressed::write_json(bytes, *charset, out)?;
            }
            (Value::Compressed(bytes), _) => compressed::write_base64(bytes, out)?,
            (Value::Bytes(bytes), _) => base64::write_quoted(bytes, out),
            (Value::Enumeration(index), Kind::Enumeration { values, .. }) => {
                quoted::within(out, |out| enumeration::write_text(*index, values, out))?;
            }
            (Value::Set(bits), Kind::Set { values, .. }) => set::write_list(*bits, values, out)?,
            (Value::Json(document), _) => json::write_text(document, out)?,
            (Value::JsonText(text), _) => out.extend_from_slice(text.as_bytes()),
            (Value::Geometry(bytes), _) => quoted::within(out, |out| geometry::write_wkt(bytes, out))?,
            (Value::Vector(bytes), _) => vector::write_list(bytes, out),
            (Value::Uuid(bytes), _) => quoted::plain(out, |out| uuid::write_text(bytes, out)),
            (Value::Inet4(bytes), _) => quoted::plain(out, |out| inet::write_text4(bytes, out)),
            (Value::Inet6(bytes), _) => quoted::plain(out, |out| inet::write_text6(bytes, out)),
            (value, kind) => {
                let declared = kind.type_text();
                return Err(value_malformed(format!("{} in a column of type {declared}", value.name())));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::column::{Date, DateTime, Form, Layout, Time, Timestamp};
    use crate::cursor::Cursor;

    fn shown(value: &Value<'_>, kind: &Kind) -> String {
        let mut out = Vec::new();
        value.write_maxwell(kind, &mut out).unwrap();
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
    fn times_are_the_servers_text_whatever_they_are() {
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
        assert!(Value::Set(4).write_maxwell(&set, &mut Vec::new()).is_err());
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
