//! Writes values as the server's own client shows them.

use super::typed::Typed;
use super::{
    binary, bit, compressed, date, datetime, decimal, enumeration, float, inet, integer, json, set, text, time,
    timestamp, uuid, year, Kind, Value,
};
use crate::error::Result;

impl Value<'_> {
    /// Writes the value as the server's own client shows it with `--batch --raw`: text as UTF-8, binary types as
    /// their bytes, TIMESTAMP in UTC. Text that is invalid in its charset is written as a hexadecimal literal.
    ///
    /// Raises `ValueMalformed` for values that are invalid for the kind, such as an ENUM member out of range or a
    /// malformed JSON document.
    pub fn write_text(&self, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
        self.typed(kind)?.write_text(out)
    }
}

impl Typed<'_> {
    /// Writes the same as `Value::write_text`.
    pub(crate) fn write_text(self, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Typed::Null => out.extend_from_slice(b"NULL"),
            Typed::Int(value) => integer::write_signed(value, out),
            Typed::UInt(value) => integer::write_unsigned(value, out),
            Typed::Float(value) => float::write_single(value, out),
            Typed::Double(value) => float::write_double(value, out),
            Typed::Decimal(value) => decimal::write_text(value, out)?,
            Typed::Bit { value, bits } => bit::write_text(value, bits, out),
            Typed::Year(value) => year::write_text(value, out),
            Typed::Date(value) => date::write_text(value, out),
            Typed::DateTime { value, fsp } => datetime::write_text(value, fsp, out),
            Typed::Timestamp { value, fsp } => timestamp::write_text(value, fsp, out),
            Typed::Time { value, fsp } => time::write_text(value, fsp, out),
            Typed::Text { bytes, charset } => text::write_text(bytes, charset, out),
            Typed::Bytes { bytes, form } => binary::write_padded(bytes, form, out),
            Typed::CompressedText { bytes, charset } => compressed::write_text(bytes, charset, out)?,
            Typed::CompressedBytes(bytes) => compressed::write_bytes(bytes, out)?,
            Typed::Enumeration { index, members } => enumeration::write_text(index, members, out)?,
            Typed::Set { bits, members } => set::write_text(bits, members, out)?,
            Typed::Json(document) => json::write_text(document, out)?,
            Typed::JsonText(text) => out.extend_from_slice(text.as_bytes()),
            Typed::Geometry(bytes) | Typed::Vector(bytes) => out.extend_from_slice(bytes),
            Typed::Uuid(bytes) => uuid::write_text(bytes, out),
            Typed::Inet4(bytes) => inet::write_text4(bytes, out),
            Typed::Inet6(bytes) => inet::write_text6(bytes, out),
        }
        Ok(())
    }
}
