//! Canal's entries (`EntryProtocol`), each framed as an element of `Messages`, so that consecutive entries form the
//! body of a response.
//!
//! As in Canal, a rows event becomes an entry. If rows need separate slots, each row becomes an entry. If conditions on
//! rows leave an update with a single image, which is a delete or an insert, the event becomes an entry for each run of
//! rows with the same kind of change.

mod columns;
pub mod flat;
mod values;

use std::sync::Arc;

use columns::CanalColumn;

use crate::emit::dialect::ddl::{classify, Definition};
use crate::emit::dialect::{
    protobuf as pb, At, Dialect, DialectOptions, End, Images, JsonStyle, Row, StatementKind, StatementView, TableView,
    TableWriter,
};
use crate::emit::messages::{MessageKind, Messages};
use crate::error::Result;
use crate::event::Change;
use crate::shard::SLOT_ALL;

/// `Messages.messages`.
const MESSAGES_FIELD: u32 = 2;

/// `EntryType`.
const TRANSACTION_BEGIN: u64 = 1;
const ROW_DATA: u64 = 2;
const TRANSACTION_END: u64 = 3;

/// `Type.MYSQL`.
const SOURCE_MYSQL: u64 = 2;

/// `EventType` numbers of row changes and XA transactions; the numbers of statements are in `ddl`.
const INSERT: u64 = 1;
const UPDATE: u64 = 2;
const DELETE: u64 = 3;
const QUERY: u64 = 7;
const XA_COMMIT: u64 = 13;

/// Canal's dialect.
pub struct Canal {
    message_per_row: bool,
    zone_seconds: i32,
}

impl Canal {
    /// Creates the dialect with these options.
    pub fn new(options: &DialectOptions) -> Canal {
        Canal { message_per_row: options.message_per_row, zone_seconds: options.server_zone_seconds }
    }
}

/// The fields of a header except the position.
struct Head<'a> {
    schema: &'a str,
    table: &'a str,
    event_type: Option<u64>,
    rows: Option<u32>,
}

const NOBODY: Head<'_> = Head { schema: "", table: "", event_type: None, rows: None };

fn pair(field: u32, key: &str, value: &str, out: &mut Vec<u8>) {
    let start = pb::open(field, out);
    pb::bytes(1, key.as_bytes(), out);
    pb::text(2, value, out);
    pb::close(start, out);
}

fn number_pair(field: u32, key: &str, value: i64, out: &mut Vec<u8>) {
    let start = pb::open(field, out);
    pb::bytes(1, key.as_bytes(), out);
    let text = pb::open(2, out);
    crate::column::write_integer(value, out);
    pb::close(text, out);
    pb::close(start, out);
}

fn header(at: &At<'_>, head: &Head<'_>, out: &mut Vec<u8>) {
    let start = pb::open(1, out);
    pb::number(1, 1, out);
    pb::text(2, &at.transaction.file, out);
    pb::signed_unless_zero(3, at.event.offset as i64, out);
    pb::signed_unless_zero(4, i64::from(at.event.server_id), out);
    pb::bytes(5, b"UTF-8", out);
    pb::signed_unless_zero(6, i64::from(at.event.timestamp) * 1000, out);
    pb::number(7, SOURCE_MYSQL, out);
    pb::text(8, head.schema, out);
    pb::text(9, head.table, out);
    let length = at.event.end_offset.saturating_sub(at.event.offset);
    pb::signed_unless_zero(10, length as i64, out);
    if let Some(event_type) = head.event_type {
        pb::number(11, event_type, out);
    }
    if !at.gtid.is_empty() {
        pair(12, "curtGtid", at.gtid, out);
        if let Some((last_committed, sequence_number)) = at.transaction.clock {
            number_pair(12, "curtGtidSn", sequence_number, out);
            number_pair(12, "curtGtidLct", last_committed, out);
        }
    }
    if let Some(rows) = head.rows {
        number_pair(12, "rowsCount", i64::from(rows), out);
    }
    pb::text(13, at.gtid_set, out);
    pb::close(start, out);
}

/// Writes an entry; `store` is its body, in two parts.
fn entry(at: &At<'_>, head: &Head<'_>, entry_type: u64, store: [&[u8]; 2], out: &mut Vec<u8>) {
    let start = pb::open(MESSAGES_FIELD, out);
    header(at, head, out);
    pb::number(2, entry_type, out);
    let [first, second] = store;
    let length = first.len() + second.len();
    if length > 0 {
        out.push(3 << 3 | 2);
        pb::varint(length as u64, out);
    }
    pb::close_before(start, length, out);
    out.extend_from_slice(first);
    out.extend_from_slice(second);
}

/// Writes an entry with a body from `write`, and closes its message.
fn small_entry(
    at: &At<'_>,
    head: &Head<'_>,
    entry_type: u64,
    kind: MessageKind,
    out: &mut Messages,
    write: impl FnOnce(&mut Vec<u8>),
) -> Result<()> {
    let mut store = std::mem::take(&mut out.scratch);
    write(&mut store);
    entry(at, head, entry_type, [&store, &[]], &mut out.value);
    store.clear();
    out.scratch = store;
    out.close(kind, SLOT_ALL, 0)
}

fn xa_props(field: u32, kind: &str, at: &At<'_>, store: &mut Vec<u8>) {
    if let Some(id) = at.xa_id {
        pair(field, "XA_TYPE", kind, store);
        // Canal removes the statement's keywords but keeps the blank after them.
        pair(field, "XA_XID", &format!(" {id}"), store);
    }
}

impl Dialect for Canal {
    type Writer = CanalTable;

    fn table(&self, table: Arc<TableView>) -> Result<CanalTable> {
        let columns = table.columns.iter().enumerate();
        let columns = columns.map(|(index, column)| CanalColumn::new(index, column, self.zone_seconds)).collect();
        Ok(CanalTable { columns, message_per_row: self.message_per_row, table })
    }

    fn json_style(&self) -> JsonStyle {
        JsonStyle::Canal
    }

    fn splits_updates(&self) -> bool {
        true
    }

    fn begin(&mut self, at: &At<'_>, out: &mut Messages) -> Result<()> {
        small_entry(at, &NOBODY, TRANSACTION_BEGIN, MessageKind::Begin, out, |store| {
            xa_props(3, "XA START", at, store);
            pb::signed_unless_zero(4, at.transaction.thread_id.unwrap_or(0), store);
        })
    }

    fn statement(&mut self, at: &At<'_>, statement: &StatementView<'_>, out: &mut Messages) -> Result<()> {
        let outcome = match statement.kind {
            StatementKind::Definition => {
                let definition = classify(statement.text, statement.database, statement.backslash);
                return write_definition(at, statement, &definition, out);
            }
            StatementKind::XaCommit => (XA_COMMIT, "XA COMMIT"),
        };
        let head = Head { event_type: Some(outcome.0), ..NOBODY };
        small_entry(at, &head, ROW_DATA, MessageKind::Statement, out, |store| {
            pb::number(2, outcome.0, store);
            pb::text(11, statement.text, store);
            xa_props(13, outcome.1, at, store);
        })
    }

    fn rows_query(&mut self, at: &At<'_>, text: &str, out: &mut Messages) -> Result<()> {
        let head = Head { event_type: Some(QUERY), ..NOBODY };
        small_entry(at, &head, ROW_DATA, MessageKind::Statement, out, |store| {
            pb::number(2, QUERY, store);
            pb::text(11, text, store);
        })
    }

    fn end(&mut self, at: &At<'_>, end: End<'_>, out: &mut Messages) -> Result<()> {
        small_entry(at, &NOBODY, TRANSACTION_END, MessageKind::End, out, |store| match end {
            End::Xid(number) => {
                let text = pb::open(2, store);
                crate::column::write_unsigned_integer(number, store);
                pb::close(text, store);
            }
            End::Commit => pb::text(2, "0", store),
            End::Xa(_) => {
                pb::text(2, "0", store);
                xa_props(3, "XA END", at, store);
            }
        })
    }
}

fn write_definition(
    at: &At<'_>,
    statement: &StatementView<'_>,
    definition: &Definition<'_>,
    out: &mut Messages,
) -> Result<()> {
    let event_type = definition.kind.number();
    let head = Head { schema: &definition.database, table: &definition.table, event_type: Some(event_type), ..NOBODY };
    small_entry(at, &head, ROW_DATA, MessageKind::Statement, out, |store| {
        pb::number(2, event_type, store);
        pb::number(10, 1, store);
        pb::text(11, statement.text, store);
        pb::text(14, statement.database, store);
    })
}

/// Writes the rows of a table as entries.
pub struct CanalTable {
    table: Arc<TableView>,
    columns: Vec<CanalColumn>,
    message_per_row: bool,
}

impl CanalTable {
    /// Writes a `RowData`.
    fn row(&self, row: &Row<'_, '_>, out: &mut Vec<u8>) -> Result<()> {
        let start = pb::open(12, out);
        if let Some(image) = row.before {
            for (column, value) in self.columns.iter().zip(image) {
                if let Some(value) = value {
                    column.write(1, value, false, out)?;
                }
            }
        }
        match (row.before, row.after) {
            (None, Some(image)) => {
                for (column, value) in self.columns.iter().zip(image) {
                    if let Some(value) = value {
                        column.write(2, value, true, out)?;
                    }
                }
            }
            (Some(before), Some(image)) => {
                for ((column, value), before) in self.columns.iter().zip(image).zip(before) {
                    if let Some(value) = value {
                        column.write(2, value, column.differs(before.as_ref(), value)?, out)?;
                    }
                }
            }
            (_, None) => {}
        }
        pb::close(start, out);
        Ok(())
    }

    fn close(
        &self,
        at: &At<'_>,
        (change, table_id): (Change, u64),
        (slot, rows): (i16, u32),
        data: &[u8],
        out: &mut Messages,
    ) -> Result<()> {
        let event_type = match change {
            Change::Insert => INSERT,
            Change::Update => UPDATE,
            Change::Delete => DELETE,
        };
        let mut front = std::mem::take(&mut out.scratch);
        pb::signed_unless_zero(1, i64::from_ne_bytes(table_id.to_ne_bytes()), &mut front);
        pb::number(2, event_type, &mut front);
        pb::number(10, 0, &mut front);
        let head = Head {
            schema: &self.table.database,
            table: &self.table.table,
            event_type: Some(event_type),
            rows: Some(rows),
        };
        entry(at, &head, ROW_DATA, [&front, data], &mut out.value);
        front.clear();
        out.scratch = front;
        out.close(change.into(), slot, rows)
    }
}

impl TableWriter for CanalTable {
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()> {
        let table_id = rows.table_id();
        let mut data = std::mem::take(&mut out.data);
        data.clear();
        // The kind, the slot and the number of the rows in `data`.
        let mut run: Option<(Change, i16, u32)> = None;
        while let Some(row) = rows.next()? {
            let (change, row_slot) = (row.change(), row.slot);
            if let Some((kind, slot, count)) = run {
                if self.message_per_row || kind != change {
                    self.close(at, (kind, table_id), (slot, count), &data, out)?;
                    data.clear();
                    run = None;
                }
            }
            self.row(&row, &mut data)?;
            run = Some(match run {
                None => (change, row_slot, 1),
                Some((_, slot, count)) => (change, if slot == row_slot { slot } else { SLOT_ALL }, count + 1),
            });
        }
        if let Some((kind, slot, count)) = run {
            self.close(at, (kind, table_id), (slot, count), &data, out)?;
        }
        out.data = data;
        Ok(())
    }
}
