//! Penstock's own JSON: the source of a change, and the row before and after the change, with values as the server's
//! client shows them. A change of the primary key is written as the delete of a row and the insert of another, because
//! consumers identify rows by their key.

use std::sync::Arc;

use crate::column::{client_text, quoted, write_integer, write_unsigned_integer, Kind};
use crate::emit::dialect::{
    json_object, walk, At, Dialect, End, Image, Images, StatementKind, StatementView, TableView, TableWriter,
};
use crate::emit::messages::{MessageKind, Messages};
use crate::error::Result;
use crate::shard::SLOT_ALL;

/// The dialect `json`, as the module's description explains.
pub struct JsonRows;

impl Dialect for JsonRows {
    type Writer = Writer;

    fn table(&self, table: Arc<TableView>) -> Result<Writer> {
        let fields = table.columns.iter().map(|column| Field {
            key: json_object::key(&column.name),
            kind: column.kind.clone(),
            name: column.name.clone(),
        });
        let mut head = b"{\"database\":".to_vec();
        quoted::write(table.database.as_bytes(), &mut head);
        head.extend_from_slice(b",\"table\":");
        quoted::write(table.table.as_bytes(), &mut head);
        Ok(Writer { head, fields: fields.collect(), table })
    }

    fn begin(&mut self, _at: &At<'_>, _out: &mut Messages) -> Result<()> {
        Ok(())
    }

    fn statement(&mut self, at: &At<'_>, statement: &StatementView<'_>, out: &mut Messages) -> Result<()> {
        if statement.kind != StatementKind::Definition {
            return Ok(());
        }
        let value = &mut out.value;
        value.extend_from_slice(b"{\"database\":");
        json_object::text_or_null(statement.database, value);
        value.extend_from_slice(b",\"table\":null,\"change\":\"statement\",\"statement\":");
        quoted::write(statement.text.as_bytes(), value);
        write_position(at, 0, value);
        value.extend_from_slice(b"}\n");
        out.close(MessageKind::Statement, SLOT_ALL, 0)
    }

    fn end(&mut self, _at: &At<'_>, _end: End<'_>, out: &mut Messages) -> Result<()> {
        out.close(MessageKind::End, SLOT_ALL, 0)
    }
}

struct Field {
    key: Box<[u8]>,
    kind: Kind,
    name: Arc<str>,
}

/// Writes the rows of a table.
pub struct Writer {
    /// The part of the message before the change.
    head: Vec<u8>,
    fields: Vec<Field>,
    table: Arc<TableView>,
}

impl TableWriter for Writer {
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()> {
        while let Some(row) = rows.next()? {
            match (row.before, row.after) {
                (Some(before), Some(after)) if walk::changes_key(&self.table, before, after) => {
                    self.write_change(at, row.index, row.before, None, out)?;
                    // Count the change once: with the message for the new row.
                    out.close(MessageKind::Delete, row.slot_before?, 0)?;
                    self.write_change(at, row.index, None, row.after, out)?;
                    out.close(MessageKind::Insert, row.slot, 1)?;
                }
                (before, after) => {
                    let kind = self.write_change(at, row.index, before, after, out)?;
                    out.close(kind, row.slot, 1)?;
                }
            }
        }
        Ok(())
    }
}

impl Writer {
    fn write_change(
        &self,
        at: &At<'_>,
        index: u32,
        before: Option<Image<'_, '_>>,
        after: Option<Image<'_, '_>>,
        out: &mut Messages,
    ) -> Result<MessageKind> {
        let (kind, name) = match (before, after) {
            (None, _) => (MessageKind::Insert, "insert"),
            (_, None) => (MessageKind::Delete, "delete"),
            _ => (MessageKind::Update, "update"),
        };
        let value = &mut out.value;
        value.extend_from_slice(&self.head);
        value.extend_from_slice(b",\"change\":\"");
        value.extend_from_slice(name.as_bytes());
        value.extend_from_slice(if at.snapshot { b"\",\"snapshot\":true" } else { b"\",\"snapshot\":false" });
        write_position(at, index, value);
        value.extend_from_slice(b",\"before\":");
        self.image(before, value)?;
        value.extend_from_slice(b",\"after\":");
        self.image(after, value)?;
        value.extend_from_slice(b"}\n");
        Ok(kind)
    }

    fn image(&self, image: Option<Image<'_, '_>>, out: &mut Vec<u8>) -> Result<()> {
        let Some(image) = image else {
            out.extend_from_slice(b"null");
            return Ok(());
        };
        let start = out.len();
        for (field, cell) in self.fields.iter().zip(image) {
            let Some(value) = cell else { continue };
            out.extend_from_slice(&field.key);
            let written = value.write_shown(&field.kind, out);
            written.map_err(|error| error.within(&format!("column `{}`", field.name)))?;
        }
        json_object::close(start, out);
        Ok(())
    }
}

/// Writes the position of a change in its log, and the time of its commit (in UTC).
fn write_position(at: &At<'_>, row: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"instance\":");
    quoted::write(at.instance.as_bytes(), out);
    out.extend_from_slice(b",\"commit_version\":");
    write_integer(at.transaction.commit_version, out);
    out.extend_from_slice(b",\"commit_timestamp\":\"");
    client_text::datetime(at.transaction.commit_us, out);
    out.extend_from_slice(b"\",\"gtid\":");
    json_object::text_or_null(at.gtid, out);
    out.extend_from_slice(b",\"file\":");
    quoted::write(at.transaction.file.as_bytes(), out);
    out.extend_from_slice(b",\"offset\":");
    write_unsigned_integer(at.event.offset, out);
    out.extend_from_slice(b",\"row\":");
    write_unsigned_integer(row.into(), out);
}
