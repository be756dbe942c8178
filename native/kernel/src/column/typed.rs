//! A value together with the column properties that writers of values need.
//!
//! Only valid combinations can be expressed. Writers can therefore match on them without a catch-all arm, and if a type
//! is added, the compiler reports every writer that does not handle it.

use std::sync::Arc;

use super::{Date, DateTime, Decimal, Form, Kind, Time, Timestamp, Value};
use crate::charset::Charset;
use crate::error::{value_malformed, Error, Result};

/// A value with its type. The variants match those of [`Value`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum Typed<'v> {
    Null,
    Int(i64),
    UInt(u64),
    Float(f32),
    Double(f64),
    Decimal(&'v Decimal<'v>),
    Bit { value: u64, bits: u8 },
    Year(u16),
    Date(Date),
    DateTime { value: DateTime, fsp: u8 },
    Timestamp { value: Timestamp, fsp: u8 },
    Time { value: Time, fsp: u8 },
    Text { bytes: &'v [u8], charset: Charset },
    Bytes { bytes: &'v [u8], form: Form },
    CompressedText { bytes: &'v [u8], charset: Charset },
    CompressedBytes(&'v [u8]),
    Enumeration { index: u16, members: &'v [Arc<str>] },
    Set { bits: u64, members: &'v [Arc<str>] },
    Json(&'v [u8]),
    JsonText(&'v str),
    Geometry(&'v [u8]),
    Vector(&'v [u8]),
    Uuid(&'v [u8; 16]),
    Inet4(&'v [u8; 4]),
    Inet6(&'v [u8; 16]),
}

impl Value<'_> {
    /// Combines the value with its column's kind. Raises `ValueMalformed` if a column of this kind cannot have the
    /// value.
    #[inline(always)]
    pub(crate) fn typed<'v>(&'v self, kind: &'v Kind) -> Result<Typed<'v>> {
        Ok(match (kind, self) {
            (_, Value::Null) => Typed::Null,
            (Kind::Integer { .. }, Value::Int(value)) => Typed::Int(*value),
            (Kind::Integer { .. }, Value::UInt(value)) => Typed::UInt(*value),
            (Kind::Float, Value::Float(value)) => Typed::Float(*value),
            (Kind::Double, Value::Double(value)) => Typed::Double(*value),
            (Kind::Decimal { .. }, Value::Decimal(value)) => Typed::Decimal(value),
            (Kind::Bit { bits }, Value::Bit(value)) => Typed::Bit { value: *value, bits: *bits },
            (Kind::Year, Value::Year(value)) => Typed::Year(*value),
            (Kind::Date, Value::Date(value)) => Typed::Date(*value),
            (Kind::DateTime { fsp, .. }, Value::DateTime(value)) => Typed::DateTime { value: *value, fsp: *fsp },
            (Kind::Timestamp { fsp, .. }, Value::Timestamp(value)) => Typed::Timestamp { value: *value, fsp: *fsp },
            (Kind::Time { fsp, .. }, Value::Time(value)) => Typed::Time { value: *value, fsp: *fsp },
            (Kind::Text { charset, .. }, Value::Text(bytes)) => Typed::Text { bytes, charset: *charset },
            (Kind::Binary { form, .. }, Value::Bytes(bytes)) => Typed::Bytes { bytes, form: *form },
            (Kind::CompressedText { charset, .. }, Value::Compressed(bytes)) => {
                Typed::CompressedText { bytes, charset: *charset }
            }
            (Kind::CompressedBinary { .. }, Value::Compressed(bytes)) => Typed::CompressedBytes(bytes),
            (Kind::Enumeration { values, .. }, Value::Enumeration(index)) => {
                Typed::Enumeration { index: *index, members: values }
            }
            (Kind::Set { values, .. }, Value::Set(bits)) => Typed::Set { bits: *bits, members: values },
            (Kind::Json { .. }, Value::Json(document)) => Typed::Json(document),
            (Kind::Json { .. }, Value::JsonText(text)) => Typed::JsonText(text),
            (Kind::Geometry { .. }, Value::Geometry(bytes)) => Typed::Geometry(bytes),
            (Kind::Vector { .. }, Value::Vector(bytes)) => Typed::Vector(bytes),
            (Kind::Uuid, Value::Uuid(bytes)) => Typed::Uuid(bytes),
            (Kind::Inet4, Value::Inet4(bytes)) => Typed::Inet4(bytes),
            (Kind::Inet6, Value::Inet6(bytes)) => Typed::Inet6(bytes),
            (
                Kind::Null
                | Kind::Integer { .. }
                | Kind::Float
                | Kind::Double
                | Kind::Decimal { .. }
                | Kind::Bit { .. }
                | Kind::Year
                | Kind::Date
                | Kind::Time { .. }
                | Kind::DateTime { .. }
                | Kind::Timestamp { .. }
                | Kind::Text { .. }
                | Kind::Binary { .. }
                | Kind::CompressedText { .. }
                | Kind::CompressedBinary { .. }
                | Kind::Enumeration { .. }
                | Kind::Set { .. }
                | Kind::Json { .. }
                | Kind::Geometry { .. }
                | Kind::Vector { .. }
                | Kind::Uuid
                | Kind::Inet4
                | Kind::Inet6,
                value,
            ) => return Err(misfit(value, kind)),
        })
    }
}

#[cold]
fn misfit(value: &Value<'_>, kind: &Kind) -> Error {
    value_malformed(format!("{} in a column of type {}", value.name(), kind.type_text()))
}
