//! Writes Arrow rows as BSON documents for MongoDB, with a field for each column according to its Arrow type.
//!
//! | Arrow | BSON |
//! | --- | --- |
//! | int8, int16, int32 | int32 |
//! | int64, uint64 | int64; decimal128 where a number is too large for it |
//! | float, double | double |
//! | decimal128 | decimal128, with all its digits |
//! | string | string |
//! | binary | binary |
//! | bool | boolean |
//! | date32, timestamp[ms] | date |
//! | list of numbers | array |
//! | struct | document |

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Decimal128Type, Float32Type, Float64Type, Int16Type, Int32Type, Int64Type, Int8Type,
    TimestampMillisecondType, UInt64Type,
};
use arrow_array::{Array, ArrayRef, BinaryArray, BooleanArray, PrimitiveArray, RecordBatch, StringArray};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, TimeUnit};

use crate::error::{malformed, Error, ErrorKind, Result};

const DAY_MILLIS: i64 = 86_400_000;
/// The limits of a decimal128: its maximum number of digits, and the bias of its exponent.
const DIGITS_MAX: u8 = 34;
const EXPONENT_BIAS: u64 = 6176;

/// Writes a document for each row of `batch`. A null is BSON's null.
///
/// Raises `OptionInvalid` for a column whose type is not in the table in the module's documentation, `LimitExceeded`
/// for more than 2 GiB.
pub fn bson_documents(batch: &RecordBatch) -> Result<BinaryArray> {
    let schema = batch.schema();
    let fields = schema.fields().iter().zip(batch.columns());
    let document = Document::new(fields.map(|(field, array)| (field.name().as_str(), array)))?;
    let mut out = Vec::new();
    let mut ends = Vec::with_capacity(batch.num_rows() + 1);
    ends.push(0i32);
    for row in 0..batch.num_rows() {
        document.write(row, &mut out)?;
        ends.push(i32::try_from(out.len()).map_err(|_| too_long())?);
    }
    BinaryArray::try_new(OffsetBuffer::new(ScalarBuffer::from(ends)), out.into(), None)
        .map_err(|error| malformed(format!("documents that are no bytes: {error}")))
}

/// The fields of a document.
struct Document<'a> {
    fields: Vec<Field<'a>>,
}

struct Field<'a> {
    name: &'a str,
    array: &'a ArrayRef,
    values: Values<'a>,
}

enum Values<'a> {
    Null,
    Boolean(&'a BooleanArray),
    Int8(&'a PrimitiveArray<Int8Type>),
    Int16(&'a PrimitiveArray<Int16Type>),
    Int32(&'a PrimitiveArray<Int32Type>),
    Int64(&'a PrimitiveArray<Int64Type>),
    UInt64(&'a PrimitiveArray<UInt64Type>),
    Float(&'a PrimitiveArray<Float32Type>),
    Double(&'a PrimitiveArray<Float64Type>),
    Decimal(&'a PrimitiveArray<Decimal128Type>, u64),
    Text(&'a StringArray),
    Bytes(&'a BinaryArray),
    Day(&'a PrimitiveArray<Date32Type>),
    Moment(&'a PrimitiveArray<TimestampMillisecondType>),
    List { ends: &'a [i32], elements: Box<Field<'a>> },
    Struct(Document<'a>),
}

impl<'a> Document<'a> {
    fn new(fields: impl Iterator<Item = (&'a str, &'a ArrayRef)>) -> Result<Document<'a>> {
        let fields = fields.map(|(name, array)| Ok(Field { name, array, values: typed_values(name, array)? }));
        Ok(Document { fields: fields.collect::<Result<_>>()? })
    }

    fn write(&self, row: usize, out: &mut Vec<u8>) -> Result<()> {
        within(out, |out| self.fields.iter().try_for_each(|field| field.write(row, field.name, out)))
    }
}

impl Field<'_> {
    /// Writes a row's value as a named element: type, name, value.
    fn write(&self, row: usize, name: &str, out: &mut Vec<u8>) -> Result<()> {
        let type_offset = out.len();
        out.push(0x0A);
        out.extend_from_slice(name.as_bytes());
        out.push(0);
        if self.array.is_null(row) {
            return Ok(());
        }
        let kind = self.values.write(row, out)?;
        if let Some(first) = out.get_mut(type_offset) {
            *first = kind;
        }
        Ok(())
    }
}

impl Values<'_> {
    /// Writes a value and returns its BSON type.
    fn write(&self, row: usize, out: &mut Vec<u8>) -> Result<u8> {
        Ok(match self {
            Values::Null => 0x0A,
            Values::Boolean(values) => {
                out.push(values.value(row).into());
                0x08
            }
            Values::Int8(values) => int32(values.value(row).into(), out),
            Values::Int16(values) => int32(values.value(row).into(), out),
            Values::Int32(values) => int32(values.value(row), out),
            Values::Int64(values) => int64(values.value(row), out),
            Values::UInt64(values) => match i64::try_from(values.value(row)) {
                Ok(value) => int64(value, out),
                Err(_) => decimal(values.value(row).into(), 0, out),
            },
            Values::Float(values) => double(values.value(row).into(), out),
            Values::Double(values) => double(values.value(row), out),
            Values::Decimal(values, scale) => decimal(values.value(row), *scale, out),
            Values::Text(values) => {
                let text = values.value(row).as_bytes();
                length(text.len() + 1, out)?;
                out.extend_from_slice(text);
                out.push(0);
                0x02
            }
            Values::Bytes(values) => {
                let bytes = values.value(row);
                length(bytes.len(), out)?;
                out.push(0);
                out.extend_from_slice(bytes);
                0x05
            }
            Values::Day(values) => {
                int64(i64::from(values.value(row)) * DAY_MILLIS, out);
                0x09
            }
            Values::Moment(values) => {
                int64(values.value(row), out);
                0x09
            }
            Values::List { ends, elements } => {
                let offset = |index: usize| ends.get(index).and_then(|end| usize::try_from(*end).ok()).unwrap_or(0);
                let mut numbers = (offset(row)..offset(row + 1)).enumerate();
                within(out, |out| {
                    numbers.try_for_each(|(index, element)| elements.write(element, &index.to_string(), out))
                })?;
                0x04
            }
            Values::Struct(document) => {
                document.write(row, out)?;
                0x03
            }
        })
    }
}

fn typed_values<'a>(name: &str, array: &'a ArrayRef) -> Result<Values<'a>> {
    Ok(match array.data_type() {
        DataType::Null => Values::Null,
        DataType::Boolean => Values::Boolean(array.as_boolean()),
        DataType::Int8 => Values::Int8(array.as_primitive()),
        DataType::Int16 => Values::Int16(array.as_primitive()),
        DataType::Int32 => Values::Int32(array.as_primitive()),
        DataType::Int64 => Values::Int64(array.as_primitive()),
        DataType::UInt64 => Values::UInt64(array.as_primitive()),
        DataType::Float32 => Values::Float(array.as_primitive()),
        DataType::Float64 => Values::Double(array.as_primitive()),
        DataType::Decimal128(digits, scale @ 0..) if *digits <= DIGITS_MAX => {
            Values::Decimal(array.as_primitive(), u64::from(scale.unsigned_abs()))
        }
        DataType::Utf8 => Values::Text(array.as_string()),
        DataType::Binary => Values::Bytes(array.as_binary()),
        DataType::Date32 => Values::Day(array.as_primitive()),
        DataType::Timestamp(TimeUnit::Millisecond, _) => Values::Moment(array.as_primitive()),
        DataType::List(_) => {
            let lists = array.as_list::<i32>();
            let elements = lists.values();
            let elements = Field { name: "", array: elements, values: typed_values(name, elements)? };
            Values::List { ends: lists.value_offsets(), elements: Box::new(elements) }
        }
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            Values::Struct(Document::new(fields.iter().map(|field| field.name().as_str()).zip(columns))?)
        }
        data_type => {
            let message = format!("the column `{name}` is {data_type}, for which BSON has no type");
            return Err(Error::new(ErrorKind::OptionInvalid, message).hint("cast it to a text or a number"));
        }
    })
}

fn int32(value: i32, out: &mut Vec<u8>) -> u8 {
    out.extend_from_slice(&value.to_le_bytes());
    0x10
}

fn int64(value: i64, out: &mut Vec<u8>) -> u8 {
    out.extend_from_slice(&value.to_le_bytes());
    0x12
}

fn double(value: f64, out: &mut Vec<u8>) -> u8 {
    out.extend_from_slice(&value.to_le_bytes());
    0x01
}

/// Writes a number of at most 34 digits: the sign, the exponent, and the digits as an integer.
fn decimal(value: i128, scale: u64, out: &mut Vec<u8>) -> u8 {
    let sign = u128::from(value < 0) << 127;
    let exponent = u128::from(EXPONENT_BIAS - scale) << 113;
    out.extend_from_slice(&(sign | exponent | value.unsigned_abs()).to_le_bytes());
    0x13
}

/// Writes a document or an array: its length, the output of `write`, and a terminating zero.
fn within(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> Result<()>) -> Result<()> {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    write(out)?;
    out.push(0);
    let length = i32::try_from(out.len() - start).map_err(|_| too_long())?;
    if let Some(length_bytes) = out.get_mut(start..start + 4) {
        length_bytes.copy_from_slice(&length.to_le_bytes());
    }
    Ok(())
}

fn length(length: usize, out: &mut Vec<u8>) -> Result<()> {
    let length = i32::try_from(length).map_err(|_| too_long())?;
    out.extend_from_slice(&length.to_le_bytes());
    Ok(())
}

#[cold]
fn too_long() -> Error {
    Error::new(ErrorKind::LimitExceeded, "the documents of one batch hold more than 2 GiB")
        .hint("lower batch_bytes_max")
}
