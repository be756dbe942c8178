//! Canal's flat messages: a JSON object for each rows event or statement, with keys in alphabetical order.
//!
//! `id` is the commit version, which is the same for all messages of a transaction, and `ts` is the commit time, so a
//! message does not depend on when it is written.

use std::sync::Arc;

use super::columns::FlatColumn;
use crate::column::{quoted, write_integer};
use crate::emit::dialect::ddl::classify;
use crate::emit::dialect::{
    At, Dialect, DialectOptions, End, Image, Images, JsonStyle, StatementKind, StatementView, TableView, TableWriter,
};
use crate::emit::messages::{MessageKind, Messages};
use crate::error::Result;
use crate::event::Change;
use crate::shard::SLOT_ALL;

/// Canal's flat messages.
pub struct CanalFlat {
    message_per_row: bool,
    zone_seconds: i32,
}

impl CanalFlat {
    /// Creates the dialect with these options.
    pub fn new(options: &DialectOptions) -> CanalFlat {
        CanalFlat { message_per_row: options.message_per_row, zone_seconds: options.server_zone_seconds }
    }
}

fn string(text: &str, out: &mut Vec<u8>) {
    quoted::write(text.as_bytes(), out);
}

/// The origin of a message and its type.
struct MessageHead<'a> {
    database: &'a str,
    table: &'a str,
    kind: &'a str,
    is_ddl: bool,
    sql: &'a str,
}

/// Writes the fields from `database` to `isDdl`.
fn first_part(at: &At<'_>, head: &MessageHead<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"database\":");
    string(head.database, out);
    out.extend_from_slice(b",\"es\":");
    write_integer(i64::from(at.event.timestamp) * 1000, out);
    out.extend_from_slice(b",\"gtid\":");
    string(at.gtid_set, out);
    out.extend_from_slice(b",\"id\":");
    write_integer(at.transaction.commit_version, out);
    out.extend_from_slice(if head.is_ddl { b",\"isDdl\":true" } else { b",\"isDdl\":false" });
}

/// Writes everything after `sqlType`.
fn last_part(at: &At<'_>, head: &MessageHead<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"table\":");
    string(head.table, out);
    out.extend_from_slice(b",\"ts\":");
    write_integer(at.transaction.commit_us.div_euclid(1000), out);
    out.extend_from_slice(b",\"type\":");
    string(head.kind, out);
    out.extend_from_slice(b"}\n");
}

/// Writes a message without rows.
fn write_message(at: &At<'_>, head: &MessageHead<'_>, out: &mut Messages) -> Result<()> {
    let value = &mut out.value;
    value.extend_from_slice(b"{\"data\":null");
    first_part(at, head, value);
    value.extend_from_slice(b",\"mysqlType\":null,\"old\":null,\"pkNames\":null,\"sql\":");
    string(head.sql, value);
    value.extend_from_slice(b",\"sqlType\":null");
    last_part(at, head, value);
    out.close(MessageKind::Statement, SLOT_ALL, 0)
}

impl Dialect for CanalFlat {
    type Writer = FlatTable;

    fn table(&self, table: Arc<TableView>) -> Result<FlatTable> {
        let keys: Vec<&str> = table.key_names().collect();
        let mut key_names = Vec::new();
        if keys.is_empty() {
            key_names.extend_from_slice(b"null");
        } else {
            for (index, name) in keys.iter().enumerate() {
                key_names.push(if index == 0 { b'[' } else { b',' });
                string(name, &mut key_names);
            }
            key_names.push(b']');
        }
        Ok(FlatTable {
            columns: table.columns.iter().map(|column| FlatColumn::new(column, self.zone_seconds)).collect(),
            key_names,
            message_per_row: self.message_per_row,
            table,
        })
    }

    fn json_style(&self) -> JsonStyle {
        JsonStyle::Canal
    }

    fn begin(&mut self, _at: &At<'_>, _out: &mut Messages) -> Result<()> {
        Ok(())
    }

    fn statement(&mut self, at: &At<'_>, statement: &StatementView<'_>, out: &mut Messages) -> Result<()> {
        let outcome = match statement.kind {
            StatementKind::Definition => {
                let definition = classify(statement.text, statement.database, statement.backslash);
                let (database, table) = (&*definition.database, &*definition.table);
                let head =
                    MessageHead { database, table, kind: definition.kind.name(), is_ddl: true, sql: statement.text };
                return write_message(at, &head, out);
            }
            StatementKind::XaCommit => "XACOMMIT",
        };
        write_message(
            at,
            &MessageHead { database: "", table: "", kind: outcome, is_ddl: false, sql: statement.text },
            out,
        )
    }

    fn rows_query(&mut self, at: &At<'_>, text: &str, out: &mut Messages) -> Result<()> {
        write_message(at, &MessageHead { database: "", table: "", kind: "QUERY", is_ddl: false, sql: text }, out)
    }

    fn end(&mut self, _at: &At<'_>, _end: End<'_>, out: &mut Messages) -> Result<()> {
        out.close(MessageKind::End, SLOT_ALL, 0)
    }
}

/// Writes the rows of a table as flat messages.
pub struct FlatTable {
    table: Arc<TableView>,
    columns: Vec<FlatColumn>,
    key_names: Vec<u8>,
    message_per_row: bool,
}

/// The rows of the current message.
#[derive(Default)]
struct Rows {
    data: Vec<u8>,
    old: Vec<u8>,
    /// The SQL type of each column, from the last row that has the column.
    types: Vec<Option<i64>>,
    slot: Option<i16>,
    count: u32,
}

impl FlatTable {
    /// Writes an image as an object; `is_included` selects its columns.
    fn object(
        &self,
        image: Image<'_, '_>,
        out: &mut Vec<u8>,
        mut is_included: impl FnMut(usize) -> Result<bool>,
    ) -> Result<()> {
        let start = out.len();
        for (index, (column, value)) in self.columns.iter().zip(image).enumerate() {
            let Some(value) = value else { continue };
            if is_included(index)? {
                out.push(if out.len() == start { b'{' } else { b',' });
                column.write(value, out)?;
            }
        }
        if out.len() == start {
            out.push(b'{');
        }
        out.push(b'}');
        Ok(())
    }

    fn close(&self, at: &At<'_>, change: Change, rows: &mut Rows, out: &mut Messages) -> Result<()> {
        let kind = match change {
            Change::Insert => "INSERT",
            Change::Update => "UPDATE",
            Change::Delete => "DELETE",
        };
        let (database, table) = (&*self.table.database, &*self.table.table);
        let head = MessageHead { database, table, kind, is_ddl: false, sql: "" };
        let value = &mut out.value;
        value.extend_from_slice(b"{\"data\":[");
        value.append(&mut rows.data);
        value.push(b']');
        first_part(at, &head, value);
        value.extend_from_slice(b",\"mysqlType\":");
        self.each_column(rows, value, |column, _, out| out.extend_from_slice(&column.type_text));
        if change == Change::Update {
            value.extend_from_slice(b",\"old\":[");
            value.append(&mut rows.old);
            value.extend_from_slice(b"],\"pkNames\":");
        } else {
            value.extend_from_slice(b",\"old\":null,\"pkNames\":");
        }
        value.extend_from_slice(&self.key_names);
        value.extend_from_slice(b",\"sql\":\"\",\"sqlType\":");
        self.each_column(rows, value, |_, sql_type, out| write_integer(sql_type, out));
        last_part(at, &head, value);
        let (slot, count) = (rows.slot.take().unwrap_or(SLOT_ALL), std::mem::take(&mut rows.count));
        rows.types.clear();
        out.close(change.into(), slot, count)
    }

    /// Writes an object with a member for each column that occurs in a row of the message.
    fn each_column(&self, rows: &Rows, out: &mut Vec<u8>, write: impl Fn(&FlatColumn, i64, &mut Vec<u8>)) {
        let start = out.len();
        for (column, sql_type) in self.columns.iter().zip(&rows.types) {
            let Some(sql_type) = sql_type else { continue };
            out.push(if out.len() == start { b'{' } else { b',' });
            out.extend_from_slice(&column.key);
            write(column, *sql_type, out);
        }
        if out.len() == start {
            out.push(b'{');
        }
        out.push(b'}');
    }
}

impl TableWriter for FlatTable {
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()> {
        let change = rows.change();
        let mut pending =
            Rows { data: std::mem::take(&mut out.data), old: std::mem::take(&mut out.scratch), ..Rows::default() };
        pending.data.clear();
        pending.old.clear();
        while let Some(row) = rows.next()? {
            if pending.count > 0 {
                pending.data.push(b',');
                pending.old.push(b',');
            }
            pending.types.resize(self.columns.len(), None);
            let Some(image) = row.after.or(row.before) else { continue };
            for ((column, value), sql_type) in self.columns.iter().zip(image).zip(&mut pending.types) {
                if let Some(value) = value {
                    *sql_type = Some(column.sql_type(value));
                }
            }
            self.object(image, &mut pending.data, |_| Ok(true))?;
            if let (Some(before), Some(after)) = (row.before, row.after) {
                self.object(before, &mut pending.old, |index| {
                    let (Some(column), Some(Some(after))) = (self.columns.get(index), after.get(index)) else {
                        return Ok(false);
                    };
                    column.differs(before.get(index).and_then(Option::as_ref), after)
                })?;
            }
            pending.count += 1;
            pending.slot = match pending.slot {
                Some(slot) if slot != row.slot => Some(SLOT_ALL),
                _ => Some(row.slot),
            };
            if self.message_per_row {
                self.close(at, change, &mut pending, out)?;
            }
        }
        if pending.count > 0 {
            self.close(at, change, &mut pending, out)?;
        }
        pending.old.clear();
        (out.data, out.scratch) = (pending.data, pending.old);
        Ok(())
    }
}
