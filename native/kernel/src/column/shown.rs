//! Writes values as JSON that corresponds to what the server's own client shows: numbers of any length as numbers,
//! DECIMAL with all its digits, SET as a text. Values that the client shows as bytes are base64, geometries are
//! well-known text, and JSON documents are nested JSON.

use super::typed::Typed;
use super::{
    binary, compressed, date, datetime, decimal, enumeration, float, geometry, hex, inet, integer, json, quoted, set,
    text, time, timestamp, uuid, vector, Kind, Value,
};
use crate::error::Result;

impl Value<'_> {
    /// Writes the value as JSON.
    ///
    /// Raises `ValueMalformed` for values that are invalid for the kind, such as an ENUM member out of range, or a
    /// malformed JSON document or geometry.
    pub fn write_shown(&self, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
        self.typed(kind)?.write_shown(out)
    }

    /// Writes the value as plain text, for names and keys.
    ///
    /// The text is that of the server's client, except that numbers have all their digits, BIT is a number, a vector is
    /// a JSON array, and bytes are hexadecimal digits. Raises what `write_shown` does.
    pub fn write_name(&self, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
        match self.typed(kind)? {
            Typed::Float(value) => float::write_json_single(value, out),
            Typed::Double(value) => float::write_json(value, out),
            Typed::Bit { value, .. } => integer::write_unsigned(value, out),
            Typed::Vector(bytes) => vector::write_list(bytes, out),
            Typed::Geometry(bytes) => hex::write_lower(bytes, out),
            Typed::Bytes { bytes, form } => {
                let mut padded = Vec::with_capacity(bytes.len());
                binary::write_padded(bytes, form, &mut padded);
                hex::write_lower(&padded, out);
            }
            plain @ (Typed::Null
            | Typed::Int(_)
            | Typed::UInt(_)
            | Typed::Decimal(_)
            | Typed::Year(_)
            | Typed::Date(_)
            | Typed::DateTime { .. }
            | Typed::Timestamp { .. }
            | Typed::Time { .. }
            | Typed::Text { .. }
            | Typed::CompressedText { .. }
            | Typed::CompressedBytes(_)
            | Typed::Enumeration { .. }
            | Typed::Set { .. }
            | Typed::Json(_)
            | Typed::JsonText(_)
            | Typed::Uuid(_)
            | Typed::Inet4(_)
            | Typed::Inet6(_)) => plain.write_text(out)?,
        }
        Ok(())
    }
}

impl Typed<'_> {
    /// Writes the same as `Value::write_shown`.
    #[inline(always)]
    pub(crate) fn write_shown(self, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Typed::Null => out.extend_from_slice(b"null"),
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
            Typed::Set { bits, members } => quoted::within(out, |out| set::write_text(bits, members, out))?,
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
}
