//! A value as a view of its row image.

use super::{Date, DateTime, Decimal, Time, Timestamp};

/// A value. Variants with a slice borrow the row image. The tag is as wide as a word, so that values are copied in
/// whole words. A read that is wider than the preceding write would stall the processor.
#[derive(Debug, Clone, PartialEq)]
#[repr(u64)]
pub enum Value<'a> {
    /// SQL's NULL, which row images mark by a bit.
    Null,
    /// A signed integer of any width.
    Int(i64),
    /// An unsigned integer of any width.
    UInt(u64),
    /// FLOAT.
    Float(f32),
    /// DOUBLE.
    Double(f64),
    /// DECIMAL, whose digits are still packed.
    Decimal(Decimal<'a>),
    /// BIT, right-aligned.
    Bit(u64),
    /// YEAR: 0, or 1901 to 2155.
    Year(u16),
    /// DATE, which may be missing from the calendar.
    Date(Date),
    /// DATETIME, whose date may be missing from the calendar.
    DateTime(DateTime),
    /// TIMESTAMP, in UTC; 0 is the zero date.
    Timestamp(Timestamp),
    /// TIME, from -838:59:59 to 838:59:59.
    Time(Time),
    /// CHAR, VARCHAR or TEXT in the column's charset.
    Text(&'a [u8]),
    /// BINARY without its trailing zero bytes, VARBINARY or BLOB.
    Bytes(&'a [u8]),
    /// The value of a MariaDB COMPRESSED column, including its header byte.
    Compressed(&'a [u8]),
    /// ENUM: the member, starting at 1, or 0 for the empty string that replaces an invalid value.
    Enumeration(u16),
    /// SET: a bit for each member, starting with the lowest bit.
    Set(u64),
    /// A whole JSON document in MySQL's binary form.
    Json(&'a [u8]),
    /// A JSON document as text, the result of a partial update.
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
    /// Returns the variant's name, for messages.
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
