//! One value as a view of its row image.

use crate::emit::dialect::JsonStyle;
use crate::error::{value_malformed, Result};

use super::{binary, bit, compressed, date, datetime, decimal, enumeration, float, inet, integer, json, set, text};
use super::{time, timestamp, uuid, year, Date, DateTime, Decimal, Kind, Time, Timestamp};

/// One value. Variants with a slice borrow the row image. Its tag is a word, so that values are moved in whole words:
/// what was written narrow and is read wide makes the processor wait.
#[derive(Debug, Clone, PartialEq)]
#[repr(u64)]
pub enum Value<'a> {
    /// SQL's NULL, which row images show by a bit and never by bytes.
    Null,
    /// A signed integer of any width.
    Int(i64),
    /// An unsigned integer of any width.
    UInt(u64),
    /// FLOAT.
    Float(f32),
    /// DOUBLE.
    Double(f64),
    /// DECIMAL, its digits not yet put together.
    Decimal(Decimal<'a>),
    /// BIT, right-aligned.
    Bit(u64),
    /// YEAR: 0, or 1901 to 2155.
    Year(u16),
    /// DATE, which need not be a day of the calendar.
    Date(Date),
    /// DATETIME, which need not be a moment of the calendar.
    DateTime(DateTime),
    /// TIMESTAMP, in UTC; 0 is the zero date.
    Timestamp(Timestamp),
    /// TIME, within 838:59:59 either way.
    Time(Time),
    /// CHAR, VARCHAR or TEXT in the column's own charset.
    Text(&'a [u8]),
    /// BINARY without its trailing zero bytes, VARBINARY or BLOB.
    Bytes(&'a [u8]),
    /// A MariaDB COMPRESSED column with its header.
    Compressed(&'a [u8]),
    /// ENUM: the member counted from 1, or 0 for the empty string that stands for an invalid value.
    Enumeration(u16),
    /// SET: one bit per member, the first lowest.
    Set(u64),
    /// A whole JSON document in MySQL's binary form.
    Json(&'a [u8]),
    /// A JSON document as text, made by applying a partial update.
    JsonText(String),
    /// SRID (four bytes, little-endian), then well-known binary.
    Geometry(&'a [u8]),
    /// Little-endian 32-bit floats.
    Vector(&'a [u8]),
    /// UUID in the order of its text.
    Uuid([u8; 16]),
    /// An IPv4 address in network order.
    Inet4([u8; 4]),
    /// An IPv6 address in network order.
    Inet6([u8; 16]),
}

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
            (Value::Compressed(bytes), _) => compressed::write_text(bytes, kind, out)?,
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

    /// The variant's name, for messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Value::Null => "NULL",
            Value::Int(_) => "a signed integer",
            Value::UInt(_) => "an unsigned integer",
            Value::Float(_) => "a FLOAT",
            Value::Double(_) => "a DOUBLE",
            Value::Decimal(_) => "a DECIMAL",
            Value::Bit(_) => "a BIT",
            Value::Year(_) => "a YEAR",
            Value::Date(_) => "a DATE",
            Value::DateTime(_) => "a DATETIME",
            Value::Timestamp(_) => "a TIMESTAMP",
            Value::Time(_) => "a TIME",
            Value::Text(_) => "text",
            Value::Bytes(_) => "bytes",
            Value::Compressed(_) => "a compressed string",
            Value::Enumeration(_) => "an ENUM",
            Value::Set(_) => "a SET",
            Value::Json(_) | Value::JsonText(_) => "JSON",
            Value::Geometry(_) => "a geometry",
            Value::Vector(_) => "a vector",
            Value::Uuid(_) => "a UUID",
            Value::Inet4(_) => "an INET4",
            Value::Inet6(_) => "an INET6",
        }
    }
}
