//! Values as Canal's entries show them.

use crate::error::Result;

use super::{binary, float, integer, json, text, timestamp, Kind, Value};
use json::JsonStyle;

impl Value<'_> {
    /// Adds the value as Canal's entries show it. `zone_seconds` are added to UTC for a TIMESTAMP.
    ///
    /// Raises `ValueMalformed` where the kind cannot hold the value.
    #[inline]
    pub fn write_canal(&self, kind: &Kind, zone_seconds: i32, out: &mut Vec<u8>) -> Result<()> {
        match (self, kind) {
            (Value::Null, _) => {}
            (Value::Int(value), _) => integer::write_signed(*value, out),
            (Value::UInt(value) | Value::Bit(value) | Value::Set(value), _) => integer::write_unsigned(*value, out),
            (Value::Enumeration(index), _) => integer::write_unsigned((*index).into(), out),
            (Value::Float(value), _) => float::write_java_single(*value, out),
            (Value::Double(value), _) => float::write_java_double(*value, out),
            (Value::Timestamp(value), Kind::Timestamp { fsp, .. }) => {
                timestamp::write_text_in(*value, *fsp, zone_seconds, out);
            }
            (Value::Text(bytes), Kind::Text { charset, .. }) => text::write_canal(bytes, *charset, out),
            (Value::Bytes(bytes), Kind::Binary { form, .. }) => binary::write_latin1(bytes, *form, out),
            (Value::Geometry(bytes) | Value::Vector(bytes), _) => binary::write_latin1_plain(bytes, out),
            (Value::Compressed(_), Kind::CompressedBinary { .. }) => {
                let mut plain = Vec::new();
                self.write_text(kind, &mut plain)?;
                binary::write_latin1_plain(&plain, out);
            }
            (Value::Json(document), _) => json::write_text_in(document, JsonStyle::Canal, out)?,
            _ => self.write_text(kind, out)?,
        }
        Ok(())
    }
}
