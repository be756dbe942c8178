//! Canal's flat messages: one JSON object for each rows event or statement, with its keys in the order of the alphabet.
//!
//! `id` is the commit version, which is the same for all messages of a transaction, and `ts` the time of the commit: a
//! message says the same whenever it is made.

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
    /// With the choices made.
    pub fn new(options: &DialectOptions) -> CanalFlat {
        CanalFlat { message_per_row: options.message_per_row, zone_seconds: options.server_zone_seconds }
    }
}

fn string(text: &str, out: &mut Vec<u8>) {
    quoted::write(text.as_bytes(), out);
}

/// What one message says of where it comes from, and of what it is.
struct Told<'a> {
    database: &'a str,
    table: &'a str,
    kind: &'a str,
    is_ddl: bool,
    sql: &'a str,
}

/// Adds everything from `database` to `isDdl`.
fn first_part(at: &At<'_>, told: &Told<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"database\":");
    string(told.database, out);
    out.extend_from_slice(b",\"es\":");
    write_integer(i64::from(at.event.timestamp) * 1000, out);
    out.extend_from_slice(b",\"gtid\":");
    string(at.gtid_set, out);
    out.extend_from_slice(b",\"id\":");
    write_integer(at.transaction.commit_version, out);
    out.extend_from_slice(if told.is_ddl { b",\"isDdl\":true" } else { b",\"isDdl\":false" });
}

/// Adds everything behind `sqlType`.
fn last_part(at: &At<'_>, told: &Told<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"table\":");
    string(told.table, out);
    out.extend_from_slice(b",\"ts\":");
    write_integer(at.transaction.commit_us.div_euclid(1000), out);
    out.extend_from_slice(b",\"type\":");
    string(told.kind, out);
    out.extend_from_slice(b"}\n");
}

/// Adds a message without rows.
fn tell(at: &At<'_>, told: &Told<'_>, out: &mut Messages) -> Result<()> {
    let value = &mut out.value;
    value.extend_from_slice(b"{\"data\":null");
    first_part(at, told, value);
    value.extend_from_slice(b",\"mysqlType\":null,\"old\":null,\"pkNames\":null,\"sql\":");
    string(told.sql, value);
    value.extend_from_slice(b",\"sqlType\":null");
    last_part(at, told, value);
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
                let found = classify(statement.text, statement.database, statement.backslash);
                let (database, table) = (&*found.database, &*found.table);
                let told = Told { database, table, kind: found.kind.name(), is_ddl: true, sql: statement.text };
                return tell(at, &told, out);
            }
            StatementKind::XaCommit => "XACOMMIT",
        };
        tell(at, &Told { database: "", table: "", kind: outcome, is_ddl: false, sql: statement.text }, out)
    }

    fn rows_query(&mut self, at: &At<'_>, text: &str, out: &mut Messages) -> Result<()> {
        tell(at, &Told { database: "", table: "", kind: "QUERY", is_ddl: false, sql: text }, out)
    }

    fn end(&mut self, _at: &At<'_>, _end: End<'_>, out: &mut Messages) -> Result<()> {
        out.close(MessageKind::End, SLOT_ALL, 0)
    }
}

/// One table's rows as flat messages.
pub struct FlatTable {
    table: Arc<TableView>,
    columns: Vec<FlatColumn>,
    key_names: Vec<u8>,
    message_per_row: bool,
}

/// The rows of a message in the making.
#[derive(Default)]
struct Rows {
    data: Vec<u8>,
    old: Vec<u8>,
    /// The SQL type of each column in the last row that has it.
    types: Vec<Option<i64>>,
    slot: Option<i16>,
    count: u32,
}

impl FlatTable {
    /// Adds one image as an object; `told` says which of its columns.
    fn object(
        &self,
        image: Image<'_, '_>,
        out: &mut Vec<u8>,
        mut told: impl FnMut(usize) -> Result<bool>,
    ) -> Result<()> {
        let start = out.len();
        for (index, (column, value)) in self.columns.iter().zip(image).enumerate() {
            let Some(value) = value else { continue };
            if told(index)? {
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
        let told = Told { database, table, kind, is_ddl: false, sql: "" };
        let value = &mut out.value;
        value.extend_from_slice(b"{\"data\":[");
        value.append(&mut rows.data);
        value.push(b']');
        first_part(at, &told, value);
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
        last_part(at, &told, value);
        let (slot, count) = (rows.slot.take().unwrap_or(SLOT_ALL), std::mem::take(&mut rows.count));
        rows.types.clear();
        out.close(change.into(), slot, count)
    }

    /// Adds an object with a member for each column that a row of the message has.
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
        let mut told =
            Rows { data: std::mem::take(&mut out.data), old: std::mem::take(&mut out.scratch), ..Rows::default() };
        told.data.clear();
        told.old.clear();
        while let Some(row) = rows.next()? {
            if told.count > 0 {
                told.data.push(b',');
                told.old.push(b',');
            }
            told.types.resize(self.columns.len(), None);
            let Some(image) = row.after.or(row.before) else { continue };
            for ((column, value), sql_type) in self.columns.iter().zip(image).zip(&mut told.types) {
                if let Some(value) = value {
                    *sql_type = Some(column.sql_type(value));
                }
            }
            self.object(image, &mut told.data, |_| Ok(true))?;
            if let (Some(before), Some(after)) = (row.before, row.after) {
                self.object(before, &mut told.old, |index| {
                    let (Some(column), Some(Some(after))) = (self.columns.get(index), after.get(index)) else {
                        return Ok(false);
                    };
                    column.differs(before.get(index).and_then(Option::as_ref), after)
                })?;
            }
            told.count += 1;
            told.slot = match told.slot {
                Some(slot) if slot != row.slot => Some(SLOT_ALL),
                _ => Some(row.slot),
            };
            if self.message_per_row {
                self.close(at, change, &mut told, out)?;
            }
        }
        if told.count > 0 {
            self.close(at, change, &mut told, out)?;
        }
        told.old.clear();
        (out.data, out.scratch) = (told.data, told.old);
        Ok(())
    }
}
