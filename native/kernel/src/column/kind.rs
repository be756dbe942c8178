//! The type of a column, its width in a row image, and its Arrow type.

use std::sync::Arc;

use arrow_schema::{DataType, Field, TimeUnit};

use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::{Error, ErrorKind, Result};

use super::{
    binary, compressed, date, datetime, enumeration, float, geometry, inet, integer, json, set, text, timestamp,
};
use super::{bit, decimal, time, Value};
use super::{uuid, vector, year, Form, Layout};

/// The type of a column. `prefix` is the number of length bytes before a value, and `bytes` is the width of a value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Kind {
    /// No value, as in a `SELECT NULL` column.
    Null,
    Integer {
        bytes: u8,
        unsigned: bool,
    },
    Float,
    Double,
    Decimal {
        precision: u8,
        scale: u8,
    },
    Bit {
        bits: u8,
    },
    Year,
    Date,
    Time {
        fsp: u8,
        layout: Layout,
    },
    DateTime {
        fsp: u8,
        layout: Layout,
    },
    Timestamp {
        fsp: u8,
        layout: Layout,
    },
    Text {
        prefix: u8,
        form: Form,
        charset: Charset,
    },
    Binary {
        prefix: u8,
        form: Form,
    },
    /// MariaDB's `COMPRESSED` attribute on a text column.
    CompressedText {
        prefix: u8,
        form: Form,
        charset: Charset,
    },
    /// MariaDB's `COMPRESSED` attribute on a binary column.
    CompressedBinary {
        prefix: u8,
        form: Form,
    },
    Enumeration {
        bytes: u8,
        values: Arc<[Arc<str>]>,
    },
    Set {
        bytes: u8,
        values: Arc<[Arc<str>]>,
    },
    /// MySQL's binary JSON. MariaDB's JSON is a LONGTEXT.
    Json {
        prefix: u8,
    },
    Geometry {
        prefix: u8,
    },
    Vector {
        prefix: u8,
        dimensions: Option<u16>,
    },
    Uuid,
    Inet4,
    Inet6,
}

impl Kind {
    /// Returns the Arrow type of the column, which Spark supports without a conversion.
    pub fn arrow_type(&self) -> DataType {
        match self {
            Kind::Null => DataType::Null,
            Kind::Integer { bytes, unsigned } => integer::arrow_type(*bytes, *unsigned),
            Kind::Float => DataType::Float32,
            Kind::Double => DataType::Float64,
            Kind::Decimal { precision, scale } => decimal::arrow_type(*precision, *scale),
            Kind::Bit { bits } => bit::arrow_type(*bits),
            Kind::Year => DataType::Int16,
            Kind::Date => DataType::Date32,
            Kind::Time { .. } => DataType::Duration(TimeUnit::Microsecond),
            Kind::DateTime { .. } => DataType::Timestamp(TimeUnit::Microsecond, None),
            Kind::Timestamp { .. } => DataType::Timestamp(TimeUnit::Microsecond, Some(timestamp::ZONE.into())),
            Kind::Binary { .. } | Kind::CompressedBinary { .. } | Kind::Geometry { .. } => DataType::Binary,
            Kind::Vector { .. } => DataType::List(Arc::new(Field::new_list_field(DataType::Float32, true))),
            Kind::Text { .. }
            | Kind::CompressedText { .. }
            | Kind::Enumeration { .. }
            | Kind::Set { .. }
            | Kind::Json { .. }
            | Kind::Uuid
            | Kind::Inet4
            | Kind::Inet6 => DataType::Utf8,
        }
    }

    /// Reads a value of a row image.
    ///
    /// Raises `EventMalformed` if the image ends too early, `ValueMalformed` if the bytes are not a valid value.
    #[inline]
    pub fn read<'a>(&self, cursor: &mut Cursor<'a>) -> Result<Value<'a>> {
        Ok(match self {
            Kind::Null => Value::Null,
            Kind::Integer { bytes, unsigned: false } => Value::Int(integer::read_signed(*bytes, cursor)?),
            Kind::Integer { bytes, unsigned: true } => Value::UInt(integer::read_unsigned(*bytes, cursor)?),
            Kind::Float => Value::Float(float::read_single(cursor)?),
            Kind::Double => Value::Double(float::read_double(cursor)?),
            Kind::Decimal { precision, scale } => Value::Decimal(decimal::read(*precision, *scale, cursor)?),
            Kind::Bit { bits } => Value::Bit(bit::read(*bits, cursor)?),
            Kind::Year => Value::Year(year::read(cursor)?),
            Kind::Date => Value::Date(date::read(cursor)?),
            Kind::Time { fsp, layout } => Value::Time(time::read(*fsp, *layout, cursor)?),
            Kind::DateTime { fsp, layout } => Value::DateTime(datetime::read(*fsp, *layout, cursor)?),
            Kind::Timestamp { fsp, layout } => Value::Timestamp(timestamp::read(*fsp, *layout, cursor)?),
            Kind::Text { prefix, .. } => Value::Text(text::read(*prefix, cursor)?),
            Kind::Binary { prefix, form } => Value::Bytes(binary::read(*prefix, *form, cursor)?),
            Kind::CompressedText { prefix, .. } | Kind::CompressedBinary { prefix, .. } => {
                Value::Compressed(compressed::read(*prefix, cursor)?)
            }
            Kind::Enumeration { bytes, .. } => Value::Enumeration(enumeration::read(*bytes, cursor)?),
            Kind::Set { bytes, .. } => Value::Set(set::read(*bytes, cursor)?),
            Kind::Json { prefix } => Value::Json(json::read(*prefix, cursor)?),
            Kind::Geometry { prefix } => Value::Geometry(geometry::read(*prefix, cursor)?),
            Kind::Vector { prefix, .. } => Value::Vector(vector::read(*prefix, cursor)?),
            Kind::Uuid => Value::Uuid(uuid::read(cursor)?),
            Kind::Inet4 => Value::Inet4(inet::read4(cursor)?),
            Kind::Inet6 => Value::Inet6(inet::read6(cursor)?),
        })
    }

    /// Returns the number of length bytes of a document; None for columns without documents.
    #[inline]
    pub(crate) fn json_prefix(&self) -> Option<u8> {
        if let Kind::Json { prefix } = self {
            return Some(*prefix);
        }
        None
    }

    /// Skips a value without decoding it.
    ///
    /// Raises `EventMalformed` if the image ends too early.
    #[inline]
    pub fn skip(&self, cursor: &mut Cursor<'_>) -> Result<()> {
        match self.width() {
            Width::Bytes(bytes) => cursor.skip(bytes),
            Width::Prefix(prefix) => cursor.prefixed(prefix).map(|_| ()),
        }
    }

    /// Returns the length of a value.
    #[inline]
    pub(crate) fn width(&self) -> Width {
        match self {
            Kind::Null => Width::Bytes(0),
            Kind::Integer { bytes, .. } | Kind::Enumeration { bytes, .. } | Kind::Set { bytes, .. } => {
                Width::Bytes(usize::from(*bytes))
            }
            Kind::Float => Width::Bytes(4),
            Kind::Double => Width::Bytes(8),
            Kind::Decimal { precision, scale } => Width::Bytes(decimal::width(*precision, *scale)),
            Kind::Bit { bits } => Width::Bytes(bit::width(*bits)),
            Kind::Year => Width::Bytes(1),
            Kind::Date => Width::Bytes(3),
            Kind::Time { fsp, layout } => Width::Bytes(time::width(*fsp, *layout)),
            Kind::DateTime { fsp, layout } => Width::Bytes(datetime::width(*fsp, *layout)),
            Kind::Timestamp { fsp, layout } => Width::Bytes(timestamp::width(*fsp, *layout)),
            Kind::Text { prefix, .. }
            | Kind::Binary { prefix, .. }
            | Kind::CompressedText { prefix, .. }
            | Kind::CompressedBinary { prefix, .. }
            | Kind::Json { prefix }
            | Kind::Geometry { prefix }
            | Kind::Vector { prefix, .. } => Width::Prefix(*prefix),
            Kind::Uuid | Kind::Inet4 | Kind::Inet6 => Width::Prefix(1),
        }
    }
}

/// The length of a value: fixed, or stored in a prefix.
pub(crate) enum Width {
    Bytes(usize),
    Prefix(u8),
}

/// Returns the error for a value whose column was built for another type.
#[cold]
pub(super) fn misplaced(value: &str, kind: &Kind) -> Error {
    let message = format!("{value} does not fit the Arrow column that was made for {}", kind.type_text());
    Error::new(ErrorKind::SchemaMismatch, message)
}
