//! Hashes Arrow rows by value, so that rows on two systems can be compared without transferring them.
//!
//! The hash of a row depends on its values and the order of its columns, not on their representation: an integer has
//! the same hash in every width and as a decimal without fraction, a text in every Arrow layout, a timestamp in every
//! unit. 0.0 and -0.0 are equal, and so are all NaNs. Null is a distinct value.
//!
//! The hashes are computed with XXH3 and are the same on every machine. They are exchanged only between processes of
//! the same release and never stored.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Date32Type, Decimal128Type, Float32Type, Float64Type, Int16Type, Int32Type, Int64Type, Int8Type,
};
use arrow_array::types::{
    DurationMicrosecondType, Time64MicrosecondType, TimestampMicrosecondType, TimestampMillisecondType,
    TimestampNanosecondType, TimestampSecondType,
};
use arrow_array::{Array, ArrayRef, RecordBatch, UInt64Array};
use arrow_schema::{DataType, TimeUnit};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::{Error, ErrorKind, Result};

/// A tag added to a value's bytes, so that values of different kinds have different hashes.
#[derive(Clone, Copy)]
enum Nature {
    Null = 0,
    Number = 1,
    Float = 2,
    Text = 3,
    Bytes = 4,
    Day = 5,
    Moment = 6,
    Span = 7,
    List = 8,
}

/// The hash of a row before its first column.
const START: u64 = 0x5065_6e73_746f_636b;

/// Returns a hash of each row of `batch`, computed from the values of `columns` in the given order.
///
/// Raises `OptionInvalid` for a column that is missing from the batch, or for a type that table columns cannot have.
pub fn row_hashes(batch: &RecordBatch, columns: &[String]) -> Result<UInt64Array> {
    let mut hashes = vec![START; batch.num_rows()];
    for name in columns {
        let column = batch.column_by_name(name).ok_or_else(|| no_column(name, batch))?;
        add_column(column, &mut hashes).ok_or_else(|| unsupported_type(name, column.data_type()))?;
    }
    Ok(UInt64Array::from(hashes))
}

#[cold]
fn no_column(name: &str, batch: &RecordBatch) -> Error {
    let schema = batch.schema();
    let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    Error::new(ErrorKind::OptionInvalid, format!("the column `{name}` is not among the columns of the batch"))
        .hint(format!("name some of {}", names.join(", ")))
}

#[cold]
fn unsupported_type(name: &str, data_type: &DataType) -> Error {
    Error::new(
        ErrorKind::OptionInvalid,
        format!("rows cannot be compared by `{name}`: no table has a column of {data_type}"),
    )
    .hint("leave the column out, or read it in the types of docs/reference/types.md")
}

/// Adds a column's values to the hashes of their rows; None for an unsupported type.
fn add_column(column: &ArrayRef, hashes: &mut [u64]) -> Option<()> {
    match column.data_type() {
        DataType::Boolean => {
            let values = column.as_boolean_opt()?;
            fill(column, hashes, |row, hash| number(i128::from(values.value(row)), hash));
        }
        DataType::Int8 => numbers::<Int8Type>(column, hashes),
        DataType::Int16 => numbers::<Int16Type>(column, hashes),
        DataType::Int32 => numbers::<Int32Type>(column, hashes),
        DataType::Int64 => numbers::<Int64Type>(column, hashes),
        DataType::Decimal128(_, scale) => {
            let values = column.as_primitive_opt::<Decimal128Type>()?;
            fill(column, hashes, |row, hash| decimal(values.value(row), *scale, hash));
        }
        DataType::Float32 => {
            let values = column.as_primitive_opt::<Float32Type>()?;
            fill(column, hashes, |row, hash| float(f64::from(values.value(row)), hash));
        }
        DataType::Float64 => {
            let values = column.as_primitive_opt::<Float64Type>()?;
            fill(column, hashes, |row, hash| float(values.value(row), hash));
        }
        DataType::Date32 => {
            let values = column.as_primitive_opt::<Date32Type>()?;
            fill(column, hashes, |row, hash| fixed(Nature::Day, i128::from(values.value(row)), hash));
        }
        DataType::Timestamp(unit, _) => moments(column, *unit, hashes)?,
        DataType::Duration(TimeUnit::Microsecond) => {
            let values = column.as_primitive_opt::<DurationMicrosecondType>()?;
            fill(column, hashes, |row, hash| fixed(Nature::Span, i128::from(values.value(row)), hash));
        }
        DataType::Time64(TimeUnit::Microsecond) => {
            let values = column.as_primitive_opt::<Time64MicrosecondType>()?;
            fill(column, hashes, |row, hash| fixed(Nature::Span, i128::from(values.value(row)), hash));
        }
        _ => return add_bytes(column, hashes),
    }
    Some(())
}

/// Adds a column of variable-length values to the hashes of their rows.
fn add_bytes(column: &ArrayRef, hashes: &mut [u64]) -> Option<()> {
    match column.data_type() {
        DataType::Utf8 => {
            let values = column.as_string_opt::<i32>()?;
            fill(column, hashes, |row, hash| bytes(Nature::Text, values.value(row).as_bytes(), hash));
        }
        DataType::LargeUtf8 => {
            let values = column.as_string_opt::<i64>()?;
            fill(column, hashes, |row, hash| bytes(Nature::Text, values.value(row).as_bytes(), hash));
        }
        DataType::Utf8View => {
            let values = column.as_string_view_opt()?;
            fill(column, hashes, |row, hash| bytes(Nature::Text, values.value(row).as_bytes(), hash));
        }
        DataType::Binary => {
            let values = column.as_binary_opt::<i32>()?;
            fill(column, hashes, |row, hash| bytes(Nature::Bytes, values.value(row), hash));
        }
        DataType::LargeBinary => {
            let values = column.as_binary_opt::<i64>()?;
            fill(column, hashes, |row, hash| bytes(Nature::Bytes, values.value(row), hash));
        }
        DataType::BinaryView => {
            let values = column.as_binary_view_opt()?;
            fill(column, hashes, |row, hash| bytes(Nature::Bytes, values.value(row), hash));
        }
        DataType::FixedSizeBinary(_) => {
            let values = column.as_fixed_size_binary_opt()?;
            fill(column, hashes, |row, hash| bytes(Nature::Bytes, values.value(row), hash));
        }
        DataType::List(_) => {
            let values = column.as_list_opt::<i32>()?;
            return lists(column, &|row| values.value(row), hashes);
        }
        DataType::LargeList(_) => {
            let values = column.as_list_opt::<i64>()?;
            return lists(column, &|row| values.value(row), hashes);
        }
        _ => return None,
    }
    Some(())
}

/// Updates each row's hash with `add`, or with the tag of a null.
fn fill(column: &ArrayRef, hashes: &mut [u64], add: impl Fn(usize, u64) -> u64) {
    if column.null_count() == 0 {
        for (row, hash) in hashes.iter_mut().enumerate() {
            *hash = add(row, *hash);
        }
        return;
    }
    for (row, hash) in hashes.iter_mut().enumerate() {
        *hash = if column.is_null(row) { fixed(Nature::Null, 0, *hash) } else { add(row, *hash) };
    }
}

fn numbers<T: ArrowPrimitiveType>(column: &ArrayRef, hashes: &mut [u64])
where
    T::Native: Into<i128>,
{
    let values = column.as_primitive::<T>();
    fill(column, hashes, |row, hash| number(values.value(row).into(), hash));
}

fn moments(column: &ArrayRef, unit: TimeUnit, hashes: &mut [u64]) -> Option<()> {
    fn add<T: ArrowPrimitiveType<Native = i64>>(
        column: &ArrayRef,
        nanoseconds: i128,
        hashes: &mut [u64],
    ) -> Option<()> {
        let values = column.as_primitive_opt::<T>()?;
        fill(column, hashes, |row, hash| {
            fixed(Nature::Moment, i128::from(values.value(row)).wrapping_mul(nanoseconds), hash)
        });
        Some(())
    }
    match unit {
        TimeUnit::Second => add::<TimestampSecondType>(column, 1_000_000_000, hashes),
        TimeUnit::Millisecond => add::<TimestampMillisecondType>(column, 1_000_000, hashes),
        TimeUnit::Microsecond => add::<TimestampMicrosecondType>(column, 1_000, hashes),
        TimeUnit::Nanosecond => add::<TimestampNanosecondType>(column, 1, hashes),
    }
}

/// Adds the lengths and the elements of lists.
fn lists(column: &ArrayRef, elements: &dyn Fn(usize) -> ArrayRef, hashes: &mut [u64]) -> Option<()> {
    for (row, hash) in hashes.iter_mut().enumerate() {
        if column.is_null(row) {
            *hash = fixed(Nature::Null, 0, *hash);
            continue;
        }
        let elements = elements(row);
        let mut inner = vec![START; elements.len()];
        add_column(&elements, &mut inner)?;
        let start = fixed(Nature::List, i128::try_from(inner.len()).ok()?, *hash);
        *hash = inner.into_iter().fold(start, |hash, element| xxh3_64_with_seed(&element.to_le_bytes(), hash));
    }
    Some(())
}

fn number(value: i128, hash: u64) -> u64 {
    fixed(Nature::Number, value, hash)
}

/// Adds a decimal without trailing zeros in its fraction, so that a whole number has the hash of the integer.
fn decimal(mut value: i128, mut scale: i8, hash: u64) -> u64 {
    while scale > 0 && value % 10 == 0 {
        value /= 10;
        scale -= 1;
    }
    let unscaled_hash = fixed(Nature::Number, value, hash);
    if scale > 0 && value != 0 {
        return xxh3_64_with_seed(&scale.to_le_bytes(), unscaled_hash);
    }
    unscaled_hash
}

fn float(value: f64, hash: u64) -> u64 {
    let value = if value.is_nan() { f64::NAN } else { value + 0.0 };
    fixed(Nature::Float, i128::from(value.to_bits()), hash)
}

fn fixed(nature: Nature, value: i128, hash: u64) -> u64 {
    // The 16 bytes of the value, followed by a byte for its kind.
    let mut tagged_value = [nature as u8; 17];
    if let Some(value_bytes) = tagged_value.first_chunk_mut::<16>() {
        *value_bytes = value.to_le_bytes();
    }
    xxh3_64_with_seed(&tagged_value, hash)
}

fn bytes(nature: Nature, value: &[u8], hash: u64) -> u64 {
    xxh3_64_with_seed(value, hash ^ u64::from(nature as u8).rotate_left(56))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::types::Float32Type;
    use arrow_array::{
        BinaryArray, Decimal128Array, Float32Array, Float64Array, Int32Array, Int8Array, LargeStringArray, ListArray,
        NullArray, StringArray, StringViewArray,
    };
    use arrow_schema::{Field, Schema};

    use super::*;

    fn hashes(columns: Vec<ArrayRef>) -> Vec<u64> {
        let names: Vec<String> = (0..columns.len()).map(|number| format!("c{number}")).collect();
        let fields: Vec<Field> =
            columns.iter().zip(&names).map(|(array, name)| Field::new(name, array.data_type().clone(), true)).collect();
        let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap();
        row_hashes(&batch, &names).unwrap().values().to_vec()
    }

    fn decimals(values: Vec<i128>, precision: u8, scale: i8) -> ArrayRef {
        Arc::new(Decimal128Array::from(values).with_precision_and_scale(precision, scale).unwrap())
    }

    #[test]
    fn the_hash_does_not_depend_on_the_representation() {
        let narrow = hashes(vec![Arc::new(Int8Array::from(vec![Some(5), None, Some(-1), Some(0)]))]);
        let wide = hashes(vec![Arc::new(Int32Array::from(vec![Some(5), None, Some(-1), Some(0)]))]);
        assert_eq!(narrow, wide);
        assert_eq!(hashes(vec![decimals(vec![500, 0], 10, 2)]), [narrow[0], narrow[3]]);
        assert_ne!(hashes(vec![decimals(vec![501], 10, 2)]), hashes(vec![decimals(vec![501], 10, 1)]));
        assert_eq!(hashes(vec![decimals(vec![5010], 10, 3)]), hashes(vec![decimals(vec![501], 10, 2)]));
        let texts = hashes(vec![Arc::new(StringArray::from(vec!["weir", ""]))]);
        assert_eq!(hashes(vec![Arc::new(LargeStringArray::from(vec!["weir", ""]))]), texts);
        assert_eq!(hashes(vec![Arc::new(StringViewArray::from(vec!["weir", ""]))]), texts);
        assert_ne!(hashes(vec![Arc::new(BinaryArray::from(vec![&b"weir"[..], b""]))]), texts);
    }

    #[test]
    fn zeros_are_equal_and_nans_are_equal() {
        let doubles = hashes(vec![Arc::new(Float64Array::from(vec![0.0, -0.0, f64::NAN, -f64::NAN, 1.5]))]);
        assert_eq!(doubles[0], doubles[1]);
        assert_eq!(doubles[2], doubles[3]);
        assert_eq!(hashes(vec![Arc::new(Float32Array::from(vec![1.5]))]), [doubles[4]]);
    }

    #[test]
    fn the_hash_depends_on_the_column_of_a_value() {
        let left: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("ab"), Some("")]));
        let right: ArrayRef = Arc::new(StringArray::from(vec![None, Some("a"), Some(""), Some("ab")]));
        let rows = hashes(vec![left.clone(), right.clone()]);
        let distinct: std::collections::HashSet<u64> = rows.iter().copied().collect();
        assert_eq!(distinct.len(), rows.len());
        assert_eq!(hashes(vec![right, left])[0], rows[1]);
    }

    #[test]
    fn the_hash_of_lists_depends_on_elements_and_length() {
        let values = vec![Some(vec![Some(1.0), Some(2.0)]), Some(vec![Some(1.0)]), None, Some(vec![])];
        let lists = hashes(vec![Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(values))]);
        let distinct: std::collections::HashSet<u64> = lists.iter().copied().collect();
        assert_eq!(distinct.len(), 4);
    }

    #[test]
    fn unsupported_and_missing_columns_are_rejected_by_name() {
        let array: ArrayRef = Arc::new(NullArray::new(1));
        let schema = Schema::new(vec![Field::new("odd", array.data_type().clone(), true)]);
        let batch = RecordBatch::try_new(Arc::new(schema), vec![array]).unwrap();
        for name in ["odd", "absent"] {
            let error = row_hashes(&batch, &[name.to_owned()]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OptionInvalid);
            assert!(error.message().contains(name));
        }
    }
}
