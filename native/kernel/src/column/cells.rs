//! Reads Arrow columns back as values of their declared kinds, so that writers can process Arrow rows in the same way
//! as row images.
//!
//! Arrow keeps the value, not its representation in the row image: text is UTF-8 whatever the column's charset, a
//! document is the server's text, and bytes are padded. [`CellColumn::kind`] is the declared kind adapted to Arrow.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Decimal128Type, DurationMicrosecondType, Float32Type, Float64Type, Int16Type, Int32Type, Int64Type,
    Int8Type, TimestampMicrosecondType,
};
use arrow_array::{Array, ArrayRef, BinaryArray, ListArray, PrimitiveArray, StringArray};
use arrow_schema::DataType;

use crate::charset::Charset;
use crate::error::{value_malformed, Error, ErrorKind, Result};

use super::{client_text, decimal, inet, json, uuid, Kind, Timestamp, Value};

const SECOND_MICROS: i64 = 1_000_000;

/// A column of a batch.
pub struct CellColumn<'a> {
    kind: Kind,
    array: &'a ArrayRef,
    cells: Cells<'a>,
}

/// The column's array, with a variant for each group of Arrow types.
enum Cells<'a> {
    Null,
    Int(Whole<'a>),
    UInt(Whole<'a>),
    Bit(Whole<'a>),
    Year(Whole<'a>),
    Float(&'a PrimitiveArray<Float32Type>),
    Double(&'a PrimitiveArray<Float64Type>),
    /// DECIMAL, packed as in a row image, with a constant width.
    Packed {
        bytes: Vec<u8>,
        precision: u8,
        scale: u8,
    },
    Date(&'a PrimitiveArray<Date32Type>),
    Time(&'a PrimitiveArray<DurationMicrosecondType>),
    DateTime(&'a PrimitiveArray<TimestampMicrosecondType>),
    Timestamp(&'a PrimitiveArray<TimestampMicrosecondType>),
    Text(&'a StringArray),
    Enumeration {
        texts: &'a StringArray,
        members: Arc<[Arc<str>]>,
    },
    Set {
        texts: &'a StringArray,
        members: Arc<[Arc<str>]>,
    },
    Json(&'a StringArray),
    Uuid(&'a StringArray),
    Inet4(&'a StringArray),
    Inet6(&'a StringArray),
    Bytes(&'a BinaryArray),
    Geometry(&'a BinaryArray),
    Floats {
        lists: &'a ListArray,
        bytes: Vec<u8>,
    },
}

/// Integers, by their width in Arrow.
enum Whole<'a> {
    Int8(&'a PrimitiveArray<Int8Type>),
    Int16(&'a PrimitiveArray<Int16Type>),
    Int32(&'a PrimitiveArray<Int32Type>),
    Int64(&'a PrimitiveArray<Int64Type>),
    /// BIGINT UNSIGNED and BIT(64).
    Wide(&'a PrimitiveArray<Decimal128Type>),
}

impl<'a> Whole<'a> {
    fn of(array: &'a ArrayRef) -> Whole<'a> {
        match array.data_type() {
            DataType::Int8 => Whole::Int8(array.as_primitive()),
            DataType::Int16 => Whole::Int16(array.as_primitive()),
            DataType::Int32 => Whole::Int32(array.as_primitive()),
            DataType::Int64 => Whole::Int64(array.as_primitive()),
            _ => Whole::Wide(array.as_primitive()),
        }
    }

    /// Returns the number, or `Err` with the number if it does not fit into 64 bits.
    #[inline]
    fn signed(&self, row: usize) -> std::result::Result<i64, i128> {
        Ok(match self {
            Whole::Int8(values) => values.value(row).into(),
            Whole::Int16(values) => values.value(row).into(),
            Whole::Int32(values) => values.value(row).into(),
            Whole::Int64(values) => values.value(row),
            Whole::Wide(values) => i64::try_from(values.value(row)).map_err(|_| values.value(row))?,
        })
    }

    /// Returns the number, or `Err` with the number if it is negative or does not fit into 64 bits.
    #[inline]
    fn unsigned(&self, row: usize) -> std::result::Result<u64, i128> {
        match self {
            Whole::Wide(values) => u64::try_from(values.value(row)).map_err(|_| values.value(row)),
            narrow => narrow.signed(row).map(|value| u64::from_ne_bytes(value.to_ne_bytes())),
        }
    }
}

impl<'a> CellColumn<'a> {
    /// Reads an array as a column of a declared kind. Raises `SchemaInvalid` if the array does not have the kind's
    /// Arrow type, `ValueMalformed` if a DECIMAL has more digits than the kind allows.
    pub fn new(name: &str, declared: &Kind, array: &'a ArrayRef) -> Result<CellColumn<'a>> {
        let kind = arrow_kind(declared);
        if !same_type(&kind.arrow_type(), array.data_type()) {
            let (expected, actual, declared) = (kind.arrow_type(), array.data_type(), declared.type_text());
            let message = format!("column `{name}` is declared {declared}, which is {expected}, but holds {actual}");
            return Err(Error::new(ErrorKind::SchemaInvalid, message)
                .hint("cast the column in the step that makes it, or declare it with the type it has"));
        }
        let cells = cells(&kind, array).map_err(|error| error.within(&format!("column `{name}`")))?;
        Ok(CellColumn { kind, array, cells })
    }

    /// The declared kind, adapted to the form that values have in Arrow.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// Returns the value of a row. Raises `ValueMalformed` if the value is invalid for the kind, such as an unknown
    /// ENUM member or a malformed JSON document.
    pub fn value(&self, row: usize) -> Result<Value<'_>> {
        if self.array.is_null(row) {
            return Ok(Value::Null);
        }
        let beyond = |value: i128| value_malformed(format!("{value} in a column of type {}", self.kind.type_text()));
        Ok(match &self.cells {
            Cells::Null => Value::Null,
            Cells::Int(values) => Value::Int(values.signed(row).map_err(beyond)?),
            Cells::UInt(values) => Value::UInt(values.unsigned(row).map_err(beyond)?),
            Cells::Bit(values) => Value::Bit(values.unsigned(row).map_err(beyond)?),
            Cells::Year(values) => Value::Year(u16::try_from(values.signed(row).map_err(beyond)?).unwrap_or(0)),
            Cells::Float(values) => Value::Float(values.value(row)),
            Cells::Double(values) => Value::Double(values.value(row)),
            Cells::Packed { bytes, precision, scale } => {
                let width = decimal::width(*precision, *scale);
                let packed = bytes.get(row * width..(row + 1) * width).unwrap_or_default();
                Value::Decimal(decimal::of_packed(packed, *precision, *scale))
            }
            Cells::Date(values) => Value::Date(client_text::day(values.value(row).into())),
            Cells::Time(values) => Value::Time(client_text::span(values.value(row))),
            Cells::DateTime(values) => Value::DateTime(client_text::moment(values.value(row))),
            Cells::Timestamp(values) => Value::Timestamp(timestamp_of(values.value(row))),
            Cells::Text(values) => Value::Text(values.value(row).as_bytes()),
            Cells::Enumeration { texts, members } => Value::Enumeration(member(texts.value(row), members)?),
            Cells::Set { texts, members } => Value::Set(bits(texts.value(row), members)?),
            Cells::Json(texts) => {
                let text = texts.value(row);
                json::prove(text)?;
                Value::JsonText(text.to_owned())
            }
            Cells::Uuid(texts) => Value::Uuid(parse_text(texts.value(row), uuid::parse, "UUID")?),
            Cells::Inet4(texts) => Value::Inet4(parse_text(texts.value(row), inet::parse4, "INET4")?),
            Cells::Inet6(texts) => Value::Inet6(parse_text(texts.value(row), inet::parse6, "INET6")?),
            Cells::Bytes(values) => Value::Bytes(values.value(row)),
            Cells::Geometry(values) => Value::Geometry(values.value(row)),
            Cells::Floats { lists, bytes } => {
                let ends = lists.value_offsets();
                let offset = |at: usize| ends.get(at).and_then(|end| usize::try_from(*end).ok()).unwrap_or(0) * 4;
                Value::Vector(bytes.get(offset(row)..offset(row + 1)).unwrap_or_default())
            }
        })
    }
}

fn timestamp_of(micros: i64) -> Timestamp {
    let seconds = u32::try_from(micros.div_euclid(SECOND_MICROS)).unwrap_or(0);
    let micros = u32::try_from(micros.rem_euclid(SECOND_MICROS)).unwrap_or(0);
    Timestamp { seconds, micros }
}

fn invalid_text(text: &str, what: &str) -> Error {
    value_malformed(format!("`{text}` is no {what}"))
}

fn parse_text<T>(text: &str, parse: impl Fn(&str) -> Option<T>, what: &str) -> Result<T> {
    parse(text).ok_or_else(|| invalid_text(text, what))
}

/// Returns the number of an ENUM member. The empty string is 0, because the server shows an invalid ENUM value as an
/// empty string.
fn member(text: &str, members: &[Arc<str>]) -> Result<u16> {
    match members.iter().position(|member| **member == *text) {
        Some(at) => Ok(u16::try_from(at + 1).unwrap_or(0)),
        None if text.is_empty() => Ok(0),
        None => Err(invalid_text(text, "member of the ENUM")),
    }
}

/// Returns the bits of a SET: one for each member that the text lists.
fn bits(text: &str, members: &[Arc<str>]) -> Result<u64> {
    let mut bits = 0;
    // An empty text lists no members. In any other text, commas separate the members, and a member may be empty.
    for word in text.split(',').filter(|_| !text.is_empty()) {
        let at = members.iter().position(|member| **member == *word);
        bits |= 1u64 << at.ok_or_else(|| invalid_text(text, "member of the SET"))?.min(63);
    }
    Ok(bits)
}

/// Returns the kind adapted to the form that values have in Arrow: text is UTF-8, and nothing is compressed.
fn arrow_kind(declared: &Kind) -> Kind {
    if let Kind::Text { prefix, form, .. } | Kind::CompressedText { prefix, form, .. } = declared {
        return Kind::Text { prefix: *prefix, form: *form, charset: Charset::Utf8mb4 };
    }
    if let Kind::CompressedBinary { prefix, form } = declared {
        return Kind::Binary { prefix: *prefix, form: *form };
    }
    declared.clone()
}

/// Whether two types are equal, ignoring the field name of a list's elements.
fn same_type(expected: &DataType, actual: &DataType) -> bool {
    match (expected, actual) {
        (DataType::List(expected), DataType::List(actual)) => expected.data_type() == actual.data_type(),
        (expected, actual) => expected == actual,
    }
}

fn cells<'a>(kind: &Kind, array: &'a ArrayRef) -> Result<Cells<'a>> {
    Ok(match kind {
        Kind::Null => Cells::Null,
        Kind::Integer { unsigned: false, .. } => Cells::Int(Whole::of(array)),
        Kind::Integer { unsigned: true, .. } => Cells::UInt(Whole::of(array)),
        Kind::Float => Cells::Float(array.as_primitive()),
        Kind::Double => Cells::Double(array.as_primitive()),
        Kind::Decimal { precision, scale } => pack_decimals(*precision, *scale, array)?,
        Kind::Bit { .. } => Cells::Bit(Whole::of(array)),
        Kind::Year => Cells::Year(Whole::of(array)),
        Kind::Date => Cells::Date(array.as_primitive()),
        Kind::Time { .. } => Cells::Time(array.as_primitive()),
        Kind::DateTime { .. } => Cells::DateTime(array.as_primitive()),
        Kind::Timestamp { .. } => Cells::Timestamp(array.as_primitive()),
        Kind::Text { .. } | Kind::CompressedText { .. } => Cells::Text(array.as_string()),
        Kind::Binary { .. } | Kind::CompressedBinary { .. } => Cells::Bytes(array.as_binary()),
        Kind::Enumeration { values, .. } => Cells::Enumeration { texts: array.as_string(), members: values.clone() },
        Kind::Set { values, .. } => Cells::Set { texts: array.as_string(), members: values.clone() },
        Kind::Json { .. } => Cells::Json(array.as_string()),
        Kind::Geometry { .. } => Cells::Geometry(array.as_binary()),
        Kind::Vector { .. } => floats(array.as_list()),
        Kind::Uuid => Cells::Uuid(array.as_string()),
        Kind::Inet4 => Cells::Inet4(array.as_string()),
        Kind::Inet6 => Cells::Inet6(array.as_string()),
    })
}

/// Packs the digits of all values of a column.
fn pack_decimals<'a>(precision: u8, scale: u8, array: &ArrayRef) -> Result<Cells<'a>> {
    let width = decimal::width(precision, scale);
    let mut bytes = Vec::with_capacity(width * array.len());
    let numbers = array.as_primitive_opt::<Decimal128Type>();
    let texts = array.as_string_opt::<i32>();
    for row in (0..array.len()).map(|row| (!array.is_null(row)).then_some(row)) {
        match (row, numbers, texts) {
            (Some(row), Some(numbers), _) => decimal::pack_number(numbers.value(row), precision, scale, &mut bytes)?,
            (Some(row), _, Some(texts)) => decimal::pack_text(texts.value(row), precision, scale, &mut bytes)?,
            _ => bytes.resize(bytes.len() + width, 0),
        }
    }
    Ok(Cells::Packed { bytes, precision, scale })
}

/// Serializes the floats of all vectors as in row images.
fn floats(lists: &ListArray) -> Cells<'_> {
    let bytes = match lists.values().as_primitive_opt::<Float32Type>() {
        Some(values) => values.values().iter().flat_map(|value| value.to_le_bytes()).collect(),
        None => Vec::new(),
    };
    Cells::Floats { lists, bytes }
}
