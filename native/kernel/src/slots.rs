//! Slots of rows that are Arrow columns already: the numbers that `shard` gives to raw rows.
//!
//! They agree for every type of which Arrow keeps the client's text: integers, YEAR, BIT, DECIMAL, FLOAT, DOUBLE, all
//! strings and bytes, DATE. A column of Arrow does not tell how many digits its fractions of a second have: the text of
//! such a value ends with its last digit that is not 0, so it agrees with that of a column without fractions.

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

/// Adds the text of the value in a row.
type WriteText<'a> = Box<dyn Fn(usize, &mut Vec<u8>) + 'a>;

/// One column of a key, and how its values become a part of it.
enum Part<'a> {
    Number(Box<dyn Fn(usize) -> i64 + 'a>),
    /// A number where it fits into 64 bits, else its text; BIGINT UNSIGNED.
    Unsigned(&'a PrimitiveArray<Decimal128Type>),
    Text(WriteText<'a>),
    Bytes(Box<dyn Fn(usize) -> &'a [u8] + 'a>),
}

/// The slot of each row of `batch`, by the values of `columns`, which may be named in any order. Without columns all
/// rows of a table share the slot of its name, `database.table`.
///
/// Raises `OptionInvalid` for a column that the batch lacks, and for one of a type that can be no key.
pub fn slots(batch: &RecordBatch, columns: &[String], table: &str) -> Result<Int16Array> {
    let rows = batch.num_rows();
    let mut places = Vec::with_capacity(columns.len());
    for name in columns {
        let place = batch.schema().index_of(name).map_err(|_| no_column(name, batch, table))?;
        places.push(place);
    }
    // As in raw rows, the table's order decides and not the one in which they are named.
    places.sort_unstable();
    places.dedup();
    let keys: Vec<&ArrayRef> = places.iter().filter_map(|place| batch.columns().get(*place)).collect();
    let slots = match keys.as_slice() {
        [] => vec![shard::slot_of_text(table); rows],
        [key] => single(key, rows).ok_or_else(|| no_key(columns, key.data_type()))?,
        keys => several(keys, rows, columns)?,
    };
    Ok(Int16Array::from(slots))
}

#[cold]
fn no_column(name: &str, batch: &RecordBatch, table: &str) -> Error {
    let schema = batch.schema();
    let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    let place = if table.is_empty() { "the batch" } else { table };
    Error::new(ErrorKind::OptionInvalid, format!("the shard column `{name}` is not among the columns of {place}"))
        .hint(format!("name some of {}, and read those columns", names.join(", ")))
}

#[cold]
fn no_key(columns: &[String], found: &DataType) -> Error {
    let names = columns.join("`, `");
    Error::new(ErrorKind::OptionInvalid, format!("`{names}` cannot decide a shard: {found} has no text"))
        .hint("shard by other columns")
}

fn single(key: &ArrayRef, rows: usize) -> Option<Vec<i16>> {
    let null = shard::slot_of_number(0);
    let slots = |slot: &dyn Fn(usize) -> i16| {
        let mut out = Vec::with_capacity(rows);
        out.extend((0..rows).map(|row| if key.is_null(row) { null } else { slot(row) }));
        out
    };
    Some(match part(key)? {
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
            let mut shown = Vec::new();
            for row in 0..rows {
                if key.is_null(row) {
                    out.push(null);
                    continue;
                }
                let mut key = TextKey::default();
                add_text(&text, row, &mut shown, &mut key);
                out.push(key.slot());
            }
            out
        }
    })
}

fn several(keys: &[&ArrayRef], rows: usize, columns: &[String]) -> Result<Vec<i16>> {
    let mut made = vec![TextKey::default(); rows];
    let mut shown = Vec::new();
    for key in keys {
        let part = part(key).ok_or_else(|| no_key(columns, key.data_type()))?;
        for (row, made) in made.iter_mut().enumerate() {
            match &part {
                _ if key.is_null(row) => made.text("null"),
                Part::Number(number) => made.text(&number(row).to_string()),
                Part::Unsigned(values) => made.text(&values.value(row).to_string()),
                Part::Bytes(bytes) => made.latin1(bytes(row)),
                Part::Text(text) => add_text(text, row, &mut shown, made),
            }
        }
    }
    Ok(made.into_iter().map(TextKey::slot).collect())
}

fn add_text(text: &dyn Fn(usize, &mut Vec<u8>), row: usize, shown: &mut Vec<u8>, key: &mut TextKey) {
    shown.clear();
    text(row, shown);
    // Arrow's strings are UTF-8, and so are the texts of all other values.
    key.text(&String::from_utf8_lossy(shown));
}

/// How the values of a column become a part of a key; None for a type that can be none.
fn part(key: &ArrayRef) -> Option<Part<'_>> {
    Some(match key.data_type() {
        DataType::Int8 => number::<Int8Type>(key),
        DataType::Int16 => number::<Int16Type>(key),
        DataType::Int32 => number::<Int32Type>(key),
        DataType::Int64 => number::<Int64Type>(key),
        DataType::Decimal128(20, 0) => Part::Unsigned(key.as_primitive_opt()?),
        DataType::Decimal128(_, _) => {
            let values = key.as_primitive_opt::<Decimal128Type>()?;
            Part::Text(Box::new(|row, out| out.extend_from_slice(values.value_as_string(row).as_bytes())))
        }
        DataType::Float32 => text::<Float32Type>(key, client_text::single),
        DataType::Float64 => text::<Float64Type>(key, client_text::double),
        DataType::Date32 => text::<Date32Type>(key, client_text::date),
        DataType::Duration(TimeUnit::Microsecond) => text::<DurationMicrosecondType>(key, client_text::time),
        DataType::Timestamp(TimeUnit::Microsecond, _) => text::<TimestampMicrosecondType>(key, client_text::datetime),
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

fn number<T: ArrowPrimitiveType>(key: &ArrayRef) -> Part<'_>
where
    T::Native: Into<i64>,
{
    let values = key.as_primitive::<T>();
    Part::Number(Box::new(|row| values.value(row).into()))
}

fn text<T: ArrowPrimitiveType>(key: &ArrayRef, write: fn(T::Native, &mut Vec<u8>)) -> Part<'_> {
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
    fn one_number_and_one_text_fall_where_raw_rows_do() {
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
    fn other_types_fall_by_their_text() {
        let day: ArrayRef = Arc::new(Date32Array::from(vec![19_782]));
        assert_eq!(slots_of(vec![("d", day)], &["d"]).unwrap(), [shard::slot_of_text("2024-02-29")]);
        let moment: ArrayRef = Arc::new(TimestampMicrosecondArray::from(vec![1_000_000_000_000_000, -500_000]));
        let expected = ["2001-09-09 01:46:40", "1969-12-31 23:59:59.5"].map(shard::slot_of_text);
        assert_eq!(slots_of(vec![("t", moment)], &["t"]).unwrap(), expected);
        let doubles: ArrayRef = Arc::new(Float64Array::from(vec![1.5, 1e20]));
        assert_eq!(slots_of(vec![("f", doubles)], &["f"]).unwrap(), ["1.5", "1e20"].map(shard::slot_of_text));
    }

    #[test]
    fn several_columns_stand_in_the_order_of_the_table() {
        let ids: ArrayRef = Arc::new(Int64Array::from(vec![Some(12), None]));
        let names: ArrayRef = Arc::new(StringArray::from(vec![Some("ab"), Some("c")]));
        let columns = vec![("id", ids), ("name", names)];
        let expected = ["12ab", "nullc"].map(shard::slot_of_text);
        assert_eq!(slots_of(columns.clone(), &["id", "name"]).unwrap(), expected);
        assert_eq!(slots_of(columns.clone(), &["name", "id"]).unwrap(), expected);
        assert_eq!(slots_of(columns, &[]).unwrap(), [shard::slot_of_text("shop.orders"); 2]);
    }

    #[test]
    fn a_column_that_is_not_there_or_no_key_is_refused_by_name() {
        let odd: ArrayRef = Arc::new(UInt8Array::from(vec![1]));
        for key in ["other", "odd"] {
            let error = slots_of(vec![("odd", odd.clone())], &[key]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OptionInvalid);
            assert!(error.message().contains(key));
        }
    }
}
