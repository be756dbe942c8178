//! Encodes changes in Arrow form for the messages of TiDB-Binlog's Drainer. Each change becomes one part of a message,
//! and the consecutive parts of a transaction form its content.
//!
//! For Kafka, a part is a `TableMutation` of `slave.binlog`; for files, it is an `Event` of `pb_binlog`. For an update,
//! Kafka messages contain the new row first, and files contain the old row first.

use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, LargeBinaryArray, RecordBatch};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Schema};

use crate::column::json::JsonStyle;
use crate::column::typed::Typed;
use crate::column::DeclaredColumn;
use crate::emit::arrow_messages::System;
use crate::emit::arrow_rows::{ArrowRows, Pair};
use crate::emit::dialect::protobuf as pb;
use crate::error::{malformed, Error, ErrorKind, Result};

/// Flags that precede the bodies of datums.
const NULL_FLAG: u8 = 0;
const BYTES_FLAG: u8 = 2;
const DOUBLE_FLAG: u8 = 5;
const INT_FLAG: u8 = 8;
const UINT_FLAG: u8 = 9;

const SIGN_BIT: u64 = 1 << 63;

/// The form in which the changes are encoded.
#[derive(Debug, Clone, Copy)]
pub enum DrainerForm<'a> {
    /// For Kafka.
    Kafka,
    /// For files.
    File {
        /// The database in each part.
        database: &'a str,
        /// The table in each part.
        table: &'a str,
        /// For each column, the fields that precede its values: name and type.
        heads: &'a [Vec<u8>],
    },
}

/// Encodes the changes of a batch in order. `value` is each change in Drainer's form, and `version` is its commit
/// version.
///
/// Raises `SchemaInvalid` if the batch does not have the declared columns followed by the system columns,
/// `EventUnsupported` if an image lacks a column.
pub fn encode_drainer(
    batch: &RecordBatch,
    declared: &[DeclaredColumn],
    mariadb: bool,
    form: DrainerForm<'_>,
) -> Result<RecordBatch> {
    let system = System::of(batch)?;
    let rows = ArrowRows::new(batch, declared, mariadb, JsonStyle::Server)?;
    let pairs = system.pairs()?;
    let (mut values, mut ends, mut versions) = (Vec::new(), vec![0i64], Vec::with_capacity(pairs.len()));
    for pair in &pairs {
        match form {
            DrainerForm::Kafka => mutation(&rows, pair, &mut values)?,
            DrainerForm::File { database, table, heads } => event(&rows, pair, (database, table), heads, &mut values)?,
        }
        ends.push(values.len() as i64);
        versions.push(system.version_of(pair));
    }
    let columns: Vec<ArrayRef> = vec![
        Arc::new(LargeBinaryArray::new(OffsetBuffer::new(ScalarBuffer::from(ends)), values.into(), None)),
        Arc::new(Int64Array::from(versions)),
    ];
    let schema = Schema::new(vec![
        Field::new("value", DataType::LargeBinary, false),
        Field::new("version", DataType::Int64, false),
    ]);
    RecordBatch::try_new(Arc::new(schema), columns).map_err(|error| malformed(format!("parts of changes: {error}")))
}

/// Returns the number that both forms use for a kind of change.
fn kind_number(pair: &Pair) -> u64 {
    match (pair.before, pair.after) {
        (None, _) => 0,
        (Some(_), Some(_)) => 1,
        (Some(_), None) => 2,
    }
}

/// Writes a `TableMutation` as a field of its table.
fn mutation(rows: &ArrowRows<'_>, pair: &Pair, out: &mut Vec<u8>) -> Result<()> {
    let start = pb::open(4, out);
    pb::number(1, kind_number(pair), out);
    let (row, changed) = match (pair.before, pair.after) {
        (before, Some(after)) => ((after, before), before),
        (Some(before), None) => ((before, None), None),
        (None, None) => return Err(malformed("a change without images")),
    };
    kafka_row(rows, 2, row, out)?;
    if let Some(before) = changed {
        kafka_row(rows, 3, (before, None), out)?;
    }
    pb::close(start, out);
    Ok(())
}

fn kafka_row(rows: &ArrowRows<'_>, field: u32, row: (usize, Option<usize>), out: &mut Vec<u8>) -> Result<()> {
    let start = pb::open(field, out);
    for at in 0..rows.columns().len() {
        let column = pb::open(1, out);
        with_value(rows, at, row, |value| kafka_value(value, out))?;
        pb::close(column, out);
    }
    pb::close(start, out);
    Ok(())
}

fn kafka_value(value: Typed<'_>, out: &mut Vec<u8>) -> Result<()> {
    match value {
        Typed::Null => pb::number(1, 1, out),
        Typed::Int(number) => pb::signed(2, number, out),
        Typed::UInt(number) => pb::number(3, number, out),
        Typed::Enumeration { index, .. } => pb::number(3, index.into(), out),
        Typed::Set { bits, .. } => pb::number(3, bits, out),
        Typed::Float(number) => pb::double(4, number.into(), out),
        Typed::Double(number) => pb::double(4, number, out),
        Typed::Bit { .. }
        | Typed::Bytes { .. }
        | Typed::CompressedBytes(_)
        | Typed::Json(_)
        | Typed::JsonText(_)
        | Typed::Geometry(_)
        | Typed::Vector(_) => text_field(5, value, out)?,
        Typed::Decimal(_)
        | Typed::Year(_)
        | Typed::Date(_)
        | Typed::DateTime { .. }
        | Typed::Timestamp { .. }
        | Typed::Time { .. }
        | Typed::Text { .. }
        | Typed::CompressedText { .. }
        | Typed::Uuid(_)
        | Typed::Inet4(_)
        | Typed::Inet6(_) => text_field(6, value, out)?,
    }
    Ok(())
}

fn text_field(field: u32, value: Typed<'_>, out: &mut Vec<u8>) -> Result<()> {
    let start = pb::open(field, out);
    value.write_text(out)?;
    pb::close(start, out);
    Ok(())
}

/// Writes an `Event` as a field of its transaction.
fn event(
    rows: &ArrowRows<'_>,
    pair: &Pair,
    (database, table): (&str, &str),
    heads: &[Vec<u8>],
    out: &mut Vec<u8>,
) -> Result<()> {
    let start = pb::open(1, out);
    pb::bytes(1, database.as_bytes(), out);
    pb::bytes(2, table.as_bytes(), out);
    pb::number(3, kind_number(pair), out);
    let Some(first) = pair.before.or(pair.after) else { return Err(malformed("a change without images")) };
    let changed = pair.before.and(pair.after);
    if heads.len() != rows.columns().len() {
        return Err(malformed("as many heads as columns are needed"));
    }
    for (at, head) in heads.iter().enumerate() {
        let column = pb::open(4, out);
        out.extend_from_slice(head);
        datum_field(rows, 4, at, (first, None), out)?;
        if let Some(after) = changed {
            datum_field(rows, 5, at, (after, Some(first)), out)?;
        }
        pb::close(column, out);
    }
    pb::close(start, out);
    Ok(())
}

fn datum_field(
    rows: &ArrowRows<'_>,
    field: u32,
    at: usize,
    row: (usize, Option<usize>),
    out: &mut Vec<u8>,
) -> Result<()> {
    let start = pb::open(field, out);
    with_value(rows, at, row, |value| datum(value, out))?;
    pb::close(start, out);
    Ok(())
}

/// Writes a value as TiDB's codec does: a flag, then the body.
fn datum(value: Typed<'_>, out: &mut Vec<u8>) -> Result<()> {
    match value {
        Typed::Null => out.push(NULL_FLAG),
        Typed::Int(number) => signed_datum(number, out),
        Typed::Year(year) => signed_datum(year.into(), out),
        Typed::UInt(number) => unsigned_datum(number, out),
        Typed::Enumeration { index, .. } => unsigned_datum(index.into(), out),
        Typed::Set { bits, .. } => unsigned_datum(bits, out),
        Typed::Bit { value, .. } => unsigned_datum(value, out),
        Typed::Float(number) => double_datum(number.into(), out),
        Typed::Double(number) => double_datum(number, out),
        Typed::Decimal(_)
        | Typed::Date(_)
        | Typed::DateTime { .. }
        | Typed::Timestamp { .. }
        | Typed::Time { .. }
        | Typed::Text { .. }
        | Typed::CompressedText { .. }
        | Typed::Bytes { .. }
        | Typed::CompressedBytes(_)
        | Typed::Json(_)
        | Typed::JsonText(_)
        | Typed::Geometry(_)
        | Typed::Vector(_)
        | Typed::Uuid(_)
        | Typed::Inet4(_)
        | Typed::Inet6(_) => bytes_datum(value, out)?,
    }
    Ok(())
}

/// Writes an integer with zigzag encoding, so that small numbers of either sign are short.
fn zigzag(number: i64, out: &mut Vec<u8>) {
    pb::varint(u64::from_ne_bytes(((number << 1) ^ (number >> 63)).to_ne_bytes()), out);
}

fn signed_datum(number: i64, out: &mut Vec<u8>) {
    out.push(INT_FLAG);
    zigzag(number, out);
}

fn unsigned_datum(number: u64, out: &mut Vec<u8>) {
    out.push(UINT_FLAG);
    pb::varint(number, out);
}

/// Writes a double so that the bytes sort like the numbers.
fn double_datum(number: f64, out: &mut Vec<u8>) {
    let bits = number.to_bits();
    let ordered = if bits & SIGN_BIT == 0 { bits | SIGN_BIT } else { !bits };
    out.push(DOUBLE_FLAG);
    out.extend_from_slice(&ordered.to_be_bytes());
}

fn bytes_datum(value: Typed<'_>, out: &mut Vec<u8>) -> Result<()> {
    let mut bytes = Vec::new();
    value.write_text(&mut bytes)?;
    out.push(BYTES_FLAG);
    zigzag(i64::try_from(bytes.len()).unwrap_or(i64::MAX), out);
    out.extend_from_slice(&bytes);
    Ok(())
}

/// Calls a function with the value of a column. A column that is missing from the row's image is taken from the
/// `fallback` row, which is the before image of an update.
fn with_value(
    rows: &ArrowRows<'_>,
    at: usize,
    (row, fallback): (usize, Option<usize>),
    write: impl FnOnce(Typed<'_>) -> Result<()>,
) -> Result<()> {
    let Some(column) = rows.columns().get(at) else { return Err(malformed("a column that the table lacks")) };
    let value = match (rows.cell(row, at)?, fallback) {
        (None, Some(fallback)) => rows.cell(fallback, at)?,
        (value, _) => value,
    };
    match value {
        Some(value) => write(value.typed(column.kind())?),
        None => Err(lacks_column()),
    }
}

#[cold]
fn lacks_column() -> Error {
    Error::new(ErrorKind::EventUnsupported, "a row image lacks a column, and Drainer's messages have whole rows")
        .hint("SET GLOBAL binlog_row_image = FULL on the server")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(value: Typed<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        datum(value, &mut out).unwrap();
        out
    }

    #[test]
    fn small_numbers_of_either_sign_are_short() {
        assert_eq!(bytes_of(Typed::Int(1)), [8, 2]);
        assert_eq!(bytes_of(Typed::Int(-5)), [8, 9]);
        assert_eq!(bytes_of(Typed::Int(i64::MIN)).len(), 11);
        assert_eq!(bytes_of(Typed::UInt(300)), [9, 0xac, 2]);
        assert_eq!(bytes_of(Typed::Year(2026)), [8, 0xd4, 0x1f]);
    }

    #[test]
    fn doubles_compare_like_their_bytes() {
        let numbers = [f64::NEG_INFINITY, -2.25, -0.5, 0.0, 0.5, 1.5, f64::INFINITY];
        let encoded: Vec<Vec<u8>> = numbers.iter().map(|number| bytes_of(Typed::Double(*number))).collect();
        assert!(encoded.is_sorted());
        assert_eq!(bytes_of(Typed::Float(1.5)), [5, 0xbf, 0xf8, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn text_has_its_length_before_it() {
        assert_eq!(bytes_of(Typed::JsonText("[1]")), [2, 6, b'[', b'1', b']']);
        assert_eq!(bytes_of(Typed::Null), [0]);
    }
}
