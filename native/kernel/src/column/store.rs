//! The vectors that collect the values of an Arrow array. They become buffers without a copy, and their memory is
//! reused.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use arrow_array::types::{
    Date32Type, Decimal128Type, DurationMicrosecondType, Float32Type, Float64Type, Int16Type, Int32Type, Int64Type,
    Int8Type, TimestampMicrosecondType,
};
use arrow_array::{Array, ArrayRef, BinaryArray, ListArray, NullArray, PrimitiveArray, StringArray};
use arrow_buffer::{ArrowNativeType, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field};

use crate::error::{Error, ErrorKind, Result};

use super::spare::Spares;

/// The outcome of an append: `None` if the value was stored, its exact text if the Arrow type cannot represent it, or
/// an error if the value is invalid.
pub(super) type Appended = Result<Option<String>>;

/// Two buffers, because the caller still reads a batch while the next batch is built.
const SPARES_MAX: usize = 2;

/// Values of a fixed width, and the memory of earlier batches.
#[derive(Debug)]
pub(super) struct Values<T> {
    vector: Vec<T>,
    spares: Spares<T>,
}

impl<T: ArrowNativeType> Values<T> {
    pub(super) fn new() -> Values<T> {
        Values { vector: Vec::new(), spares: Spares::new(SPARES_MAX) }
    }

    fn begin(&mut self) {
        if self.vector.capacity() == 0 {
            self.vector = self.spares.take();
        }
    }

    fn rest(&mut self) {
        self.vector = Vec::new();
        self.spares.clear();
    }

    fn take(&mut self) -> ScalarBuffer<T> {
        ScalarBuffer::from(self.spares.lend(std::mem::take(&mut self.vector)))
    }
}

impl<T> Deref for Values<T> {
    type Target = Vec<T>;

    #[inline(always)]
    fn deref(&self) -> &Vec<T> {
        &self.vector
    }
}

impl<T> DerefMut for Values<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.vector
    }
}

/// Values of variable length: the end offset of each value, and the concatenated bytes.
#[derive(Debug)]
pub(super) struct Runs<T> {
    offsets: Values<i32>,
    /// The values. Writers must call `close` after each value.
    pub(super) items: Values<T>,
}

impl<T: ArrowNativeType> Runs<T> {
    pub(super) fn new() -> Runs<T> {
        let mut runs = Runs { offsets: Values::new(), items: Values::new() };
        runs.offsets.push(0);
        runs
    }

    /// Ends the value that was written last.
    ///
    /// If the batch would exceed the 2 GiB that Arrow's offsets allow, removes the value and raises `LimitExceeded`.
    #[inline(always)]
    pub(super) fn close(&mut self) -> Result<()> {
        match i32::try_from(self.items.len()) {
            Ok(end) => {
                self.offsets.push(end);
                Ok(())
            }
            Err(_) => Err(self.overflow()),
        }
    }

    #[cold]
    fn overflow(&mut self) -> Error {
        self.take_back();
        let message = "one column of one batch holds more than 2 GiB";
        Error::new(ErrorKind::LimitExceeded, message).hint("Lower batch_bytes_max.")
    }

    /// Removes what was written since the last `close`.
    pub(super) fn take_back(&mut self) {
        let end = self.offsets.last().and_then(|&end| usize::try_from(end).ok()).unwrap_or(0);
        self.items.truncate(end);
    }

    /// Appends an empty value.
    #[inline(always)]
    pub(super) fn close_empty(&mut self) {
        let end = self.offsets.last().copied().unwrap_or(0);
        self.offsets.push(end);
    }

    /// Reserves memory before the first value of a batch. The offsets always contain their leading 0.
    fn begin(&mut self) {
        if self.offsets.len() <= 1 {
            self.offsets.vector = self.offsets.spares.take();
            self.offsets.push(0);
            self.items.begin();
        }
    }

    fn rest(&mut self) {
        self.offsets.rest();
        self.offsets.push(0);
        self.items.rest();
    }

    fn take(&mut self) -> (OffsetBuffer<i32>, ScalarBuffer<T>) {
        let offsets = self.offsets.take();
        self.offsets.push(0);
        // The offsets start at 0 and never decrease, as `new` requires.
        (OffsetBuffer::new(offsets), self.items.take())
    }
}

/// Size of a block from which short values are copied.
pub(super) const BLOCK_BYTES: usize = 32;

impl Runs<u8> {
    /// Appends a value, with a block that starts with it if there are enough bytes. A short value is copied as a whole
    /// block, because a copy of constant size needs no call.
    #[inline(always)]
    pub(super) fn append(&mut self, value: &[u8], block: Option<&[u8; BLOCK_BYTES]>) -> Result<()> {
        match block {
            Some(block) if value.len() <= BLOCK_BYTES => {
                let end = self.items.len() + value.len();
                self.items.extend_from_slice(block);
                self.items.truncate(end);
            }
            _ => self.items.extend_from_slice(value),
        }
        self.close()
    }
}

/// The values of a column, null or not, in the layout of its Arrow type.
#[derive(Debug)]
pub(super) enum Store {
    Null(usize),
    Int8(Values<i8>),
    Int16(Values<i16>),
    Int32(Values<i32>),
    Int64(Values<i64>),
    Decimal128 { values: Values<i128>, precision: u8, scale: i8 },
    Float32(Values<f32>),
    Float64(Values<f64>),
    Date32(Values<i32>),
    Duration(Values<i64>),
    Timestamp { values: Values<i64>, zone: Option<Arc<str>> },
    Utf8(Runs<u8>),
    Binary(Runs<u8>),
    Floats(Runs<f32>),
}

impl Store {
    /// Creates an empty store for a type that `Kind::arrow_type` returns.
    pub(super) fn new(data_type: &DataType) -> Store {
        match data_type {
            DataType::Null => Store::Null(0),
            DataType::Int8 => Store::Int8(Values::new()),
            DataType::Int16 => Store::Int16(Values::new()),
            DataType::Int32 => Store::Int32(Values::new()),
            DataType::Int64 => Store::Int64(Values::new()),
            DataType::Decimal128(precision, scale) => {
                Store::Decimal128 { values: Values::new(), precision: *precision, scale: *scale }
            }
            DataType::Float32 => Store::Float32(Values::new()),
            DataType::Float64 => Store::Float64(Values::new()),
            DataType::Date32 => Store::Date32(Values::new()),
            DataType::Duration(_) => Store::Duration(Values::new()),
            DataType::Timestamp(_, zone) => Store::Timestamp { values: Values::new(), zone: zone.clone() },
            DataType::Binary => Store::Binary(Runs::new()),
            DataType::List(_) => Store::Floats(Runs::new()),
            _ => Store::Utf8(Runs::new()),
        }
    }

    /// Appends a placeholder value for a null.
    #[inline]
    pub(super) fn push_empty(&mut self) {
        match self {
            Store::Null(rows) => *rows += 1,
            Store::Int8(values) => values.push(0),
            Store::Int16(values) => values.push(0),
            Store::Int32(values) | Store::Date32(values) => values.push(0),
            Store::Int64(values) | Store::Duration(values) | Store::Timestamp { values, .. } => values.push(0),
            Store::Decimal128 { values, .. } => values.push(0),
            Store::Float32(values) => values.push(0.0),
            Store::Float64(values) => values.push(0.0),
            Store::Utf8(runs) | Store::Binary(runs) => runs.close_empty(),
            Store::Floats(runs) => runs.close_empty(),
        }
    }

    /// Number of values.
    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Store::Null(rows) => *rows,
            Store::Int8(values) => values.len(),
            Store::Int16(values) => values.len(),
            Store::Int32(values) | Store::Date32(values) => values.len(),
            Store::Int64(values) | Store::Duration(values) | Store::Timestamp { values, .. } => values.len(),
            Store::Decimal128 { values, .. } => values.len(),
            Store::Float32(values) => values.len(),
            Store::Float64(values) => values.len(),
            Store::Utf8(runs) | Store::Binary(runs) => runs.offsets.len() - 1,
            Store::Floats(runs) => runs.offsets.len() - 1,
        }
    }

    /// Memory size in bytes, without the null rows.
    #[inline]
    pub(super) fn bytes(&self) -> usize {
        match self {
            Store::Null(_) => 0,
            Store::Int8(values) => values.len(),
            Store::Int16(values) => values.len() * 2,
            Store::Int32(values) | Store::Date32(values) => values.len() * 4,
            Store::Int64(values) | Store::Duration(values) | Store::Timestamp { values, .. } => values.len() * 8,
            Store::Decimal128 { values, .. } => values.len() * 16,
            Store::Float32(values) => values.len() * 4,
            Store::Float64(values) => values.len() * 8,
            Store::Utf8(runs) | Store::Binary(runs) => runs.items.len() + runs.offsets.len() * 4,
            Store::Floats(runs) => (runs.items.len() + runs.offsets.len()) * 4,
        }
    }

    /// Reserves memory before the first value of a batch. Reuses the memory of an earlier batch that has no readers
    /// left, or allocates as much as the last batch used.
    pub(super) fn begin(&mut self) {
        match self {
            Store::Null(_) => {}
            Store::Int8(values) => values.begin(),
            Store::Int16(values) => values.begin(),
            Store::Int32(values) | Store::Date32(values) => values.begin(),
            Store::Int64(values) | Store::Duration(values) | Store::Timestamp { values, .. } => values.begin(),
            Store::Decimal128 { values, .. } => values.begin(),
            Store::Float32(values) => values.begin(),
            Store::Float64(values) => values.begin(),
            Store::Utf8(runs) | Store::Binary(runs) => runs.begin(),
            Store::Floats(runs) => runs.begin(),
        }
    }

    /// Frees all memory, if no value arrived between two batches.
    pub(super) fn rest(&mut self) {
        match self {
            Store::Null(_) => {}
            Store::Int8(values) => values.rest(),
            Store::Int16(values) => values.rest(),
            Store::Int32(values) | Store::Date32(values) => values.rest(),
            Store::Int64(values) | Store::Duration(values) | Store::Timestamp { values, .. } => values.rest(),
            Store::Decimal128 { values, .. } => values.rest(),
            Store::Float32(values) => values.rest(),
            Store::Float64(values) => values.rest(),
            Store::Utf8(runs) | Store::Binary(runs) => runs.rest(),
            Store::Floats(runs) => runs.rest(),
        }
    }

    /// Returns the values as an array and empties the store.
    pub(super) fn finish(&mut self, nulls: Option<NullBuffer>) -> ArrayRef {
        match self {
            Store::Null(rows) => Arc::new(NullArray::new(std::mem::take(rows))),
            Store::Int8(values) => Arc::new(PrimitiveArray::<Int8Type>::new(values.take(), nulls)),
            Store::Int16(values) => Arc::new(PrimitiveArray::<Int16Type>::new(values.take(), nulls)),
            Store::Int32(values) => Arc::new(PrimitiveArray::<Int32Type>::new(values.take(), nulls)),
            Store::Int64(values) => Arc::new(PrimitiveArray::<Int64Type>::new(values.take(), nulls)),
            Store::Decimal128 { values, precision, scale } => {
                let array = PrimitiveArray::<Decimal128Type>::new(values.take(), nulls);
                Arc::new(array.with_data_type(DataType::Decimal128(*precision, *scale)))
            }
            Store::Float32(values) => Arc::new(PrimitiveArray::<Float32Type>::new(values.take(), nulls)),
            Store::Float64(values) => Arc::new(PrimitiveArray::<Float64Type>::new(values.take(), nulls)),
            Store::Date32(values) => Arc::new(PrimitiveArray::<Date32Type>::new(values.take(), nulls)),
            Store::Duration(values) => Arc::new(PrimitiveArray::<DurationMicrosecondType>::new(values.take(), nulls)),
            Store::Timestamp { values, zone } => {
                let array = PrimitiveArray::<TimestampMicrosecondType>::new(values.take(), nulls);
                Arc::new(array.with_timezone_opt(zone.clone()))
            }
            Store::Utf8(runs) => string_array(runs, nulls),
            Store::Binary(runs) => {
                let (offsets, items) = runs.take();
                Arc::new(BinaryArray::new(offsets, items.into_inner(), nulls))
            }
            Store::Floats(runs) => {
                let (offsets, items) = runs.take();
                let items: ArrayRef = Arc::new(PrimitiveArray::<Float32Type>::new(items, None));
                let field = Arc::new(Field::new_list_field(items.data_type().clone(), true));
                Arc::new(ListArray::new(field, offsets, items, nulls))
            }
        }
    }
}

/// Accesses the values by layout. Raises `SchemaMismatch` if the column has a different layout.
impl Store {
    #[inline(always)]
    pub(super) fn nulls(&mut self) -> Result<&mut usize> {
        let Store::Null(rows) = self else { return Err(misplaced()) };
        Ok(rows)
    }

    #[inline(always)]
    pub(super) fn int16(&mut self) -> Result<&mut Values<i16>> {
        let Store::Int16(values) = self else { return Err(misplaced()) };
        Ok(values)
    }

    #[inline(always)]
    pub(super) fn float32(&mut self) -> Result<&mut Values<f32>> {
        let Store::Float32(values) = self else { return Err(misplaced()) };
        Ok(values)
    }

    #[inline(always)]
    pub(super) fn float64(&mut self) -> Result<&mut Values<f64>> {
        let Store::Float64(values) = self else { return Err(misplaced()) };
        Ok(values)
    }

    #[inline(always)]
    pub(super) fn date32(&mut self) -> Result<&mut Values<i32>> {
        let Store::Date32(values) = self else { return Err(misplaced()) };
        Ok(values)
    }

    #[inline(always)]
    pub(super) fn duration(&mut self) -> Result<&mut Values<i64>> {
        let Store::Duration(values) = self else { return Err(misplaced()) };
        Ok(values)
    }

    #[inline(always)]
    pub(super) fn timestamp(&mut self) -> Result<&mut Values<i64>> {
        let Store::Timestamp { values, .. } = self else { return Err(misplaced()) };
        Ok(values)
    }

    #[inline(always)]
    pub(super) fn utf8(&mut self) -> Result<&mut Runs<u8>> {
        let Store::Utf8(runs) = self else { return Err(misplaced()) };
        Ok(runs)
    }

    #[inline(always)]
    pub(super) fn binary(&mut self) -> Result<&mut Runs<u8>> {
        let Store::Binary(runs) = self else { return Err(misplaced()) };
        Ok(runs)
    }

    #[inline(always)]
    pub(super) fn floats(&mut self) -> Result<&mut Runs<f32>> {
        let Store::Floats(runs) = self else { return Err(misplaced()) };
        Ok(runs)
    }
}

/// Returns the error for a value whose column was built for another type.
#[cold]
fn misplaced() -> Error {
    Error::new(ErrorKind::SchemaMismatch, "a value of another type than the Arrow column it is for")
}

/// Builds a string array from bytes that each append has validated.
#[allow(unsafe_code)]
fn string_array(runs: &mut Runs<u8>, nulls: Option<NullBuffer>) -> ArrayRef {
    let (offsets, items) = runs.take();
    // SAFETY: a `Store::Utf8` is filled only by the `append` functions of the types. Each of them closes a value only
    // after writing complete UTF-8: `Charset::decode_into` validates its input, ENUM and SET members are `str`s, JSON
    // is built from validated strings and ASCII, and rejected values are removed. So every offset is at a character
    // boundary of valid text.
    Arc::new(unsafe { StringArray::new_unchecked(offsets, items.into_inner(), nulls) })
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;

    use super::*;

    #[test]
    fn texts_are_valid_after_rejected_values_and_in_reused_memory() {
        // Texts of several pages, so that the pool lends the memory.
        let long = "é漢".repeat(4_000);
        let texts = ["", "é", "漢字", &long, "\u{10ffff}"];
        let mut store = Store::new(&DataType::Utf8);
        let mut read: Option<ArrayRef> = None;
        for _ in 0..4 {
            store.begin();
            for text in texts {
                let runs = store.utf8().unwrap();
                runs.items.extend_from_slice(b"\xc3\xff");
                runs.take_back();
                runs.items.extend_from_slice(text.as_bytes());
                runs.close().unwrap();
                store.push_empty();
            }
            let nulls = NullBuffer::from_iter((0..2 * texts.len()).map(|row| row % 2 == 0));
            let array = store.finish(Some(nulls));
            // The previous batch is still read while this one is built.
            for array in read.iter().chain([&array]) {
                array.to_data().validate_full().unwrap();
                let values: Vec<_> = array.as_string::<i32>().iter().flatten().collect();
                assert_eq!(values, texts);
            }
            read = Some(array);
        }
    }
}
