//! Debezium's messages in Avro's binary encoding.
//!
//! A message has the frame that schema registries define: a zero byte, the id of its schema in four bytes, big-endian,
//! and the record. Its fields are those of the Kafka Connect schemas in `schema`, in their order. A field that may be
//! null is a union with null, which comes first unless the field has a default.
//!
//! Source: Avro's specification, "Binary Encoding"; Confluent's "Wire format"; the mapping of types in Confluent's
//! `AvroData`.

use super::column_traits::ColumnTraits;
use super::handling::{BinaryMode, DecimalMode, FlatField};
use super::values::{datetime_digits, is_precise, time_of, write_binary};
use super::writer::{ChangeView, Writer, CONNECTOR, VERSION};
use crate::column::typed::Typed;
use crate::column::{
    binary, bit, compressed, date, datetime, decimal, enumeration, geometry, inet, json, set, text, timestamp, uuid,
    Kind, Value,
};
use crate::emit::dialect::{At, Image};
use crate::error::{value_malformed, Error, ErrorKind, Result};

/// The first byte of a message whose schema is in a registry.
const MAGIC: u8 = 0;

/// The branches of a union that begins with null.
const NULL: i64 = 0;
const SOME: i64 = 1;

/// Writes the frame of a message.
pub(crate) fn write_frame(schema_id: u32, out: &mut Vec<u8>) {
    out.push(MAGIC);
    out.extend_from_slice(&schema_id.to_be_bytes());
}

/// Writes an int or a long: zigzag, then seven bits a byte, lowest first.
fn write_long(value: i64, out: &mut Vec<u8>) {
    let mut zigzag = ((value << 1) ^ (value >> 63)) as u64;
    while zigzag >= 0x80 {
        out.push(zigzag as u8 | 0x80);
        zigzag >>= 7;
    }
    out.push(zigzag as u8);
}

fn write_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    write_long(bytes.len() as i64, out);
    out.extend_from_slice(bytes);
}

/// Writes a string or bytes whose content `write` appends, and returns its result.
fn write_content<R>(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    let start = out.len();
    let result = write(out);
    let end = out.len();
    // The length precedes the content, and takes as many bytes as it needs.
    write_long((end - start) as i64, out);
    let length_bytes = out.len() - end;
    if let Some(written) = out.get_mut(start..) {
        written.rotate_right(length_bytes);
    }
    result
}

fn write_optional_long(value: Option<i64>, out: &mut Vec<u8>) {
    match value {
        None => write_long(NULL, out),
        Some(value) => {
            write_long(SOME, out);
            write_long(value, out);
        }
    }
}

/// Writes a text that may be null; an empty text is null.
fn write_optional_text(text: &str, out: &mut Vec<u8>) {
    if text.is_empty() {
        return write_long(NULL, out);
    }
    write_long(SOME, out);
    write_bytes(text.as_bytes(), out);
}

/// Writes a value of a column. Raises the errors of [`super::values::write`], and `ValueMalformed` for a null in a
/// column that is not nullable.
pub(crate) fn write(value: &Value<'_>, kind: &Kind, traits: ColumnTraits, out: &mut Vec<u8>) -> Result<()> {
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
        write_long(if is_null { NULL } else { SOME }, out);
        if is_null {
            return Ok(());
        }
    }
    write_present(typed, kind, traits, out)
}

fn write_present(typed: Typed<'_>, kind: &Kind, traits: ColumnTraits, out: &mut Vec<u8>) -> Result<()> {
    let handling = traits.handling;
    match typed {
        Typed::Null => return Err(value_malformed("a null in a column that is declared NOT NULL")),
        Typed::Int(value) => write_long(value, out),
        Typed::UInt(value) if is_precise(kind, traits) => {
            decimal::with_unsigned_bytes(value, |bytes| write_bytes(bytes, out));
        }
        // As a long: values above its range become negative.
        Typed::UInt(value) => write_long(value as i64, out),
        Typed::Float(value) if traits.has_digits => write_double(value.into(), out),
        Typed::Float(value) => out.extend_from_slice(&value.to_le_bytes()),
        Typed::Double(value) => write_double(value, out),
        Typed::Decimal(value) => match handling.decimal {
            DecimalMode::Precise => write_content(out, |out| value.unscaled_bytes(out))?,
            DecimalMode::Double => write_double(decimal::to_double(value)?, out),
            DecimalMode::String => write_content(out, |out| decimal::write_text(value, out))?,
        },
        Typed::Bit { value, bits: 1 } => out.push(u8::from(value != 0)),
        Typed::Bit { value, bits } => bit::with_low_bytes(value, bits, |bytes| write_bytes(bytes, out)),
        Typed::Year(value) => write_long(value.into(), out),
        Typed::Date(value) => write_long(date::debezium(value).unwrap_or(0), out),
        Typed::DateTime { value, fsp } => {
            write_long(datetime::debezium(value, datetime_digits(fsp, traits)).unwrap_or(0), out);
        }
        Typed::Timestamp { value, fsp } => write_content(out, |out| timestamp::write_debezium(value, fsp, out)),
        Typed::Time { value, fsp } => write_long(time_of(value, fsp, traits)?, out),
        Typed::Text { bytes, charset } => write_content(out, |out| text::write_lossy(bytes, charset, out)),
        Typed::CompressedText { bytes, charset } => {
            let plain = compressed::plain(bytes)?;
            write_content(out, |out| text::write_lossy(&plain, charset, out));
        }
        Typed::Bytes { bytes, form } => write_blob(handling.binary, &binary::padded(bytes, form), out),
        Typed::CompressedBytes(bytes) => write_blob(handling.binary, &compressed::plain(bytes)?, out),
        Typed::Enumeration { index, members } => {
            write_content(out, |out| enumeration::write_text(index, members, out))?;
        }
        Typed::Set { bits, members } => write_content(out, |out| set::write_text(bits, members, out))?,
        Typed::Json(document) => write_content(out, |out| json::write_text(document, out))?,
        Typed::JsonText(text) => write_bytes(text.as_bytes(), out),
        Typed::Geometry(bytes) => write_geometry(bytes, traits.is_point, out)?,
        Typed::Vector(bytes) => write_floats(bytes, out),
        Typed::Uuid(bytes) => write_content(out, |out| uuid::write_text(bytes, out)),
        Typed::Inet4(bytes) => write_content(out, |out| inet::write_text4(bytes, out)),
        Typed::Inet6(bytes) => write_content(out, |out| inet::write_text6(bytes, out)),
    }
    Ok(())
}

fn write_double(value: f64, out: &mut Vec<u8>) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn write_blob(mode: BinaryMode, bytes: &[u8], out: &mut Vec<u8>) {
    match mode {
        BinaryMode::Bytes => write_bytes(bytes, out),
        mode => write_content(out, |out| write_binary(mode, bytes, out)),
    }
}

/// Writes the fields of `io.debezium.data.geometry.Geometry`, or of `Point`, whose `wkb` may be null.
fn write_geometry(bytes: &[u8], is_point: bool, out: &mut Vec<u8>) -> Result<()> {
    let (srid, wkb) = geometry::parts(bytes)?;
    if is_point {
        for coordinate in geometry::coordinates(wkb)? {
            write_double(coordinate, out);
        }
        write_long(SOME, out);
    }
    write_bytes(wkb, out);
    write_optional_long((srid != 0).then_some(srid.into()), out);
    Ok(())
}

/// Writes an array of floats: a block of all of them, and the empty block at the end. Both formats have the lowest
/// byte first.
fn write_floats(bytes: &[u8], out: &mut Vec<u8>) {
    if !bytes.is_empty() {
        write_long((bytes.len() / 4) as i64, out);
        out.extend_from_slice(bytes);
    }
    write_long(0, out);
}

/// Writes the source up to the row number.
pub(super) fn source_head(at: &At<'_>, database: &str, table: &str, out: &mut Vec<u8>) {
    let micros = at.transaction.commit_us;
    for text in [VERSION, CONNECTOR, at.instance] {
        write_bytes(text.as_bytes(), out);
    }
    write_long(micros.div_euclid(1_000), out);
    // A field with a default: its type is the first branch of the union.
    write_long(0, out);
    write_snapshot(at, out);
    write_bytes(database.as_bytes(), out);
    // The sequence.
    write_long(NULL, out);
    write_optional_long(Some(micros), out);
    write_optional_long(Some(micros.saturating_mul(1_000)), out);
    write_optional_text(table, out);
    write_long(at.event.server_id.into(), out);
    write_optional_text(at.gtid, out);
    write_bytes(at.transaction.file.as_bytes(), out);
    write_long(at.event.offset as i64, out);
}

fn write_snapshot(at: &At<'_>, out: &mut Vec<u8>) {
    write_bytes(if at.snapshot { b"true" } else { b"false" }, out);
}

/// Writes the row number in its event, and the rest of the source.
fn source_tail(at: &At<'_>, row: u32, out: &mut Vec<u8>) {
    write_long(row.into(), out);
    write_optional_long(at.transaction.thread_id, out);
    // The query.
    write_long(NULL, out);
}

impl Writer {
    /// Writes a change; `source` is what `source_head` wrote.
    pub(super) fn write_avro(
        &self,
        schema_id: u32,
        at: &At<'_>,
        change: &ChangeView<'_, '_>,
        source: &[u8],
        row: u32,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        write_frame(schema_id, out);
        if let Some(flat) = &self.flat {
            self.write_avro_columns(change.after.or(change.before).unwrap_or_default(), out)?;
            for (_, field) in &flat.fields {
                self.write_avro_field(*field, at, change, row, out);
            }
            if flat.deleted.is_some() {
                write_optional_text(if change.after.is_none() { "true" } else { "false" }, out);
            }
            return Ok(());
        }
        for image in [change.before, change.after] {
            match image {
                None => write_long(NULL, out),
                Some(image) => {
                    write_long(SOME, out);
                    self.write_avro_columns(image, out)?;
                }
            }
        }
        out.extend_from_slice(source);
        source_tail(at, row, out);
        // The transaction.
        write_long(NULL, out);
        write_bytes(change.operation, out);
        let micros = at.transaction.commit_us;
        for time in [micros.div_euclid(1_000), micros, micros.saturating_mul(1_000)] {
            write_optional_long(Some(time), out);
        }
        Ok(())
    }

    /// Writes a record of the columns. Raises `EventUnsupported` if the image does not have all of them.
    fn write_avro_columns(&self, image: Image<'_, '_>, out: &mut Vec<u8>) -> Result<()> {
        for (field, cell) in self.fields.iter().zip(image) {
            let value = cell.as_ref().ok_or_else(|| absent(&field.name))?;
            let written = write(value, &field.kind, field.traits, out);
            written.map_err(|error| error.within(&format!("column `{}`", field.name)))?;
        }
        Ok(())
    }

    fn write_avro_field(
        &self,
        field: FlatField,
        at: &At<'_>,
        change: &ChangeView<'_, '_>,
        row: u32,
        out: &mut Vec<u8>,
    ) {
        let micros = at.transaction.commit_us;
        match field {
            FlatField::Op => write_bytes(change.operation, out),
            FlatField::Db => write_bytes(self.table.database.as_bytes(), out),
            FlatField::Table => write_optional_text(&self.table.table, out),
            FlatField::Gtid => write_optional_text(at.gtid, out),
            FlatField::File => write_bytes(at.transaction.file.as_bytes(), out),
            FlatField::Pos => write_long(at.event.offset as i64, out),
            FlatField::Row => write_long(row.into(), out),
            FlatField::ServerId => write_long(at.event.server_id.into(), out),
            FlatField::Thread => write_optional_long(at.transaction.thread_id, out),
            FlatField::Snapshot => {
                write_long(SOME, out);
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
    let message = format!("a row was logged without column `{name}`, and a record in Avro has all columns");
    Error::new(ErrorKind::EventUnsupported, message).hint("SET GLOBAL binlog_row_image = FULL on the server")
}
