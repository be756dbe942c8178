//! Gathers the values of one column into an Arrow array.

use arrow_array::ArrayRef;
use arrow_buffer::NullBufferBuilder;

use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::Result;

use super::kind::misplaced;
use super::store::{Appended, Store};
use super::{binary, bit, compressed, date, datetime, decimal, enumeration, float, inet, integer, json, set, text};
use super::{sent, time, timestamp, uuid, vector, year, Kind, Value};

/// The values of one column of the batch in the making.
#[derive(Debug)]
pub struct ColumnBuilder {
    store: Store,
    nulls: NullBufferBuilder,
}

impl ColumnBuilder {
    /// An empty column of the kind's Arrow type.
    pub fn new(kind: &Kind) -> ColumnBuilder {
        ColumnBuilder { store: Store::new(&kind.arrow_type()), nulls: NullBufferBuilder::new(0) }
    }

    /// Adds a null.
    #[inline]
    pub fn append_null(&mut self) {
        self.store.push_empty();
        self.nulls.append_null();
    }

    /// Adds one value.
    ///
    /// Gives `Some(text)` where the Arrow type cannot hold it: a null was added, and the text is the value exactly.
    /// Raises `ValueMalformed` where the bytes are no value of the kind, `SchemaMismatch` where the kind's Arrow type
    /// is not the one this builder was made for, `LimitExceeded` past 2 GiB; nothing was added then.
    #[inline]
    pub fn append(&mut self, kind: &Kind, value: Value<'_>) -> Result<Option<String>> {
        if value == Value::Null {
            self.append_null();
            return Ok(None);
        }
        let appended = append_value(&mut self.store, kind, value);
        self.settle(appended)
    }

    /// Reads one value of a row image and adds it: `Kind::read` and `append` in one step.
    ///
    /// Gives and raises what the two do; after an error the cursor may stand anywhere.
    #[inline]
    pub fn append_from(&mut self, kind: &Kind, cursor: &mut Cursor<'_>) -> Result<Option<String>> {
        let appended = append_read(&mut self.store, kind, cursor);
        self.settle(appended)
    }

    /// Adds one value as a server sends it in a text result set; see `sent`. `charset` is the column's.
    ///
    /// Gives and raises what `append` does.
    #[inline]
    pub fn append_sent(&mut self, kind: &Kind, charset: Charset, sent: &[u8]) -> Result<Option<String>> {
        let appended = sent::append(&mut self.store, kind, charset, sent);
        self.settle(appended)
    }

    #[inline(always)]
    fn settle(&mut self, appended: Appended) -> Appended {
        match appended {
            Ok(None) => {
                self.nulls.append_non_null();
                Ok(None)
            }
            Ok(Some(text)) => {
                self.append_null();
                Ok(Some(text))
            }
            Err(error) => Err(error),
        }
    }

    /// How many values were added since the last `finish`.
    #[inline]
    pub fn len(&self) -> usize {
        self.nulls.len()
    }

    /// Whether no value was added since the last `finish`.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How much memory the values added so far take, in bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.store.bytes() + self.nulls.len() / 8
    }

    /// Gets room for the first value of a batch; without it, room grows as values come.
    pub fn begin(&mut self) {
        self.store.begin();
    }

    /// Gives all memory back, of a builder without values.
    pub fn rest(&mut self) {
        self.store.rest();
    }

    /// Hands the values over as an array and starts again.
    pub fn finish(&mut self) -> ArrayRef {
        let nulls = self.nulls.finish();
        self.store.finish(nulls)
    }
}

#[inline(always)]
fn append_read(store: &mut Store, kind: &Kind, cursor: &mut Cursor<'_>) -> Appended {
    match (kind, store) {
        (Kind::Integer { bytes, unsigned }, store) => integer::append_read(*bytes, *unsigned, cursor, store),
        (Kind::Float, Store::Float32(values)) => {
            values.push(float::read_single(cursor)?);
            Ok(None)
        }
        (Kind::Double, Store::Float64(values)) => {
            values.push(float::read_double(cursor)?);
            Ok(None)
        }
        (Kind::Decimal { precision, scale }, store) => {
            decimal::append(&decimal::read(*precision, *scale, cursor)?, store)
        }
        (Kind::Date, Store::Date32(values)) => date::append(date::read(cursor)?, values),
        (Kind::DateTime { fsp, layout }, Store::Timestamp { values, .. }) => {
            datetime::append_read(*fsp, *layout, cursor, values)
        }
        (Kind::Timestamp { fsp, layout }, Store::Timestamp { values, .. }) => {
            timestamp::append(timestamp::read(*fsp, *layout, cursor)?, *fsp, values)
        }
        (Kind::Text { prefix, charset, .. }, Store::Utf8(runs)) => {
            text::append(text::read(*prefix, cursor)?, *charset, runs)
        }
        (Kind::Binary { prefix, form }, Store::Binary(runs)) => {
            binary::append(binary::read(*prefix, *form, cursor)?, *form, runs)
        }
        (Kind::Json { prefix }, Store::Utf8(runs)) => json::append(json::read(*prefix, cursor)?, runs),
        (Kind::Enumeration { bytes, values }, Store::Utf8(runs)) => {
            enumeration::append(enumeration::read(*bytes, cursor)?, values, runs)
        }
        (Kind::Set { bytes, values }, Store::Utf8(runs)) => set::append(set::read(*bytes, cursor)?, values, runs),
        (Kind::Time { fsp, layout }, Store::Duration(values)) => {
            time::append_read(*fsp, *layout, cursor, values)?;
            Ok(None)
        }
        (Kind::Year, Store::Int16(values)) => year::append(year::read(cursor)?, values),
        (Kind::Bit { bits }, store) => bit::append(bit::read(*bits, cursor)?, store),
        (kind, store) => {
            let value = kind.read(cursor)?;
            append_value(store, kind, value)
        }
    }
}

#[inline(never)]
fn append_value(store: &mut Store, kind: &Kind, value: Value<'_>) -> Appended {
    match (value, kind, store) {
        (Value::Null, _, Store::Null(rows)) => *rows += 1,
        (Value::Int(value), _, store) => return integer::append_signed(value, store),
        (Value::UInt(value), _, store) => return integer::append_unsigned(value, store),
        (Value::Float(value), _, Store::Float32(values)) => values.push(value),
        (Value::Double(value), _, Store::Float64(values)) => values.push(value),
        (Value::Decimal(value), _, store) => return decimal::append(&value, store),
        (Value::Bit(value), _, store) => return bit::append(value, store),
        (Value::Year(value), _, Store::Int16(values)) => return year::append(value, values),
        (Value::Date(value), _, Store::Date32(values)) => return date::append(value, values),
        (Value::DateTime(value), Kind::DateTime { fsp, .. }, Store::Timestamp { values, .. }) => {
            return datetime::append(value, *fsp, values);
        }
        (Value::Timestamp(value), Kind::Timestamp { fsp, .. }, Store::Timestamp { values, .. }) => {
            return timestamp::append(value, *fsp, values);
        }
        (Value::Time(value), _, Store::Duration(values)) => time::append(value, values),
        (Value::Text(bytes), Kind::Text { charset, .. }, Store::Utf8(runs)) => {
            return text::append(bytes, *charset, runs);
        }
        (Value::Bytes(bytes), Kind::Binary { form, .. }, Store::Binary(runs)) => {
            return binary::append(bytes, *form, runs);
        }
        (Value::Compressed(bytes), Kind::CompressedText { charset, .. }, Store::Utf8(runs)) => {
            return compressed::append_text(bytes, *charset, runs);
        }
        (Value::Compressed(bytes), Kind::CompressedBinary { .. }, Store::Binary(runs)) => {
            return compressed::append_binary(bytes, runs);
        }
        (Value::Enumeration(index), Kind::Enumeration { values, .. }, Store::Utf8(runs)) => {
            return enumeration::append(index, values, runs);
        }
        (Value::Set(bits), Kind::Set { values, .. }, Store::Utf8(runs)) => return set::append(bits, values, runs),
        (Value::Json(document), _, Store::Utf8(runs)) => return json::append(document, runs),
        (Value::JsonText(text), _, Store::Utf8(runs)) => return text::append_plain(&text, runs),
        (Value::Geometry(bytes), _, Store::Binary(runs)) => return binary::append_plain(bytes, runs),
        (Value::Vector(bytes), _, Store::Floats(runs)) => return vector::append(bytes, runs),
        (Value::Uuid(bytes), _, Store::Utf8(runs)) => return uuid::append(&bytes, runs),
        (Value::Inet4(bytes), _, Store::Utf8(runs)) => return inet::append4(&bytes, runs),
        (Value::Inet6(bytes), _, Store::Utf8(runs)) => return inet::append6(&bytes, runs),
        (value, kind, _) => return Err(misplaced(value.name(), kind)),
    }
    Ok(None)
}
