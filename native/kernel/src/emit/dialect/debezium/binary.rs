//! Debezium's messages in binary encodings: Avro and protobuf.
//!
//! A message has the frame that schema registries define: a zero byte, the id of its schema (four bytes, big-endian),
//! for protobuf the index of its type in the schema, and the record. The record's fields are those of the Kafka Connect
//! schemas in `schema`, in the same order.
//!
//! Source: Confluent's "Wire format"; the mapping of types in Confluent's `AvroData` and `ProtobufData`.

use super::avro::AvroRecord;
use super::column_traits::ColumnTraits;
use super::encoding::Encoding;
use super::handling::{BinaryFormat, BinaryMode, DecimalMode, FlatField, RegisteredSchemas};
use super::protobuf_message::ProtobufMessage;
use super::values::{datetime_digits, is_precise, time_of, write_binary};
use super::writer::{transaction_id, ChangeView, Writer, CONNECTOR, VERSION};
use crate::column::typed::Typed;
use crate::column::{
    binary, bit, compressed, date, datetime, decimal, enumeration, geometry, inet, json, set, text, timestamp, uuid,
    Kind, Value,
};
use crate::emit::dialect::{At, Image};
use crate::error::{value_malformed, Error, ErrorKind, Result};

/// The first byte of a message whose schema is in a registry.
const MAGIC: u8 = 0;

/// The index path of a message's type in a protobuf schema: always the first type.
const FIRST_TYPE: u8 = 0;

/// Number of digits of the largest BIGINT UNSIGNED.
const UNSIGNED_DIGITS: u8 = 20;

/// The number of fields that [`source_head`] writes.
const HEAD_FIELDS: u32 = 14;

/// Writes the frame of a message.
pub(crate) fn write_frame(format: BinaryFormat, schema_id: u32, out: &mut Vec<u8>) {
    out.push(MAGIC);
    out.extend_from_slice(&schema_id.to_be_bytes());
    if format == BinaryFormat::Protobuf {
        out.push(FIRST_TYPE);
    }
}

/// Writes a column of a key. `index` counts the columns before it.
pub(crate) fn write_key_column(
    format: BinaryFormat,
    index: u32,
    value: &Value<'_>,
    kind: &Kind,
    traits: ColumnTraits,
    out: &mut Vec<u8>,
) -> Result<()> {
    match format {
        BinaryFormat::Avro => write(value, kind, traits, &mut AvroRecord { out }),
        BinaryFormat::Protobuf => write(value, kind, traits, &mut ProtobufMessage { out, field: index }),
    }
}

fn write_optional_long(value: Option<i64>, out: &mut impl Encoding) {
    match value {
        None => out.null(),
        Some(value) => {
            out.present();
            out.long(value);
        }
    }
}

/// Writes a text that may be null; an empty text is null.
fn write_optional_text(text: &str, out: &mut impl Encoding) {
    if text.is_empty() {
        return out.null();
    }
    out.present();
    out.bytes(text.as_bytes());
}

/// Writes a value of a column. Raises what [`super::values::write`] does, and `ValueMalformed` for a null in a column
/// that is not nullable.
fn write(value: &Value<'_>, kind: &Kind, traits: ColumnTraits, out: &mut impl Encoding) -> Result<()> {
    let typed = value.typed(kind)?;
    if traits.nullable {
        let is_null = match typed {
            Typed::Null => true,
            Typed::Date(value) => date::debezium(value).is_none(),
            Typed::DateTime { value, fsp } => datetime::debezium(value, fsp).is_none(),
            Typed::Timestamp { value, .. } => timestamp::is_zero(value),
            Typed::Int(_)
            | Typed::UInt(_)
            | Typed::Float(_)
            | Typed::Double(_)
            | Typed::Decimal(_)
            | Typed::Bit { .. }
            | Typed::Year(_)
            | Typed::Time { .. }
            | Typed::Text { .. }
            | Typed::CompressedText { .. }
            | Typed::Bytes { .. }
            | Typed::CompressedBytes(_)
            | Typed::Enumeration { .. }
            | Typed::Set { .. }
            | Typed::Json(_)
            | Typed::JsonText(_)
            | Typed::Geometry(_)
            | Typed::Vector(_)
            | Typed::Uuid(_)
            | Typed::Inet4(_)
            | Typed::Inet6(_) => false,
        };
        if is_null {
            out.null();
            return Ok(());
        }
        out.present();
    }
    write_present(typed, kind, traits, out)
}

fn write_present(typed: Typed<'_>, kind: &Kind, traits: ColumnTraits, out: &mut impl Encoding) -> Result<()> {
    let handling = traits.handling;
    match typed {
        Typed::Null => return Err(value_malformed("a null in a column that is declared NOT NULL")),
        Typed::Int(value) => out.long(value),
        Typed::UInt(value) if is_precise(kind, traits) => {
            decimal::with_unsigned_bytes(value, |bytes| {
                out.decimal(UNSIGNED_DIGITS, 0, |out| out.extend_from_slice(bytes));
            });
        }
        // The value is written as a long, so values above its range become negative.
        Typed::UInt(value) => out.long(value as i64),
        Typed::Float(value) if traits.has_digits => out.double(value.into()),
        Typed::Float(value) => out.float(value),
        Typed::Double(value) => out.double(value),
        Typed::Decimal(value) => match handling.decimal {
            DecimalMode::Precise => {
                let (precision, scale) = digits_of(kind);
                out.decimal(precision, scale, |out| value.with_unscaled_bytes(|bytes| out.extend_from_slice(bytes)))?;
            }
            DecimalMode::Double => out.double(decimal::to_double(value)?),
            DecimalMode::String => out.content(|out| decimal::write_text(value, out))?,
        },
        Typed::Bit { value, bits: 1 } => out.boolean(value != 0),
        Typed::Bit { value, bits } => bit::with_low_bytes(value, bits, |bytes| out.bytes(bytes)),
        Typed::Year(value) => out.long(value.into()),
        Typed::Date(value) => out.long(date::debezium(value).unwrap_or(0)),
        Typed::DateTime { value, fsp } => {
            out.long(datetime::debezium(value, datetime_digits(fsp, traits)).unwrap_or(0));
        }
        Typed::Timestamp { value, fsp } => out.content(|out| timestamp::write_debezium(value, fsp, out)),
        Typed::Time { value, fsp } => out.long(time_of(value, fsp, traits)?),
        Typed::Text { bytes, charset } => out.content(|out| text::write_lossy(bytes, charset, out)),
        Typed::CompressedText { bytes, charset } => {
            let plain = compressed::plain(bytes)?;
            out.content(|out| text::write_lossy(&plain, charset, out));
        }
        Typed::Bytes { bytes, form } => write_blob(handling.binary, &binary::padded(bytes, form), out),
        Typed::CompressedBytes(bytes) => write_blob(handling.binary, &compressed::plain(bytes)?, out),
        Typed::Enumeration { index, members } => {
            out.content(|out| enumeration::write_text(index, members, out))?;
        }
        Typed::Set { bits, members } => out.content(|out| set::write_text(bits, members, out))?,
        Typed::Json(document) => out.content(|out| json::write_text(document, out))?,
        Typed::JsonText(text) => out.bytes(text.as_bytes()),
        Typed::Geometry(bytes) => write_geometry(bytes, traits.is_point, out)?,
        Typed::Vector(bytes) => out.floats(bytes),
        Typed::Uuid(bytes) => out.content(|out| uuid::write_text(bytes, out)),
        Typed::Inet4(bytes) => out.content(|out| inet::write_text4(bytes, out)),
        Typed::Inet6(bytes) => out.content(|out| inet::write_text6(bytes, out)),
    }
    Ok(())
}

/// Returns precision and scale of a DECIMAL.
fn digits_of(kind: &Kind) -> (u8, u8) {
    if let Kind::Decimal { precision, scale } = kind {
        return (*precision, *scale);
    }
    (0, 0)
}

fn write_blob(mode: BinaryMode, bytes: &[u8], out: &mut impl Encoding) {
    match mode {
        BinaryMode::Bytes => out.bytes(bytes),
        mode => out.content(|out| write_binary(mode, bytes, out)),
    }
}

/// Writes the fields of `io.debezium.data.geometry.Geometry`, or of `Point`, whose `wkb` may be null.
fn write_geometry(bytes: &[u8], is_point: bool, out: &mut impl Encoding) -> Result<()> {
    let (srid, wkb) = geometry::parts(bytes)?;
    out.record(|out| {
        if is_point {
            for coordinate in geometry::coordinates(wkb)? {
                out.double(coordinate);
            }
            out.present();
        }
        out.bytes(wkb);
        write_optional_long((srid != 0).then_some(srid.into()), out);
        Ok(())
    })
}

/// Writes the `source` fields that come before the row number, for [`Encoding::encoded`].
pub(super) fn source_head(format: BinaryFormat, at: &At<'_>, database: &str, table: &str, out: &mut Vec<u8>) {
    match format {
        BinaryFormat::Avro => write_source_head(at, database, table, &mut AvroRecord { out }),
        BinaryFormat::Protobuf => write_source_head(at, database, table, &mut ProtobufMessage { out, field: 0 }),
    }
}

fn write_source_head(at: &At<'_>, database: &str, table: &str, out: &mut impl Encoding) {
    let micros = at.transaction.commit_us;
    for text in [VERSION, CONNECTOR, at.instance] {
        out.bytes(text.as_bytes());
    }
    out.long(micros.div_euclid(1_000));
    out.present_with_default();
    write_snapshot(at, out);
    out.bytes(database.as_bytes());
    // The field `sequence`, which is null.
    out.null();
    write_optional_long(Some(micros), out);
    write_optional_long(Some(micros.saturating_mul(1_000)), out);
    write_optional_text(table, out);
    out.long(at.event.server_id.into());
    write_optional_text(at.gtid, out);
    out.bytes(at.transaction.file.as_bytes());
    out.long(at.event.offset as i64);
}

fn write_snapshot(at: &At<'_>, out: &mut impl Encoding) {
    out.bytes(if at.snapshot { b"true" } else { b"false" });
}

/// Writes the index of the row within its event, then the remaining fields of the `source` block.
fn write_source_tail(at: &At<'_>, row: u32, out: &mut impl Encoding) {
    out.long(row.into());
    write_optional_long(at.transaction.thread_id, out);
    // The query.
    out.null();
}

impl Writer {
    /// Writes a change; `source` is the output of `source_head`.
    pub(super) fn write_binary(
        &self,
        schemas: RegisteredSchemas,
        at: &At<'_>,
        change: &ChangeView<'_, '_>,
        source: &[u8],
        row: u32,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        write_frame(schemas.format, schemas.value, out);
        match schemas.format {
            BinaryFormat::Avro => self.write_record(at, change, source, row, &mut AvroRecord { out }),
            BinaryFormat::Protobuf => {
                self.write_record(at, change, source, row, &mut ProtobufMessage { out, field: 0 })
            }
        }
    }

    fn write_record(
        &self,
        at: &At<'_>,
        change: &ChangeView<'_, '_>,
        source: &[u8],
        row: u32,
        out: &mut impl Encoding,
    ) -> Result<()> {
        if let Some(flat) = &self.flat {
            self.write_columns(change.after.or(change.before).unwrap_or_default(), out)?;
            for (_, field) in &flat.fields {
                self.write_binary_field(*field, at, change, row, out);
            }
            if flat.deleted.is_some() {
                write_optional_text(if change.after.is_none() { "true" } else { "false" }, out);
            }
            return Ok(());
        }
        for image in [change.before, change.after] {
            match image {
                None => out.null(),
                Some(image) => {
                    out.present();
                    out.record(|out| self.write_columns(image, out))?;
                }
            }
        }
        out.record(|out| {
            out.encoded(source, HEAD_FIELDS);
            write_source_tail(at, row, out);
        });
        match change.counts {
            None => out.null(),
            Some(counts) => {
                out.present();
                out.record(|out| {
                    out.bytes(transaction_id(at).as_bytes());
                    out.long(counts.total as i64);
                    out.long(counts.of_table as i64);
                });
            }
        }
        out.bytes(change.operation);
        let micros = at.transaction.commit_us;
        for time in [micros.div_euclid(1_000), micros, micros.saturating_mul(1_000)] {
            write_optional_long(Some(time), out);
        }
        Ok(())
    }

    /// Writes the columns of an image. Raises `EventUnsupported` if the image lacks a column.
    fn write_columns(&self, image: Image<'_, '_>, out: &mut impl Encoding) -> Result<()> {
        for (field, cell) in self.fields.iter().zip(image) {
            let value = cell.as_ref().ok_or_else(|| absent(&field.name))?;
            let written = write(value, &field.kind, field.traits, out);
            written.map_err(|error| error.within(&format!("column `{}`", field.name)))?;
        }
        Ok(())
    }

    fn write_binary_field(
        &self,
        field: FlatField,
        at: &At<'_>,
        change: &ChangeView<'_, '_>,
        row: u32,
        out: &mut impl Encoding,
    ) {
        let micros = at.transaction.commit_us;
        match field {
            FlatField::Op => out.bytes(change.operation),
            FlatField::Db => out.bytes(self.table.database.as_bytes()),
            FlatField::Table => write_optional_text(&self.table.table, out),
            FlatField::Gtid => write_optional_text(at.gtid, out),
            FlatField::File => out.bytes(at.transaction.file.as_bytes()),
            FlatField::Pos => out.long(at.event.offset as i64),
            FlatField::Row => out.long(row.into()),
            FlatField::ServerId => out.long(at.event.server_id.into()),
            FlatField::Thread => write_optional_long(at.transaction.thread_id, out),
            FlatField::Snapshot => {
                out.present();
                write_snapshot(at, out);
            }
            FlatField::TsMs => write_optional_long(Some(micros.div_euclid(1_000)), out),
            FlatField::TsUs => write_optional_long(Some(micros), out),
            FlatField::TsNs => write_optional_long(Some(micros.saturating_mul(1_000)), out),
        }
    }
}

#[cold]
fn absent(name: &str) -> Error {
    let message = format!("a row was logged without column `{name}`, and a record of a schema has all columns");
    Error::new(ErrorKind::EventUnsupported, message).hint("SET GLOBAL binlog_row_image = FULL on the server")
}
