//! Maxwell's messages: the row after its change (before a delete), and for an update the previous values of changed
//! columns.
//!
//! A message has the number of its transaction, which the log contains only at the end of the transaction. The messages
//! of the open transaction are therefore rewritten at its end. If a transaction exceeds the memory limit, some of its
//! messages are emitted before its end, without the number.

pub(super) mod values;

use std::sync::Arc;

use memchr::memmem;

use crate::column::{quoted, write_integer, write_unsigned_integer, Kind};
use crate::emit::dialect::ddl::{definitions, Definition, DefinitionKind};
use crate::emit::dialect::{
    json_object, At, Dialect, End, Image, Images, Row, StatementKind, StatementView, TableView, TableWriter,
};
use crate::emit::messages::{MessageKind, Messages};
use crate::error::Result;
use crate::shard::SLOT_ALL;

const STATEMENT: i8 = MessageKind::Statement as i8;

/// The text that follows the number of the transaction. Inside a JSON string, the quotes of this text would be escaped,
/// so its first occurrence in a message is the field itself.
const POSITION: &[u8] = b",\"position\":";

/// Maxwell's dialect, as the module's description explains.
pub struct Maxwell;

impl Dialect for Maxwell {
    type Writer = Writer;

    fn table(&self, table: Arc<TableView>) -> Result<Writer> {
        let columns = table.columns.iter().map(|column| Field {
            key: json_object::key(&column.name),
            kind: column.kind.clone(),
            name: column.name.clone(),
        });
        let mut head = b"{\"database\":".to_vec();
        quoted::write(table.database.as_bytes(), &mut head);
        head.extend_from_slice(b",\"table\":");
        quoted::write(table.table.as_bytes(), &mut head);
        head.extend_from_slice(b",\"type\":\"");
        Ok(Writer { head, fields: columns.collect() })
    }

    fn marks_last_row(&self) -> bool {
        true
    }

    fn begin(&mut self, _at: &At<'_>, _out: &mut Messages) -> Result<()> {
        Ok(())
    }

    fn statement(&mut self, at: &At<'_>, statement: &StatementView<'_>, out: &mut Messages) -> Result<()> {
        if statement.kind != StatementKind::Definition {
            return Ok(());
        }
        for (number, definition) in definitions(statement.text, statement.database, statement.backslash).enumerate() {
            let Some(kind) = kind_name(&definition) else { return Ok(()) };
            let (database, table) = definition.name_before();
            let value = &mut out.value;
            value.extend_from_slice(b"{\"type\":\"");
            value.extend_from_slice(kind.as_bytes());
            value.extend_from_slice(b"\",\"database\":");
            quoted::write(database.as_bytes(), value);
            value.extend_from_slice(b",\"table\":");
            quoted::write(table.as_bytes(), value);
            value.extend_from_slice(b",\"ts\":");
            write_unsigned_integer(u64::from(at.event.timestamp) * 1_000, value);
            value.extend_from_slice(b",\"sql\":");
            match number < WHOLE_TEXTS_MAX {
                true => quoted::write(statement.text.as_bytes(), value),
                false => quoted::write(definition.own_text().as_bytes(), value),
            }
            write_position(at, value);
            value.extend_from_slice(b"}\n");
            out.close(MessageKind::Statement, SLOT_ALL, 0)?;
        }
        Ok(())
    }

    fn end(&mut self, _at: &At<'_>, end: End<'_>, out: &mut Messages) -> Result<()> {
        let xid = match end {
            End::Xid(xid) => Some(xid),
            End::Commit | End::Xa(_) => None,
        };
        let mut offset = out.changes_handed_out();
        out.rewrite_open(|message, kind, is_last, value| {
            let position = match kind {
                STATEMENT => None,
                _ => memmem::find(message, POSITION),
            };
            let Some((before, after)) = position.and_then(|position| message.split_at_checked(position)) else {
                value.extend_from_slice(message);
                return;
            };
            value.extend_from_slice(before);
            if let Some(xid) = xid {
                value.extend_from_slice(b",\"xid\":");
                write_unsigned_integer(xid, value);
            }
            if is_last {
                value.extend_from_slice(b",\"commit\":true");
            } else {
                value.extend_from_slice(b",\"xoffset\":");
                write_unsigned_integer(offset.into(), value);
            }
            value.extend_from_slice(after);
            offset += 1;
        });
        out.close(MessageKind::End, SLOT_ALL, 0)
    }
}

/// How many messages of one statement contain the statement's whole text. All further messages contain only the part
/// about their table, because the text grows with the number of tables.
const WHOLE_TEXTS_MAX: usize = 100;

/// Returns the type of a DDL statement; None if Maxwell does not report it.
fn kind_name(definition: &Definition<'_>) -> Option<&'static str> {
    match definition.kind {
        _ if definition.alters => Some("table-alter"),
        DefinitionKind::Create => Some("table-create"),
        DefinitionKind::Rename => Some("table-alter"),
        DefinitionKind::Erase => Some("table-drop"),
        _ => None,
    }
}

struct Field {
    key: Box<[u8]>,
    kind: Kind,
    name: Arc<str>,
}

/// Writes the rows of a table.
pub struct Writer {
    /// The part of the message before the type.
    head: Vec<u8>,
    fields: Vec<Field>,
}

impl TableWriter for Writer {
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()> {
        while let Some(row) = rows.next()? {
            let kind = self.write_message(at, &row, &mut out.value)?;
            out.close(kind, row.slot, 1)?;
        }
        Ok(())
    }
}

impl Writer {
    fn write_message(&self, at: &At<'_>, row: &Row<'_, '_>, out: &mut Vec<u8>) -> Result<MessageKind> {
        let (kind, name, data, old) = match (row.before, row.after) {
            (None, after) if at.snapshot => (MessageKind::Insert, &b"bootstrap-insert"[..], after, None),
            (None, after) => (MessageKind::Insert, &b"insert"[..], after, None),
            (before, None) => (MessageKind::Delete, &b"delete"[..], before, None),
            (before, after) => (MessageKind::Update, &b"update"[..], after, before),
        };
        out.extend_from_slice(&self.head);
        out.extend_from_slice(name);
        out.extend_from_slice(b"\",\"ts\":");
        write_unsigned_integer(at.event.timestamp.into(), out);
        write_position(at, out);
        out.extend_from_slice(b",\"server_id\":");
        write_unsigned_integer(at.event.server_id.into(), out);
        if let Some(id) = at.transaction.thread_id {
            out.extend_from_slice(b",\"thread_id\":");
            write_integer(id, out);
        }
        out.extend_from_slice(b",\"data\":");
        let (data, old) = (data.unwrap_or_default(), old.unwrap_or_default());
        let start = out.len();
        let missing = |at: usize| data.get(at).is_none_or(Option::is_none);
        self.pairs(data, |_| true, out)?;
        // A column that is present only in the before image did not change, and identifies the row.
        self.pairs(old, missing, out)?;
        json_object::close(start, out);
        let start = out.len();
        self.pairs(old, |at| !missing(at) && old.get(at) != data.get(at), out)?;
        if out.len() > start {
            const OLD: &[u8] = b",\"old\":";
            json_object::close(start, out);
            out.splice(start..start, OLD.iter().copied());
        }
        out.extend_from_slice(b"}\n");
        Ok(kind)
    }

    /// Writes the values of an image for the columns that `is_selected` accepts.
    fn pairs(&self, image: Image<'_, '_>, is_selected: impl Fn(usize) -> bool, out: &mut Vec<u8>) -> Result<()> {
        for (at, (field, cell)) in self.fields.iter().zip(image).enumerate() {
            let Some(value) = cell else { continue };
            if is_selected(at) {
                out.extend_from_slice(&field.key);
                let written = values::write(value, &field.kind, out);
                written.map_err(|error| error.within(&format!("column `{}`", field.name)))?;
            }
        }
        Ok(())
    }
}

/// Writes the position of the event, and the transaction's GTID if it has one.
fn write_position(at: &At<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(POSITION);
    out.push(b'"');
    // A file name may contain any characters; the number and the colon need no escapes.
    let start = out.len();
    out.extend_from_slice(at.transaction.file.as_bytes());
    quoted::escape_from(start, out);
    out.push(b':');
    write_unsigned_integer(at.event.offset, out);
    out.push(b'"');
    if !at.gtid.is_empty() {
        out.extend_from_slice(b",\"gtid\":");
        quoted::write(at.gtid.as_bytes(), out);
    }
}
