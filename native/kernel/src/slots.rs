//! Slots of rows in Arrow columns, equal to the slots that `shard` computes for raw rows.
//!
//! The slots are equal for every type whose client text can be derived from the Arrow value: integers, YEAR, BIT,
//! DECIMAL, FLOAT, DOUBLE, strings, bytes and DATE. For times and timestamps, an Arrow column does not contain the
//! declared number of fractional digits. Their text here ends with the last digit that is not 0, so the slots are
//! guaranteed to be equal only for columns declared without fractional digits.

pub mod stream;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Date32Type, Decimal128Type, DurationMicrosecondType, Float32Type, Float64Type, Int16Type,
    Int32Type, Int64Type, Int8Type, TimestampMicrosecondType,
};
use arrow_array::{Array, ArrayRef, Int16Array, PrimitiveArray, RecordBatch};
use arrow_schema::{DataType, TimeUnit};

use crate::column::client_text;
use crate::error::{Error, ErrorKind, Result};
use crate::shard::{self, TextKey};

/// Appends the text of a row's value.
type WriteText<'a> = Box<dyn Fn(usize, &mut Vec<u8>) + 'a>;

/// A key column, classified by how its values contribute to the key.
enum Part<'a> {
    Number(Box<dyn Fn(usize) -> i64 + 'a>),
    /// BIGINT UNSIGNED: a number if it fits into 64 bits, otherwise text.
    Unsigned(&'a PrimitiveArray<Decimal128Type>),
    Text(WriteText<'a>),
    Bytes(Box<dyn Fn(usize) -> &'a [u8] + 'a>),
}

/// Returns the slot of each row of `batch`, computed from the values of `columns`.
///
/// The order of `columns` does not matter. Without columns, all rows have the slot of the table's name,
/// `database.table`. Raises `OptionInvalid` for a column that is missing from the batch, or whose type cannot be a key.
pub fn slots(batch: &RecordBatch, columns: &[String], table: &str) -> Result<Int16Array> {
    let rows = batch.num_rows();
    let mut indexes = Vec::with_capacity(columns.len());
    for name in columns {
        let index = batch.schema().index_of(name).map_err(|_| no_column(name, batch, table))?;
        indexes.push(index);
    }
    // Use the columns in table order, as for raw rows, instead of in the order of `columns`.
    indexes.sort_unstable();
    indexes.dedup();
    let keys: Vec<&ArrayRef> = indexes.iter().filter_map(|index| batch.columns().get(*index)).collect();
    let slots = match keys.as_slice() {
        [] => vec![shard::slot_of_text(table); rows],
        [key] => single_key_slots(key, rows).ok_or_else(|| no_key(columns, key.data_type()))?,
        keys => composite_key_slots(keys, rows, columns)?,
    };
    Ok(Int16Array::from(slots))
}

#[cold]
fn no_column(name: &str, batch: &RecordBatch, table: &str) -> Error {
    let schema = batch.schema();
    let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    let source = if table.is_empty() { "the batch" } else { table };
    Error::new(ErrorKind::OptionInvalid, format!("the shard column `{name}` is not among the columns of {source}"))
        .hint(format!("name some of {}, and read those columns", names.join(", ")))
}

#[cold]
fn no_key(columns: &[String], data_type: &DataType) -> Error {
    let names = columns.join("`, `");
    Error::new(ErrorKind::OptionInvalid, format!("`{names}` cannot decide a shard: {data_type} has no text"))
        .hint("shard by other columns")
}

fn single_key_slots(key: &ArrayRef, rows: usize) -> Option<Vec<i16>> {
    let null = shard::slot_of_number(0);
    let slots = |slot: &dyn Fn(usize) -> i16| {
        let mut out = Vec::with_capacity(rows);
        out.extend((0..rows).map(|row| if key.is_null(row) { null } else { slot(row) }));
        out
    };
    Some(match key_part(key)? {
        Part::Number(number) => slots(&|row| shard::slot_of_number(number(row))),
        Part::Unsigned(values) => slots(&|row| match u64::try_from(values.value(row)) {
            Ok(value) => shard::slot_of_number(i64::from_ne_bytes(value.to_ne_bytes())),
            Err(_) => shard::slot_of_text(&values.value(row).to_string()),
        }),
        Part::Bytes(bytes) => slots(&|row| {
            let mut key = TextKey::default();
            key.latin1(bytes(row));
            key.slot()
        }),
        Part::Text(text) => {
            let mut out = Vec::with_capacity(rows);
            let mut buffer = Vec::new();
            for row in 0..rows {
                if key.is_null(row) {
                    out.push(null);
                    continue;
                }
                let mut key = TextKey::default();
                add_text(&text, row, &mut buffer, &mut key);
                out.push(key.slot());
            }
            out
        }
    })
}

fn composite_key_slots(keys: &[&ArrayRef], rows: usize, columns: &[String]) -> Result<Vec<i16>> {
    let mut row_keys = vec![TextKey::default(); rows];
    let mut buffer = Vec::new();
    for key in keys {
        let part = key_part(key).ok_or_else(|| no_key(columns, key.data_type()))?;
        for (row, row_key) in row_keys.iter_mut().enumerate() {
            match &part {
                _ if key.is_null(row) => row_key.text("null"),
                Part::Number(number) => row_key.text(&number(row).to_string()),
                Part::Unsigned(values) => row_key.text(&values.value(row).to_string()),
                Part::Bytes(bytes) => row_key.latin1(bytes(row)),
                Part::Text(text) => add_text(text, row, &mut buffer, row_key),
            }
        }
    }
    Ok(row_keys.into_iter().map(TextKey::slot).collect())
}

fn add_text(text: &dyn Fn(usize, &mut Vec<u8>), row: usize, buffer: &mut Vec<u8>, key: &mut TextKey) {
    buffer.clear();
    text(row, buffer);
    // Arrow strings are UTF-8, and so are the texts of all other values.
    key.text(&String::from_utf8_lossy(buffer));
}

/// Classifies a column by how its values contribute to a key; None if the type cannot be a key.
fn key_part(key: &ArrayRef) -> Option<Part<'_>> {
    Some(match key.data_type() {
        DataType::Int8 => number_part::<Int8Type>(key),
        DataType::Int16 => number_part::<Int16Type>(key),
        DataType::Int32 => number_part::<Int32Type>(key),
        DataType::Int64 => number_part::<Int64Type>(key),
        DataType::Decimal128(20, 0) => Part::Unsigned(key.as_primitive_opt()?),
        DataType::Decimal128(_, _) => {
            let values = key.as_primitive_opt::<Decimal128Type>()?;
            Part::Text(Box::new(|row, out| out.extend_from_slice(values.value_as_string(row).as_bytes())))
        }
        DataType::Float32 => text_part::<Float32Type>(key, client_text::single),
        DataType::Float64 => text_part::<Float64Type>(key, client_text::double),
        DataType::Date32 => text_part::<Date32Type>(key, client_text::date),
        DataType::Duration(TimeUnit::Microsecond) => text_part::<DurationMicrosecondType>(key, client_text::time),
        DataType::Timestamp(TimeUnit::Microsecond, _) => {
            text_part::<TimestampMicrosecondType>(key, client_text::datetime)
        }
        DataType::Utf8 => {
            let values = key.as_string_opt::<i32>()?;
            Part::Text(Box::new(|row, out| out.extend_from_slice(values.value(row).as_bytes())))
        }
        DataType::LargeUtf8 => {
            let values = key.as_string_opt::<i64>()?;
            Part::Text(Box::new(|row, out| out.extend_from_slice(values.value(row).as_bytes())))
        }
        DataType::Binary => {
            let values = key.as_binary_opt::<i32>()?;
            Part::Bytes(Box::new(|row| values.value(row)))
        }
        DataType::LargeBinary => {
            let values = key.as_binary_opt::<i64>()?;
            Part::Bytes(Box::new(|row| values.value(row)))
        }
        _ => return None,
    })
}

fn number_part<T: ArrowPrimitiveType>(key: &ArrayRef) -> Part<'_>
where
    T::Native: Into<i64>,
{
    let values = key.as_primitive::<T>();
    Part::Number(Box::new(|row| values.value(row).into()))
}

fn text_part<T: ArrowPrimitiveType>(key: &ArrayRef, write: fn(T::Native, &mut Vec<u8>)) -> Part<'_> {
    let values = key.as_primitive::<T>();
    Part::Text(Box::new(move |row, out| write(values.value(row), out)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{BinaryArray, Date32Array, Decimal128Array, Float64Array, Int64Array, StringArray};
    use arrow_array::{TimestampMicrosecondArray, UInt8Array};
    use arrow_schema::{Field, Schema};

    use super::*;

    fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
        let fields: Vec<Field> =
            columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
        let arrays = columns.into_iter().map(|(_, array)| array).collect();
        RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap()
    }

    fn slots_of(columns: Vec<(&str, ArrayRef)>, keys: &[&str]) -> Result<Vec<i16>> {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        slots(&batch(columns), &keys, "shop.orders").map(|slots| slots.values().to_vec())
    }

    #[test]
    fn numbers_and_texts_have_the_slots_of_raw_rows() {
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![Some(42), None, Some(-1), Some(1_099_511_627_783)]));
        assert_eq!(slots_of(vec![("id", numbers)], &["id"]).unwrap(), [1003, 961, 961, 1224]);
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("abc"), None, Some("\u{7528}\u{6237}")]));
        assert_eq!(slots_of(vec![("name", texts)], &["name"]).unwrap(), [31812, 961, 5644]);
        let decimals = Decimal128Array::from(vec![1050]).with_precision_and_scale(10, 2).unwrap();
        assert_eq!(slots_of(vec![("price", Arc::new(decimals))], &["price"]).unwrap(), [3644]);
        let unsigned = Decimal128Array::from(vec![i128::from(u64::MAX), 42]).with_precision_and_scale(20, 0).unwrap();
        assert_eq!(slots_of(vec![("id", Arc::new(unsigned))], &["id"]).unwrap(), [961, 1003]);
        let bytes: ArrayRef = Arc::new(BinaryArray::from(vec![&b"abc"[..], b"\xe4"]));
        assert_eq!(slots_of(vec![("b", bytes)], &["b"]).unwrap(), [31812, shard::slot_of_text("\u{e4}")]);
    }

    #[test]
    fn slots_of_other_types_use_the_client_text() {
        let day: ArrayRef = Arc::new(Date32Array::from(vec![19_782]));
        assert_eq!(slots_of(vec![("d", day)], &["d"]).unwrap(), [shard::slot_of_text("2024-02-29")]);
        let moment: ArrayRef = Arc::new(TimestampMicrosecondArray::from(vec![1_000_000_000_000_000, -500_000]));
        let expected = ["2001-09-09 01:46:40", "1969-12-31 23:59:59.5"].map(shard::slot_of_text);
        assert_eq!(slots_of(vec![("t", moment)], &["t"]).unwrap(), expected);
        let doubles: ArrayRef = Arc::new(Float64Array::from(vec![1.5, 1e20]));
        assert_eq!(slots_of(vec![("f", doubles)], &["f"]).unwrap(), ["1.5", "1e20"].map(shard::slot_of_text));
    }

    #[test]
    fn composite_keys_use_the_order_of_the_table() {
        let ids: ArrayRef = Arc::new(Int64Array::from(vec![Some(12), None]));
        let names: ArrayRef = Arc::new(StringArray::from(vec![Some("ab"), Some("c")]));
        let columns = vec![("id", ids), ("name", names)];
        let expected = ["12ab", "nullc"].map(shard::slot_of_text);
        assert_eq!(slots_of(columns.clone(), &["id", "name"]).unwrap(), expected);
        assert_eq!(slots_of(columns.clone(), &["name", "id"]).unwrap(), expected);
        assert_eq!(slots_of(columns, &[]).unwrap(), [shard::slot_of_text("shop.orders"); 2]);
    }

    #[test]
    fn missing_columns_and_invalid_key_types_are_rejected_by_name() {
        let odd: ArrayRef = Arc::new(UInt8Array::from(vec![1]));
        for key in ["other", "odd"] {
            let error = slots_of(vec![("odd", odd.clone())], &[key]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OptionInvalid);
            assert!(error.message().contains(key));
        }
    }
}
