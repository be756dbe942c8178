//! Debezium's envelope: the row before and after a change, and the source of the change.
//!
//! With a schema, each message describes its own fields; in Avro and protobuf, the schema is in a registry. The module
//! `handling` defines the formats of values and flat rows, and the module `values` writes values by type. A change of
//! the primary key is written as the delete of a row and the creation of another, because consumers identify rows by
//! their key.

mod avro;
pub(crate) mod binary;
pub(super) mod column_traits;
mod encoding;
pub mod handling;
mod protobuf_message;
pub(crate) mod schema;
pub(super) mod values;
mod writer;

use std::ops::Range;
use std::sync::Arc;

use column_traits::column_traits;
use handling::{DebeziumOptions, FlatField};
pub use writer::Writer;
use writer::{transaction_id, ChangeView, Field, FlatKeys, CONNECTOR, VERSION};

use crate::column::integer::write_digits;
use crate::column::{quoted, write_integer, write_unsigned_integer};
use crate::emit::dialect::ddl::{table_statements, Definition, DefinitionKind};
use crate::emit::dialect::{
    json_object, At, Dialect, End, Image, Images, Row, StatementKind, StatementView, TableView, TableWriter,
};
use crate::emit::messages::{MessageKind, Messages};
use crate::error::Result;
use crate::shard::SLOT_ALL;

/// Debezium's dialect, as the module's description explains.
pub struct Debezium {
    instance: Arc<str>,
    with_schema: bool,
    options: DebeziumOptions,
}

impl Debezium {
    /// Creates messages of the cluster `instance`, with or without schema.
    pub fn new(instance: &Arc<str>, with_schema: bool, options: &DebeziumOptions) -> Debezium {
        Debezium { instance: instance.clone(), with_schema, options: options.clone() }
    }
}

impl Debezium {
    /// Writes the message about a statement's effect on a table.
    fn write_definition(&self, at: &At<'_>, definition: &Definition<'_>, text: &str, out: &mut Messages) -> Result<()> {
        let (database, table) = (&*definition.database, &*definition.table);
        let value = &mut out.value;
        if self.with_schema {
            schema::write_statement_head(value);
        }
        value.extend_from_slice(b"{\"source\":");
        source_head(at, database, Some(table), value);
        source_tail(at, 0, value);
        value.extend_from_slice(b",\"ts_ms\":");
        write_integer(at.transaction.commit_us.div_euclid(1_000), value);
        value.extend_from_slice(b",\"databaseName\":");
        quoted::write(database.as_bytes(), value);
        value.extend_from_slice(b",\"schemaName\":null,\"ddl\":");
        quoted::write(text.as_bytes(), value);
        value.extend_from_slice(b",\"tableChanges\":[]}");
        if self.with_schema {
            value.push(b'}');
        }
        value.push(b'\n');
        out.close(MessageKind::Statement, SLOT_ALL, 0)
    }

    /// Writes the message for a table that a statement empties: an envelope without rows.
    fn write_truncate(at: &At<'_>, definition: &Definition<'_>, out: &mut Messages) -> Result<()> {
        let value = &mut out.value;
        value.extend_from_slice(b"{\"before\":null,\"after\":null,\"source\":");
        source_head(at, &definition.database, Some(&definition.table), value);
        source_tail(at, 0, value);
        value.extend_from_slice(b",\"transaction\":null,\"op\":\"t\"");
        times(at, value);
        value.extend_from_slice(b"}\n");
        out.close(MessageKind::Statement, SLOT_ALL, 0)
    }
}

impl Dialect for Debezium {
    type Writer = Writer;

    fn table(&self, table: Arc<TableView>) -> Result<Writer> {
        let handling = self.options.handling;
        let fields = table.columns.iter().map(|column| Field {
            key: json_object::key(&column.name),
            kind: column.kind.clone(),
            traits: column_traits(&column.type_text, column.nullable, handling),
            name: column.name.clone(),
        });
        let head = match self.with_schema {
            true => schema::head(&schema::value(&self.instance, &table, &self.options)),
            false => Vec::new(),
        };
        Ok(Writer {
            fields: fields.collect(),
            keys: (0..table.columns.len()).filter(|at| table.columns.get(*at).is_some_and(|c| c.is_key)).collect(),
            head,
            flat: self.options.flat.as_ref().map(FlatKeys::new),
            registered: self.options.registered,
            table,
        })
    }

    fn begin(&mut self, _at: &At<'_>, _out: &mut Messages) -> Result<()> {
        Ok(())
    }

    fn statement(&mut self, at: &At<'_>, statement: &StatementView<'_>, out: &mut Messages) -> Result<()> {
        if statement.kind != StatementKind::Definition {
            return Ok(());
        }
        for (definition, text) in table_statements(statement.text, statement.database, statement.backslash) {
            // The log does not contain the columns of an emptied table, so if messages have schemas, write a DDL
            // message instead.
            if definition.kind == DefinitionKind::Truncate && !self.with_schema {
                Self::write_truncate(at, &definition, out)?;
            } else {
                self.write_definition(at, &definition, &text, out)?;
            }
        }
        Ok(())
    }

    fn end(&mut self, _at: &At<'_>, _end: End<'_>, out: &mut Messages) -> Result<()> {
        out.close(MessageKind::End, SLOT_ALL, 0)
    }
}

/// The parts of JSON messages that all rows of an event share.
#[derive(Clone, Copy)]
struct Shared<'s> {
    /// The `source` fields before the row number.
    source: &'s [u8],
    /// The times at the end of a message.
    times: &'s [u8],
}

impl TableWriter for Writer {
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()> {
        // All rows of the event share the `source` fields before the row number, and the times at the end. The scratch
        // buffer holds them.
        let mut scratch = std::mem::take(&mut out.scratch);
        scratch.clear();
        let source_bytes;
        if let Some(schemas) = self.registered {
            binary::source_head(schemas.format, at, &self.table.database, &self.table.table, &mut scratch);
            source_bytes = scratch.len();
        } else {
            source_head(at, &self.table.database, Some(&self.table.table), &mut scratch);
            source_bytes = scratch.len();
            times(at, &mut scratch);
        }
        let (source, times) = scratch.split_at_checked(source_bytes).unwrap_or_default();
        let outcome = self.each(at, rows, Shared { source, times }, out);
        scratch.clear();
        out.scratch = scratch;
        outcome
    }
}

impl Writer {
    fn each(&self, at: &At<'_>, rows: &mut Images<'_, '_>, shared: Shared<'_>, out: &mut Messages) -> Result<()> {
        while let Some(row) = rows.next()? {
            let index = if at.event.shared { row.index } else { row.index.saturating_sub(at.row_first) };
            let operation: &[u8] = if at.snapshot { b"r" } else { b"c" };
            let insert = |after| ChangeView { operation, before: None, after, counts: None };
            let delete = |before| ChangeView { operation: b"d", before, after: None, counts: None };
            match (row.before, row.after) {
                (None, after) => self.write_change(at, &insert(after), shared, index, out)?,
                (before, None) => self.write_change(at, &delete(before), shared, index, out)?,
                (Some(before), Some(after)) if self.changes_key(before, after) => {
                    self.write_change(at, &delete(row.before), shared, index, out)?;
                    // Count the change once: with the message for the new row.
                    out.close(MessageKind::Delete, row.slot_before?, 0)?;
                    self.write_change(at, &insert(row.after), shared, index, out)?;
                    out.close(MessageKind::Insert, row.slot, 1)?;
                    continue;
                }
                (before, after) => {
                    let update = ChangeView { operation: b"u", before, after, counts: None };
                    self.write_change(at, &update, shared, index, out)?;
                }
            }
            out.close(kind_of(&row), row.slot, 1)?;
        }
        Ok(())
    }

    /// Whether an update changes the primary key.
    #[inline]
    fn changes_key(&self, before: Image<'_, '_>, after: Image<'_, '_>) -> bool {
        let value = |image: Image<'_, '_>, at: usize| image.get(at).is_some_and(Option::is_some);
        self.keys.iter().any(|at| value(before, *at) && value(after, *at) && before.get(*at) != after.get(*at))
    }

    fn write_change(
        &self,
        at: &At<'_>,
        change: &ChangeView<'_, '_>,
        shared: Shared<'_>,
        row: u32,
        out: &mut Messages,
    ) -> Result<()> {
        let counts = out.count(at.transaction.commit_version);
        let change = &ChangeView { counts, ..*change };
        let value = &mut out.value;
        if let Some(schemas) = self.registered {
            return self.write_binary(schemas, at, change, shared.source, row, value);
        }
        value.extend_from_slice(&self.head);
        if let Some(flat) = &self.flat {
            self.write_flat(at, change, flat, row, value)?;
            value.extend_from_slice(if self.head.is_empty() { b"\n" } else { b"}\n" });
            return Ok(());
        }
        value.extend_from_slice(b"{\"before\":");
        self.image(change.before, value)?;
        value.extend_from_slice(b",\"after\":");
        self.image(change.after, value)?;
        value.extend_from_slice(b",\"source\":");
        value.extend_from_slice(shared.source);
        source_tail(at, row, value);
        value.extend_from_slice(b",\"transaction\":");
        write_transaction(at, change, value);
        value.extend_from_slice(b",\"op\":\"");
        value.extend_from_slice(change.operation);
        value.push(b'"');
        value.extend_from_slice(shared.times);
        value.extend_from_slice(if self.head.is_empty() { b"}\n" } else { b"}}\n" });
        Ok(())
    }

    /// Writes the row after the change (for a delete, the deleted row), then the additional fields of flat rows.
    fn write_flat(
        &self,
        at: &At<'_>,
        change: &ChangeView<'_, '_>,
        flat: &FlatKeys,
        row: u32,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let start = out.len();
        if let Some(image) = change.after.or(change.before) {
            self.columns(image, out)?;
        }
        for (key, field) in &flat.fields {
            out.extend_from_slice(key);
            self.write_field(*field, at, change, row, out);
        }
        if let Some(key) = &flat.deleted {
            out.extend_from_slice(key);
            out.extend_from_slice(if change.after.is_none() { b"\"true\"" } else { b"\"false\"" });
        }
        json_object::close(start, out);
        Ok(())
    }

    fn write_field(&self, field: FlatField, at: &At<'_>, change: &ChangeView<'_, '_>, row: u32, out: &mut Vec<u8>) {
        let micros = at.transaction.commit_us;
        match field {
            FlatField::Op => quoted::write(change.operation, out),
            FlatField::Db => quoted::write(self.table.database.as_bytes(), out),
            FlatField::Table => quoted::write(self.table.table.as_bytes(), out),
            FlatField::Gtid => json_object::text_or_null(at.gtid, out),
            FlatField::File => quoted::write(at.transaction.file.as_bytes(), out),
            FlatField::Pos => write_unsigned_integer(at.event.offset, out),
            FlatField::Row => write_unsigned_integer(row.into(), out),
            FlatField::ServerId => write_unsigned_integer(at.event.server_id.into(), out),
            FlatField::Thread => match at.transaction.thread_id {
                Some(id) => write_integer(id, out),
                None => out.extend_from_slice(b"null"),
            },
            FlatField::Snapshot => out.extend_from_slice(if at.snapshot { b"\"true\"" } else { b"\"false\"" }),
            FlatField::TsMs => write_integer(micros.div_euclid(1_000), out),
            FlatField::TsUs => write_integer(micros, out),
            FlatField::TsNs => write_integer(micros.saturating_mul(1_000), out),
        }
    }

    fn image(&self, image: Option<Image<'_, '_>>, out: &mut Vec<u8>) -> Result<()> {
        let Some(image) = image else {
            out.extend_from_slice(b"null");
            return Ok(());
        };
        let start = out.len();
        self.columns(image, out)?;
        json_object::close(start, out);
        Ok(())
    }

    /// Writes the columns that an image has, each with a leading comma.
    fn columns(&self, image: Image<'_, '_>, out: &mut Vec<u8>) -> Result<()> {
        for (field, cell) in self.fields.iter().zip(image) {
            let Some(value) = cell else { continue };
            out.extend_from_slice(&field.key);
            let written = values::write(value, &field.kind, field.traits, out);
            written.map_err(|error| error.within(&format!("column `{}`", field.name)))?;
        }
        Ok(())
    }
}

fn kind_of(row: &Row<'_, '_>) -> MessageKind {
    match (row.before, row.after) {
        (None, _) => MessageKind::Insert,
        (_, None) => MessageKind::Delete,
        _ => MessageKind::Update,
    }
}

/// Writes the transaction's id and the change's number in it, or null if messages have no transaction.
fn write_transaction(at: &At<'_>, change: &ChangeView<'_, '_>, out: &mut Vec<u8>) {
    let Some(counts) = change.counts else {
        out.extend_from_slice(b"null");
        return;
    };
    out.extend_from_slice(b"{\"id\":");
    quoted::write(transaction_id(at).as_bytes(), out);
    out.extend_from_slice(b",\"total_order\":");
    write_unsigned_integer(counts.total, out);
    out.extend_from_slice(b",\"data_collection_order\":");
    write_unsigned_integer(counts.of_table, out);
    out.push(b'}');
}

/// Writes the time in milliseconds, microseconds and nanoseconds.
fn times(at: &At<'_>, out: &mut Vec<u8>) {
    let micros = at.transaction.commit_us;
    out.extend_from_slice(b",\"ts_ms\":");
    let millis = write_millis(micros, out);
    write_finer_times(micros, millis, out);
}

/// Writes the time in milliseconds and returns the range of its digits in `out`.
fn write_millis(micros: i64, out: &mut Vec<u8>) -> Range<usize> {
    let start = out.len();
    write_integer(micros.div_euclid(1_000), out);
    start..out.len()
}

/// Writes the time in microseconds and nanoseconds. `millis` is the range in `out` of its digits in milliseconds, which
/// both numbers begin with, so that they are copied instead of computed again.
fn write_finer_times(micros: i64, millis: Range<usize>, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"ts_us\":");
    let start = out.len();
    if (1_000..=i64::MAX / 1_000).contains(&micros) {
        out.extend_from_within(millis);
        write_digits(micros.unsigned_abs() % 1_000, 3, out);
        let end = out.len();
        out.extend_from_slice(b",\"ts_ns\":");
        out.extend_from_within(start..end);
        out.extend_from_slice(b"000");
    } else {
        write_integer(micros, out);
        out.extend_from_slice(b",\"ts_ns\":");
        write_integer(micros.saturating_mul(1_000), out);
    }
}

/// Writes the `source` fields that come before the row number.
fn source_head(at: &At<'_>, database: &str, table: Option<&str>, out: &mut Vec<u8>) {
    let micros = at.transaction.commit_us;
    out.extend_from_slice(b"{\"version\":\"");
    out.extend_from_slice(VERSION.as_bytes());
    out.extend_from_slice(b"\",\"connector\":\"");
    out.extend_from_slice(CONNECTOR.as_bytes());
    out.extend_from_slice(b"\",\"name\":");
    quoted::write(at.instance.as_bytes(), out);
    out.extend_from_slice(b",\"ts_ms\":");
    let millis = write_millis(micros, out);
    out.extend_from_slice(b",\"snapshot\":\"");
    out.extend_from_slice(if at.snapshot { b"true" } else { b"false" });
    out.extend_from_slice(b"\",\"db\":");
    quoted::write(database.as_bytes(), out);
    out.extend_from_slice(b",\"sequence\":null");
    write_finer_times(micros, millis, out);
    out.extend_from_slice(b",\"table\":");
    json_object::text_or_null(table.unwrap_or_default(), out);
    out.extend_from_slice(b",\"server_id\":");
    write_unsigned_integer(at.event.server_id.into(), out);
    out.extend_from_slice(b",\"gtid\":");
    json_object::text_or_null(at.gtid, out);
    out.extend_from_slice(b",\"file\":");
    quoted::write(at.transaction.file.as_bytes(), out);
    out.extend_from_slice(b",\"pos\":");
    write_unsigned_integer(at.event.offset, out);
    out.extend_from_slice(b",\"row\":");
}

/// Writes the index of the row within its event, then the remaining fields of the `source` block.
fn source_tail(at: &At<'_>, row: u32, out: &mut Vec<u8>) {
    write_unsigned_integer(row.into(), out);
    out.extend_from_slice(b",\"thread\":");
    match at.transaction.thread_id {
        Some(id) => write_integer(id, out),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(b",\"query\":null}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copied_digits_of_times_equal_computed_ones() {
        let bound = i64::MAX / 1_000;
        let random = (1..=2_000_i64).map(|step| step.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64) >> (step % 63));
        let edges = [0, 1, 999, 1_000, 1_001, 999_999, 1_700_000_000_000_007, bound, bound + 1, i64::MAX];
        for micros in edges.into_iter().chain(random).flat_map(|micros| [micros, micros.wrapping_neg()]) {
            let mut out = b"before".to_vec();
            let millis = write_millis(micros, &mut out);
            write_finer_times(micros, millis, &mut out);
            let (ms, ns) = (micros.div_euclid(1_000), micros.saturating_mul(1_000));
            let expected = format!("before{ms},\"ts_us\":{micros},\"ts_ns\":{ns}");
            assert_eq!(String::from_utf8(out).expect("ASCII"), expected);
        }
    }
}
