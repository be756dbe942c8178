//! Builds an Arrow array from the values of a column.

use arrow_array::ArrayRef;

use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::Result;

use super::null_rows::NullRows;
use super::store::{Appended, Store};
use super::typed::Typed;
use super::{
    binary, bit, compressed, date, datetime, decimal, enumeration, float, geometry, inet, integer, json, set, text,
};
use super::{sent, time, timestamp, uuid, vector, year, Kind, Value};

/// The values of a column in the current batch.
#[derive(Debug)]
pub struct ColumnBuilder {
    store: Store,
    nulls: NullRows,
}

impl ColumnBuilder {
    /// Creates an empty column of the kind's Arrow type.
    pub fn new(kind: &Kind) -> ColumnBuilder {
        ColumnBuilder { store: Store::new(&kind.arrow_type()), nulls: NullRows::default() }
    }

    /// Appends a null.
    #[inline]
    pub fn append_null(&mut self) {
        self.nulls.push(self.store.len());
        self.store.push_empty();
    }

    /// Appends a value.
    ///
    /// If the Arrow type cannot represent the value, appends a null and returns `Some(text)` with the exact value.
    /// Raises `ValueMalformed` if the bytes are not a value of the kind, `SchemaMismatch` if the kind's Arrow type
    /// differs from the builder's, `LimitExceeded` above 2 GiB. After an error, nothing has been appended.
    #[inline]
    pub fn append(&mut self, kind: &Kind, value: Value<'_>) -> Result<Option<String>> {
        if value == Value::Null {
            self.append_null();
            return Ok(None);
        }
        let appended = append_value(&mut self.store, kind, &value);
        self.settle(appended)
    }

    /// Reads a value of a row image and appends it:
    ///
    /// `Kind::read` and `append` in one step. Returns and raises what they do. After an error, the cursor's position is
    /// undefined.
    #[inline(always)]
    pub fn append_from(&mut self, kind: &Kind, cursor: &mut Cursor<'_>) -> Result<Option<String>> {
        let appended = append_read(&mut self.store, kind, cursor);
        self.settle(appended)
    }

    /// Appends a value that a server sent in a text result set (see `sent`).
    ///
    /// `charset` is the column's character set. Returns and raises what `append` does.
    #[inline]
    pub fn append_sent(&mut self, kind: &Kind, charset: Charset, sent: &[u8]) -> Result<Option<String>> {
        let appended = sent::append(&mut self.store, kind, charset, sent);
        self.settle(appended)
    }

    #[inline(always)]
    fn settle(&mut self, appended: Appended) -> Appended {
        match appended {
            Ok(Some(text)) => {
                self.append_null();
                Ok(Some(text))
            }
            stored => stored,
        }
    }

    /// Number of values appended since the last `finish`.
    #[inline]
    pub fn len(&self) -> usize {
        self.store.len()
    }

    /// Whether no value was appended since the last `finish`.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory size of the values appended so far, in bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.store.bytes() + self.nulls.bytes()
    }

    /// Reserves memory before the first value of a batch. Without this call, the memory grows as values are appended.
    pub fn begin(&mut self) {
        self.store.begin();
    }

    /// Frees all memory of a builder that has no values.
    pub fn rest(&mut self) {
        self.store.rest();
    }

    /// Returns the values as an array and empties the builder.
    pub fn finish(&mut self) -> ArrayRef {
        let nulls = self.nulls.finish(self.store.len());
        self.store.finish(nulls)
    }
}

#[inline(always)]
fn append_read(store: &mut Store, kind: &Kind, cursor: &mut Cursor<'_>) -> Appended {
    match kind {
        Kind::Null => *store.nulls()? += 1,
        Kind::Integer { bytes, unsigned } => return integer::append_read(*bytes, *unsigned, cursor, store),
        Kind::Float => store.float32()?.push(float::read_single(cursor)?),
        Kind::Double => store.float64()?.push(float::read_double(cursor)?),
        Kind::Decimal { precision, scale } => {
            return decimal::append(&decimal::read(*precision, *scale, cursor)?, store);
        }
        Kind::Bit { bits } => return bit::append(bit::read(*bits, cursor)?, store),
        Kind::Year => return year::append(year::read(cursor)?, store.int16()?),
        Kind::Date => return date::append(date::read(cursor)?, store.date32()?),
        Kind::Time { fsp, layout } => time::append_read(*fsp, *layout, cursor, store.duration()?)?,
        Kind::DateTime { fsp, layout } => {
            return datetime::append_read(*fsp, *layout, cursor, store.timestamp()?);
        }
        Kind::Timestamp { fsp, layout } => {
            return timestamp::append(timestamp::read(*fsp, *layout, cursor)?, *fsp, store.timestamp()?);
        }
        Kind::Text { prefix, charset, .. } => {
            return text::append_read(*prefix, *charset, cursor, store.utf8()?);
        }
        Kind::Binary { prefix, form } => {
            return binary::append_read(*prefix, *form, cursor, store.binary()?);
        }
        Kind::CompressedText { prefix, charset, .. } => {
            return compressed::append_text(compressed::read(*prefix, cursor)?, *charset, store.utf8()?);
        }
        Kind::CompressedBinary { prefix, .. } => {
            return compressed::append_binary(compressed::read(*prefix, cursor)?, store.binary()?);
        }
        Kind::Enumeration { bytes, values } => {
            return enumeration::append(enumeration::read(*bytes, cursor)?, values, store.utf8()?);
        }
        Kind::Set { bytes, values } => return set::append(set::read(*bytes, cursor)?, values, store.utf8()?),
        Kind::Json { prefix } => return json::append(json::read(*prefix, cursor)?, store.utf8()?),
        Kind::Geometry { prefix } => {
            return binary::append_plain(geometry::read(*prefix, cursor)?, store.binary()?);
        }
        Kind::Vector { prefix, .. } => return vector::append(vector::read(*prefix, cursor)?, store.floats()?),
        Kind::Uuid => return uuid::append(&uuid::read(cursor)?, store.utf8()?),
        Kind::Inet4 => return inet::append4(&inet::read4(cursor)?, store.utf8()?),
        Kind::Inet6 => return inet::append6(&inet::read6(cursor)?, store.utf8()?),
    }
    Ok(None)
}

#[inline(never)]
fn append_value(store: &mut Store, kind: &Kind, value: &Value<'_>) -> Appended {
    match value.typed(kind)? {
        Typed::Null => *store.nulls()? += 1,
        Typed::Int(value) => return integer::append_signed(value, store),
        Typed::UInt(value) => return integer::append_unsigned(value, store),
        Typed::Float(value) => store.float32()?.push(value),
        Typed::Double(value) => store.float64()?.push(value),
        Typed::Decimal(value) => return decimal::append(value, store),
        Typed::Bit { value, .. } => return bit::append(value, store),
        Typed::Year(value) => return year::append(value, store.int16()?),
        Typed::Date(value) => return date::append(value, store.date32()?),
        Typed::Time { value, .. } => time::append(value, store.duration()?),
        Typed::DateTime { value, fsp } => return datetime::append(value, fsp, store.timestamp()?),
        Typed::Timestamp { value, fsp } => return timestamp::append(value, fsp, store.timestamp()?),
        Typed::Text { bytes, charset } => return text::append(bytes, charset, store.utf8()?),
        Typed::Bytes { bytes, form } => return binary::append(bytes, form, store.binary()?),
        Typed::CompressedText { bytes, charset } => return compressed::append_text(bytes, charset, store.utf8()?),
        Typed::CompressedBytes(bytes) => return compressed::append_binary(bytes, store.binary()?),
        Typed::Enumeration { index, members } => return enumeration::append(index, members, store.utf8()?),
        Typed::Set { bits, members } => return set::append(bits, members, store.utf8()?),
        Typed::Json(document) => return json::append(document, store.utf8()?),
        Typed::JsonText(text) => return text::append_plain(text, store.utf8()?),
        Typed::Geometry(bytes) => return binary::append_plain(bytes, store.binary()?),
        Typed::Vector(bytes) => return vector::append(bytes, store.floats()?),
        Typed::Uuid(bytes) => return uuid::append(bytes, store.utf8()?),
        Typed::Inet4(bytes) => return inet::append4(bytes, store.utf8()?),
        Typed::Inet6(bytes) => return inet::append6(bytes, store.utf8()?),
    }
    Ok(None)
}
