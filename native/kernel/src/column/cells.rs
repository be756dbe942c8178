//! Columns that are Arrow already, read back as values of their declared kinds, so that whatever is written of a row
//! image is written of an Arrow row by the same code.
//!
//! Arrow keeps what a value is, not how it lay in the image: text is UTF-8, whatever the column's charset, a document is
//! the server's text, and bytes are padded. [`CellColumn::kind`] is the declared kind with that taken into account.

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

/// One column of a batch.
pub struct CellColumn<'a> {
    kind: Kind,
    array: &'a ArrayRef,
    cells: Cells<'a>,
}

/// The array, as the type that the kind asks for.
enum Cells<'a> {
    Null,
    Int8(&'a PrimitiveArray<Int8Type>),
    Int16(&'a PrimitiveArray<Int16Type>),
    Int32(&'a PrimitiveArray<Int32Type>),
    Int64(&'a PrimitiveArray<Int64Type>),
    Float(&'a PrimitiveArray<Float32Type>),
    Double(&'a PrimitiveArray<Float64Type>),
    /// BIGINT UNSIGNED and BIT(64).
    Wide(&'a PrimitiveArray<Decimal128Type>),
    /// DECIMAL packed as in a row image, all of one width.
    Packed {
        bytes: Vec<u8>,
        precision: u8,
        scale: u8,
    },
    Date(&'a PrimitiveArray<Date32Type>),
    Time(&'a PrimitiveArray<DurationMicrosecondType>),
    Moment(&'a PrimitiveArray<TimestampMicrosecondType>),
    Text(&'a StringArray),
    Bytes(&'a BinaryArray),
    Floats {
        lists: &'a ListArray,
        bytes: Vec<u8>,
    },
}

impl<'a> CellColumn<'a> {
    /// Reads an array as a column of a declared kind. Raises `SchemaInvalid` where the array is not of the kind's Arrow
    /// type, `ValueMalformed` where a value of a DECIMAL has more digits than the kind.
    pub fn new(name: &str, declared: &Kind, array: &'a ArrayRef) -> Result<CellColumn<'a>> {
        let kind = plain(declared);
        if !same_type(&kind.arrow_type(), array.data_type()) {
            let (wanted, found, declared) = (kind.arrow_type(), array.data_type(), declared.type_text());
            let message = format!("column `{name}` is declared {declared}, which is {wanted}, but holds {found}");
            return Err(Error::new(ErrorKind::SchemaInvalid, message)
                .hint("cast the column in the step that makes it, or declare it with the type it has"));
        }
        let cells = cells(&kind, array).map_err(|error| error.within(&format!("column `{name}`")))?;
        Ok(CellColumn { kind, array, cells })
    }

    /// What the values are, as they are here.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// The value of a row. Raises `ValueMalformed` for what the kind cannot hold: no member of an ENUM, no document.
    pub fn value(&self, row: usize) -> Result<Value<'_>> {
        if self.array.is_null(row) {
            return Ok(Value::Null);
        }
        Ok(match &self.cells {
            Cells::Null => Value::Null,
            Cells::Int8(values) => self.integer(values.value(row).into()),
            Cells::Int16(values) => self.integer(values.value(row).into()),
            Cells::Int32(values) => self.integer(values.value(row).into()),
            Cells::Int64(values) => self.integer(values.value(row)),
            Cells::Wide(values) => self.wide(values.value(row))?,
            Cells::Float(values) => Value::Float(values.value(row)),
            Cells::Double(values) => Value::Double(values.value(row)),
            Cells::Packed { bytes, precision, scale } => {
                let width = decimal::width(*precision, *scale);
                let packed = bytes.get(row * width..(row + 1) * width).unwrap_or_default();
                Value::Decimal(decimal::of_packed(packed, *precision, *scale))
            }
            Cells::Date(values) => Value::Date(client_text::day(values.value(row).into())),
            Cells::Time(values) => Value::Time(client_text::span(values.value(row))),
            Cells::Moment(values) => self.moment(values.value(row)),
            Cells::Text(values) => self.text(values.value(row))?,
            Cells::Bytes(values) => match self.kind {
                Kind::Geometry { .. } => Value::Geometry(values.value(row)),
                _ => Value::Bytes(values.value(row)),
            },
            Cells::Floats { lists, bytes } => {
                let ends = lists.value_offsets();
                let place = |at: usize| ends.get(at).and_then(|end| usize::try_from(*end).ok()).unwrap_or(0) * 4;
                Value::Vector(bytes.get(place(row)..place(row + 1)).unwrap_or_default())
            }
        })
    }

    #[inline]
    fn integer(&self, value: i64) -> Value<'static> {
        match self.kind {
            Kind::Integer { unsigned: true, .. } => Value::UInt(u64::from_ne_bytes(value.to_ne_bytes())),
            Kind::Bit { .. } => Value::Bit(u64::from_ne_bytes(value.to_ne_bytes())),
            Kind::Year => Value::Year(u16::try_from(value).unwrap_or(0)),
            _ => Value::Int(value),
        }
    }

    fn wide(&self, value: i128) -> Result<Value<'static>> {
        let bits = u64::try_from(value)
            .map_err(|_| value_malformed(format!("{value} in a column of type {}", self.kind.type_text())))?;
        Ok(match self.kind {
            Kind::Bit { .. } => Value::Bit(bits),
            _ => Value::UInt(bits),
        })
    }

    fn moment(&self, micros: i64) -> Value<'static> {
        match self.kind {
            Kind::Timestamp { .. } => {
                let seconds = u32::try_from(micros.div_euclid(SECOND_MICROS)).unwrap_or(0);
                let micros = u32::try_from(micros.rem_euclid(SECOND_MICROS)).unwrap_or(0);
                Value::Timestamp(Timestamp { seconds, micros })
            }
            _ => Value::DateTime(client_text::moment(micros)),
        }
    }

    fn text<'v>(&self, text: &'v str) -> Result<Value<'v>> {
        let wrong = |what: &str| value_malformed(format!("`{text}` is no {what}"));
        Ok(match &self.kind {
            Kind::Enumeration { values, .. } => match values.iter().position(|member| **member == *text) {
                Some(at) => Value::Enumeration(u16::try_from(at + 1).unwrap_or(0)),
                // The server shows a value that is no member as the empty string.
                None if text.is_empty() => Value::Enumeration(0),
                None => return Err(wrong("member of the ENUM")),
            },
            Kind::Set { values, .. } => {
                let mut bits = 0;
                // An empty text has no member; else the empty member, too, stands between commas.
                for member in text.split(',').filter(|_| !text.is_empty()) {
                    let at =
                        values.iter().position(|value| **value == *member).ok_or_else(|| wrong("member of the SET"))?;
                    bits |= 1u64 << at.min(63);
                }
                Value::Set(bits)
            }
            Kind::Json { .. } => {
                json::prove(text)?;
                Value::JsonText(text.to_owned())
            }
            Kind::Uuid => Value::Uuid(uuid::parse(text).ok_or_else(|| wrong("UUID"))?),
            Kind::Inet4 => Value::Inet4(inet::parse4(text).ok_or_else(|| wrong("INET4"))?),
            Kind::Inet6 => Value::Inet6(inet::parse6(text).ok_or_else(|| wrong("INET6"))?),
            _ => Value::Text(text.as_bytes()),
        })
    }
}

/// The kind of the same values once they are Arrow: text is UTF-8, and nothing is compressed.
fn plain(declared: &Kind) -> Kind {
    match declared {
        Kind::Text { prefix, form, .. } | Kind::CompressedText { prefix, form, .. } => {
            Kind::Text { prefix: *prefix, form: *form, charset: Charset::Utf8mb4 }
        }
        Kind::CompressedBinary { prefix, form } => Kind::Binary { prefix: *prefix, form: *form },
        other => other.clone(),
    }
}

/// Whether two types are the same, but for the name of a list's items.
fn same_type(wanted: &DataType, found: &DataType) -> bool {
    match (wanted, found) {
        (DataType::List(wanted), DataType::List(found)) => wanted.data_type() == found.data_type(),
        (wanted, found) => wanted == found,
    }
}

fn cells<'a>(kind: &Kind, array: &'a ArrayRef) -> Result<Cells<'a>> {
    Ok(match array.data_type() {
        DataType::Int8 => Cells::Int8(array.as_primitive()),
        DataType::Int16 => Cells::Int16(array.as_primitive()),
        DataType::Int32 => Cells::Int32(array.as_primitive()),
        DataType::Int64 => Cells::Int64(array.as_primitive()),
        DataType::Float32 => Cells::Float(array.as_primitive()),
        DataType::Float64 => Cells::Double(array.as_primitive()),
        DataType::Date32 => Cells::Date(array.as_primitive()),
        DataType::Duration(_) => Cells::Time(array.as_primitive()),
        DataType::Timestamp(..) => Cells::Moment(array.as_primitive()),
        DataType::Binary => Cells::Bytes(array.as_binary()),
        DataType::List(_) => floats(array.as_list()),
        DataType::Decimal128(..) | DataType::Utf8 => match kind {
            Kind::Decimal { precision, scale } => packed(*precision, *scale, array)?,
            _ if *array.data_type() == DataType::Utf8 => Cells::Text(array.as_string()),
            _ => Cells::Wide(array.as_primitive()),
        },
        _ => Cells::Null,
    })
}

/// Packs the digits of a whole column.
fn packed<'a>(precision: u8, scale: u8, array: &ArrayRef) -> Result<Cells<'a>> {
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

/// Lays the floats of all vectors out as they lie in row images.
fn floats(lists: &ListArray) -> Cells<'_> {
    let bytes = match lists.values().as_primitive_opt::<Float32Type>() {
        Some(values) => values.values().iter().flat_map(|value| value.to_le_bytes()).collect(),
        None => Vec::new(),
    };
    Cells::Floats { lists, bytes }
}
