//! Reads the values of a batch's columns.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Decimal128Type, DurationMicrosecondType, Float32Type, Float64Type, Int16Type, Int32Type, Int64Type,
    Int8Type, TimestampMicrosecondType,
};
use arrow_array::{
    Array, BinaryArray, Date32Array, Decimal128Array, DurationMicrosecondArray, Float32Array, Float64Array, Int16Array,
    Int32Array, Int64Array, Int8Array, ListArray, MapArray, RecordBatch, StringArray, StructArray,
    TimestampMicrosecondArray,
};
use arrow_schema::{DataType, TimeUnit};

use crate::emit::system;
use crate::error::{Error, ErrorKind, Result};

const UNREPRESENTABLE: &str = "unrepresentable";

/// The array of a column, by its type.
enum Values<'a> {
    Int8(&'a Int8Array),
    Int16(&'a Int16Array),
    Int32(&'a Int32Array),
    Int64(&'a Int64Array),
    Decimal(&'a Decimal128Array, usize),
    Single(&'a Float32Array),
    Double(&'a Float64Array),
    Date(&'a Date32Array),
    Span(&'a DurationMicrosecondArray),
    Timestamp(&'a TimestampMicrosecondArray, bool),
    Text(&'a StringArray),
    Bytes(&'a BinaryArray),
    Vector(&'a ListArray),
    Null,
}

/// A value of a column.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cell<'a> {
    /// NULL.
    Null,
    /// A value that the Arrow type cannot represent, as text.
    Unrepresentable(&'a str),
    Int(i64),
    /// An unscaled number and the number of its decimal places.
    Decimal(i128, usize),
    Single(f32),
    Double(f64),
    /// Days since 1970-01-01.
    Date(i32),
    /// Microseconds.
    Span(i64),
    /// Microseconds since 1970-01-01 00:00:00, and whether they are in UTC.
    Timestamp(i64, bool),
    Text(&'a str),
    Bytes(&'a [u8]),
    Vector(&'a [f32]),
}

/// A column, and the texts of the values that its Arrow type cannot represent.
pub(super) struct Cells<'a> {
    name: &'a str,
    array: &'a dyn Array,
    values: Values<'a>,
    unrepresentable: Option<&'a MapArray>,
}

impl<'a> Cells<'a> {
    /// Finds a column by name. Raises `OptionInvalid` if it is missing or has an unsupported type.
    pub(super) fn find(batch: &'a RecordBatch, name: &str) -> Result<Cells<'a>> {
        let (index, field) = batch.schema_ref().column_with_name(name).ok_or_else(|| no_column(name))?;
        let array = batch.columns().get(index).ok_or_else(|| no_column(name))?;
        let values = typed_array(array).ok_or_else(|| {
            let data_type = field.data_type();
            Error::new(
                ErrorKind::OptionInvalid,
                format!("the column `{name}` is {data_type}, which no SQL type becomes"),
            )
        })?;
        let unrepresentable = if array.null_count() > 0 { unrepresentable_column(batch) } else { None };
        Ok(Cells { name: field.name(), array, values, unrepresentable })
    }

    /// Returns the value of a row.
    #[inline]
    pub(super) fn get(&self, row: usize) -> Cell<'a> {
        if self.array.is_null(row) {
            return self.unrepresentable_text(row).map_or(Cell::Null, Cell::Unrepresentable);
        }
        match &self.values {
            Values::Int8(array) => Cell::Int(array.value(row).into()),
            Values::Int16(array) => Cell::Int(array.value(row).into()),
            Values::Int32(array) => Cell::Int(array.value(row).into()),
            Values::Int64(array) => Cell::Int(array.value(row)),
            Values::Decimal(array, scale) => Cell::Decimal(array.value(row), *scale),
            Values::Single(array) => Cell::Single(array.value(row)),
            Values::Double(array) => Cell::Double(array.value(row)),
            Values::Date(array) => Cell::Date(array.value(row)),
            Values::Span(array) => Cell::Span(array.value(row)),
            Values::Timestamp(array, utc) => Cell::Timestamp(array.value(row), *utc),
            Values::Text(array) => Cell::Text(array.value(row)),
            Values::Bytes(array) => Cell::Bytes(array.value(row)),
            Values::Vector(array) => Cell::Vector(floats(array, row)),
            Values::Null => Cell::Null,
        }
    }

    fn unrepresentable_text(&self, row: usize) -> Option<&'a str> {
        let unrepresentable = self.unrepresentable?;
        if unrepresentable.is_null(row) {
            return None;
        }
        let offsets = unrepresentable.value_offsets();
        let first = usize::try_from(*offsets.get(row)?).ok()?;
        let end = usize::try_from(*offsets.get(row + 1)?).ok()?;
        let keys = unrepresentable.keys().as_string_opt::<i32>()?;
        let texts = unrepresentable.values().as_string_opt::<i32>()?;
        (first..end).find(|index| keys.value(*index) == self.name).map(|index| texts.value(index))
    }
}

#[cold]
fn no_column(name: &str) -> Error {
    Error::new(ErrorKind::OptionInvalid, format!("the batch has no column `{name}`"))
}

fn unrepresentable_column(batch: &RecordBatch) -> Option<&MapArray> {
    let metadata: &StructArray = batch.column_by_name(system::METADATA)?.as_struct_opt()?;
    let unrepresentable = metadata.column_by_name(UNREPRESENTABLE)?.as_map_opt()?;
    (unrepresentable.null_count() < unrepresentable.len()).then_some(unrepresentable)
}

fn floats(array: &ListArray, row: usize) -> &[f32] {
    let offsets = array.value_offsets();
    let offset = |row: usize| offsets.get(row).and_then(|offset| usize::try_from(*offset).ok());
    let values = array.values().as_primitive_opt::<Float32Type>().map(|values| values.values().as_ref());
    match (offset(row), offset(row + 1), values) {
        (Some(first), Some(end), Some(values)) => values.get(first..end).unwrap_or_default(),
        _ => &[],
    }
}

fn typed_array(array: &dyn Array) -> Option<Values<'_>> {
    Some(match array.data_type() {
        DataType::Int8 => Values::Int8(array.as_primitive_opt::<Int8Type>()?),
        DataType::Int16 => Values::Int16(array.as_primitive_opt::<Int16Type>()?),
        DataType::Int32 => Values::Int32(array.as_primitive_opt::<Int32Type>()?),
        DataType::Int64 => Values::Int64(array.as_primitive_opt::<Int64Type>()?),
        DataType::Decimal128(_, scale) => {
            Values::Decimal(array.as_primitive_opt::<Decimal128Type>()?, usize::try_from(*scale).ok()?)
        }
        DataType::Float32 => Values::Single(array.as_primitive_opt::<Float32Type>()?),
        DataType::Float64 => Values::Double(array.as_primitive_opt::<Float64Type>()?),
        DataType::Date32 => Values::Date(array.as_primitive_opt::<Date32Type>()?),
        DataType::Duration(TimeUnit::Microsecond) => Values::Span(array.as_primitive_opt::<DurationMicrosecondType>()?),
        DataType::Timestamp(TimeUnit::Microsecond, zone) => {
            Values::Timestamp(array.as_primitive_opt::<TimestampMicrosecondType>()?, zone.is_some())
        }
        DataType::Utf8 => Values::Text(array.as_string_opt::<i32>()?),
        DataType::Binary => Values::Bytes(array.as_binary_opt::<i32>()?),
        DataType::List(field) if *field.data_type() == DataType::Float32 => Values::Vector(array.as_list_opt::<i32>()?),
        DataType::Null => Values::Null,
        _ => return None,
    })
}
