//! Values as the server's own client shows them.

use crate::error::{value_malformed, Result};

use super::{binary, bit, compressed, date, datetime, decimal, enumeration, float, inet, integer, json, set, text};
use super::{time, timestamp, uuid, year, Kind, Value};

impl Value<'_> {
    /// Adds the value as the server's own client shows it with `--batch --raw`: text as UTF-8, binary types as their
    /// bytes, TIMESTAMP in UTC. Text that is not valid in its charset stands as a hexadecimal literal.
    ///
    /// Raises `ValueMalformed` for values that the kind cannot hold: a member out of range, a broken JSON document.
    pub fn write_text(&self, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
        match (self, kind) {
            (Value::Null, _) => out.extend_from_slice(b"NULL"),
            (Value::Int(value), _) => integer::write_signed(*value, out),
            (Value::UInt(value), _) => integer::write_unsigned(*value, out),
            (Value::Float(value), _) => float::write_single(*value, out),
            (Value::Double(value), _) => float::write_double(*value, out),
            (Value::Decimal(value), _) => decimal::write_text(value, out)?,
            (Value::Bit(value), Kind::Bit { bits }) => bit::write_text(*value, *bits, out),
            (Value::Year(value), _) => year::write_text(*value, out),
            (Value::Date(value), _) => date::write_text(*value, out),
            (Value::DateTime(value), Kind::DateTime { fsp, .. }) => datetime::write_text(*value, *fsp, out),
            (Value::Timestamp(value), Kind::Timestamp { fsp, .. }) => timestamp::write_text(*value, *fsp, out),
            (Value::Time(value), Kind::Time { fsp, .. }) => time::write_text(*value, *fsp, out),
            (Value::Text(bytes), Kind::Text { charset, .. }) => text::write_text(bytes, *charset, out),
            (Value::Bytes(bytes), Kind::Binary { form, .. }) => binary::write_padded(bytes, *form, out),
            (Value::Compressed(bytes), Kind::CompressedText { charset, .. }) => {
                compressed::write_text(bytes, *charset, out)?;
            }
            (Value::Compressed(bytes), _) => compressed::write_bytes(bytes, out)?,
            (Value::Enumeration(index), Kind::Enumeration { values, .. }) => {
                enumeration::write_text(*index, values, out)?
            }
            (Value::Set(bits), Kind::Set { values, .. }) => set::write_text(*bits, values, out)?,
            (Value::Json(document), _) => json::write_text(document, out)?,
            (Value::JsonText(text), _) => out.extend_from_slice(text.as_bytes()),
            (Value::Bytes(bytes) | Value::Geometry(bytes) | Value::Vector(bytes), _) => out.extend_from_slice(bytes),
            (Value::Uuid(bytes), _) => uuid::write_text(bytes, out),
            (Value::Inet4(bytes), _) => inet::write_text4(bytes, out),
            (Value::Inet6(bytes), _) => inet::write_text6(bytes, out),
            (value, kind) => {
                let declared = kind.type_text();
                return Err(value_malformed(format!("{} in a column of type {declared}", value.name())));
            }
        }
        Ok(())
    }
}
