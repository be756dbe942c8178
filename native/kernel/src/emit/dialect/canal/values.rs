//! Writes values in the format of Canal's entries.

use crate::column::json::{self, JsonStyle};
use crate::column::typed::Typed;
use crate::column::{binary, compressed, float, integer, text, timestamp, Kind, Value};
use crate::error::Result;

/// Writes a value.
///
/// For a TIMESTAMP, adds `zone_seconds` to UTC. Raises `ValueMalformed` if the value is invalid for the kind.
#[inline]
pub(super) fn write(value: &Value<'_>, kind: &Kind, zone_seconds: i32, out: &mut Vec<u8>) -> Result<()> {
    match value.typed(kind)? {
        Typed::Null => {}
        Typed::Int(value) => integer::write_signed(value, out),
        Typed::UInt(value) | Typed::Bit { value, .. } | Typed::Set { bits: value, .. } => {
            integer::write_unsigned(value, out);
        }
        Typed::Enumeration { index, .. } => integer::write_unsigned(index.into(), out),
        Typed::Float(value) => float::write_java_single(value, out),
        Typed::Double(value) => float::write_java_double(value, out),
        Typed::Timestamp { value, fsp } => timestamp::write_text_in(value, fsp, zone_seconds, out),
        Typed::Text { bytes, charset } => text::write_lossy(bytes, charset, out),
        Typed::Bytes { bytes, form } => binary::write_latin1(bytes, form, out),
        Typed::Geometry(bytes) | Typed::Vector(bytes) => binary::write_latin1_plain(bytes, out),
        Typed::CompressedBytes(bytes) => {
            let mut plain = Vec::new();
            compressed::write_bytes(bytes, &mut plain)?;
            binary::write_latin1_plain(&plain, out);
        }
        Typed::Json(document) => json::write_text_in(document, JsonStyle::Canal, out)?,
        plain @ (Typed::Decimal(_)
        | Typed::Year(_)
        | Typed::Date(_)
        | Typed::DateTime { .. }
        | Typed::Time { .. }
        | Typed::CompressedText { .. }
        | Typed::JsonText(_)
        | Typed::Uuid(_)
        | Typed::Inet4(_)
        | Typed::Inet6(_)) => plain.write_text(out)?,
    }
    Ok(())
}
