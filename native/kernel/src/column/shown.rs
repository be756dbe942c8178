//! Values as JSON that says what the server's own client shows: numbers as numbers of any length, DECIMAL with all its
//! digits, SET as one text. What the client shows as bytes is base64, a geometry its well-known text, and a document
//! stands as a document.

use crate::error::Result;

use super::{enumeration, float, hex, integer, quoted, set, Kind, Value};

impl Value<'_> {
    /// Adds the value as JSON.
    ///
    /// Raises `ValueMalformed` for values that the kind cannot hold: a member out of range, a broken document or
    /// geometry.
    pub fn write_shown(&self, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
        match (self, kind) {
            (Value::Enumeration(index), Kind::Enumeration { values, .. }) => {
                quoted::within(out, |out| enumeration::write_text(*index, values, out))
            }
            (Value::Set(bits), Kind::Set { values, .. }) => {
                quoted::within(out, |out| set::write_text(*bits, values, out))
            }
            _ => self.write_maxwell(kind, out),
        }
    }

    /// Adds the value as plain text, for names and keys: as the server's client shows it, but numbers with all their
    /// digits, BIT as a number, a vector as a JSON array, and bytes as hexadecimal digits.
    ///
    /// Raises what `write_shown` raises.
    pub fn write_name(&self, kind: &Kind, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Value::Float(value) => float::write_json_single(*value, out),
            Value::Double(value) => float::write_json(*value, out),
            Value::Bit(value) => integer::write_unsigned(*value, out),
            Value::Vector(_) => self.write_maxwell(kind, out)?,
            Value::Geometry(bytes) => hex::write_lower(bytes, out),
            Value::Bytes(bytes) => {
                let start = out.len();
                self.write_text(kind, out)?;
                // What is shorter than its column was padded.
                let padding = vec![0; out.len() - start - bytes.len()];
                out.truncate(start);
                hex::write_lower(bytes, out);
                hex::write_lower(&padding, out);
            }
            _ => self.write_text(kind, out)?,
        }
        Ok(())
    }
}
