//! Ptubes' events (`RdsPacket`), each framed as an element of `RdsMessage.messages`.
//!
//! Each row becomes an event, with columns by name. A checkpoint identifies the transaction by its start, and the event
//! by its index in the transaction, counted from 0. The index of the commit follows that of the last change. Columns
//! are in table order.

mod values;

use std::sync::Arc;

use crate::column::{write_integer, Kind, Value};
use crate::emit::dialect::ddl::classify;
use crate::emit::dialect::{
    protobuf as pb, At, Dialect, DialectOptions, End, Image, Images, MessageColumn, StatementKind, StatementView,
    TableView, TableWriter,
};
use crate::emit::messages::{MessageKind, Messages};
use crate::error::Result;
use crate::event::Change;
use crate::gtid::Gtid;
use crate::shard::SLOT_ALL;

/// `RdsMessage.messages`.
const MESSAGES_FIELD: u32 = 3;

/// `EventType`.
const INSERT: u64 = 1;
const UPDATE: u64 = 2;
const DELETE: u64 = 3;
const QUERY: u64 = 7;
const TRANSACTION_END: u64 = 16;
const HEARTBEAT: u64 = 17;

/// Tables whose rows are heartbeats.
const HEARTBEAT_TABLES: [&str; 2] = ["buffalo_heartbeat.heartbeat", "ptubes_heartbeat.heartbeat"];

/// Ptubes' dialect.
pub struct Ptubes {
    zone_seconds: i32,
}

impl Ptubes {
    /// Creates the dialect with these options.
    pub fn new(options: &DialectOptions) -> Ptubes {
        Ptubes { zone_seconds: options.server_zone_seconds }
    }
}

fn checkpoint(at: &At<'_>, index: u32, out: &mut Vec<u8>) {
    let start = pb::open(2, out);
    let number = match &at.transaction.gtid {
        Gtid::Anonymous => 0,
        Gtid::Mysql { number, .. } => {
            let uuid = at.gtid.split(':').next().unwrap_or_default();
            pb::text(1, uuid, out);
            *number
        }
        Gtid::Mariadb { sequence, .. } => *sequence,
    };
    pb::signed_unless_zero(2, i64::from_ne_bytes(number.to_ne_bytes()), out);
    pb::signed_unless_zero(3, i64::from(index), out);
    // An int32 in the protocol: server ids above its range become negative.
    pb::signed_unless_zero(4, i64::from(at.event.server_id as i32), out);
    pb::signed_unless_zero(5, i64::from(at.file_number()), out);
    pb::signed_unless_zero(6, at.transaction.start as i64, out);
    pb::signed_unless_zero(7, at.transaction.commit_us.div_euclid(1000), out);
    pb::close(start, out);
}

fn pair(field: u32, key: &str, write: impl FnOnce(&mut Vec<u8>), out: &mut Vec<u8>) {
    let start = pb::open(field, out);
    pb::bytes(1, key.as_bytes(), out);
    let value = pb::open(2, out);
    write(out);
    pb::close(value, out);
    pb::close(start, out);
}

/// Writes an event's header; `keys` are the partition key and the primary key.
fn header(at: &At<'_>, index: u32, table: &str, [partition, primary]: [&str; 2], out: &mut Vec<u8>) {
    let millis = i64::from(at.event.timestamp) * 1000;
    let start = pb::open(1, out);
    checkpoint(at, index, out);
    pb::bytes(3, b"PROTOCOL_BUFFER", out);
    pb::signed_unless_zero(4, millis, out);
    pb::text(6, table, out);
    pb::text(8, partition, out);
    pair(9, "sourceIP", |out| out.extend_from_slice(at.instance.as_bytes()), out);
    pair(9, "replicatorInboundTS", |out| write_integer(millis, out), out);
    pb::text(10, primary, out);
    pb::close(start, out);
}

impl Dialect for Ptubes {
    type Writer = PtubesTable;

    fn table(&self, table: Arc<TableView>) -> Result<PtubesTable> {
        let names = |indexes: &[usize]| -> String {
            let names = indexes.iter().filter_map(|at| table.columns.get(*at));
            names.map(|column| &*column.name).collect::<Vec<&str>>().join(",")
        };
        let columns = table.columns.iter().enumerate();
        Ok(PtubesTable {
            columns: columns.map(|(index, column)| PtubesColumn::new(index, column)).collect(),
            partition_key: names(&table.shard_columns),
            primary_key: table.key_names().collect::<Vec<&str>>().join(","),
            heartbeat: HEARTBEAT_TABLES.contains(&&*table.name),
            zone_seconds: self.zone_seconds,
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
        let definition = classify(statement.text, statement.database, statement.backslash);
        let name = match definition.name_before() {
            (database, "") => database.to_owned(),
            (database, table) => format!("{database}.{table}"),
        };
        let value = &mut out.value;
        let start = pb::open(MESSAGES_FIELD, value);
        header(at, at.row_first, &name, ["", ""], value);
        pb::number(2, 1, value);
        pb::number(3, QUERY, value);
        pb::text(6, &name, value);
        let text = pb::open(7, value);
        for part in ["{dbTableName=", &name, ", sql=", statement.text, "}"] {
            value.extend_from_slice(part.as_bytes());
        }
        pb::close(text, value);
        pb::close(start, value);
        out.close(MessageKind::Statement, SLOT_ALL, 0)
    }

    fn end(&mut self, at: &At<'_>, _end: End<'_>, out: &mut Messages) -> Result<()> {
        if out.changes() > 0 {
            let value = &mut out.value;
            let start = pb::open(MESSAGES_FIELD, value);
            header(at, at.row_first, "", ["", ""], value);
            pb::number(2, 0, value);
            pb::number(3, TRANSACTION_END, value);
            pb::close(start, value);
        }
        // A transaction that consists only of heartbeats has no end message. Instead, this message reports the
        // transaction's position.
        out.close(MessageKind::End, SLOT_ALL, 0)
    }
}

/// Writes the rows of a table as events.
pub struct PtubesTable {
    table: Arc<TableView>,
    columns: Vec<PtubesColumn>,
    partition_key: String,
    primary_key: String,
    heartbeat: bool,
    zone_seconds: i32,
}

impl PtubesTable {
    fn image(&self, field: u32, image: Image<'_, '_>, out: &mut Vec<u8>) -> Result<()> {
        for (column, value) in self.columns.iter().zip(image) {
            if let Some(value) = value {
                column.write(field, value, self.zone_seconds, out)?;
            }
        }
        Ok(())
    }
}

impl TableWriter for PtubesTable {
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()> {
        let change = rows.change();
        let event_type = match change {
            _ if self.heartbeat => HEARTBEAT,
            Change::Insert => INSERT,
            Change::Update => UPDATE,
            Change::Delete => DELETE,
        };
        while let Some(row) = rows.next()? {
            let value = &mut out.value;
            let start = pb::open(MESSAGES_FIELD, value);
            header(at, row.index, &self.table.name, [&self.partition_key, &self.primary_key], value);
            pb::number(2, 0, value);
            pb::number(3, event_type, value);
            let data = pb::open(4, value);
            let before = row.before.filter(|_| !self.heartbeat || row.after.is_none());
            for (field, image) in [(1, before), (2, row.after)] {
                let field = if self.heartbeat { 2 } else { field };
                if let Some(image) = image {
                    self.image(field, image, value)?;
                }
            }
            pb::close(data, value);
            pb::close(start, value);
            let slot = row.slot;
            match self.heartbeat {
                true => out.close(MessageKind::Heartbeat, SLOT_ALL, 1)?,
                false => out.close(change.into(), slot, 1)?,
            }
        }
        Ok(())
    }

    fn writes_changes(&self) -> bool {
        !self.heartbeat
    }
}

/// Returns the `java.sql.Types` number that Ptubes uses for a type name.
fn sql_type(data_type: &str) -> i64 {
    match data_type {
        "BIT" => -7,
        "TINYINT" | "SMALLINT" | "MEDIUMINT" | "YEAR" => 4,
        "INT" | "BIGINT" => -5,
        "FLOAT" => 6,
        "DOUBLE" => 8,
        "DECIMAL" => 3,
        "CHAR" => 1,
        "VARCHAR" | "TEXT" | "JSON" | "GEOMETRY" => 12,
        "DATE" => 91,
        "TIME" => 92,
        "DATETIME" | "TIMESTAMP" => 93,
        "BINARY" => -2,
        "TINYBLOB" | "BLOB" | "MEDIUMBLOB" | "VARBINARY" => -3,
        "LONGBLOB" => -4,
        _ => 1111,
    }
}

/// A column with precomputed parts.
struct PtubesColumn {
    kind: Kind,
    has_moments: bool,
    /// The key of the map entry.
    key: Box<[u8]>,
    /// The encoded index, type, name and key flag.
    head: Box<[u8]>,
    /// The name of the type.
    tail: Box<[u8]>,
}

impl PtubesColumn {
    fn new(index: usize, column: &MessageColumn) -> PtubesColumn {
        let name = column.type_text.split(|letter: char| !letter.is_ascii_alphanumeric()).next().unwrap_or_default();
        let data_type = name.to_ascii_uppercase();
        let (mut key, mut head, mut tail) = (Vec::new(), Vec::new(), Vec::new());
        pb::bytes(1, column.name.as_bytes(), &mut key);
        pb::signed_unless_zero(1, index as i64, &mut head);
        pb::signed(2, sql_type(&data_type), &mut head);
        pb::text(3, &column.name, &mut head);
        if column.is_key {
            pb::number(4, 1, &mut head);
        }
        pb::text(10, &data_type, &mut tail);
        PtubesColumn {
            has_moments: values::has_moments(&column.kind),
            kind: column.kind.clone(),
            key: key.into(),
            head: head.into(),
            tail: tail.into(),
        }
    }

    /// Writes an entry of a map of columns.
    fn write(&self, field: u32, value: &Value<'_>, zone_seconds: i32, out: &mut Vec<u8>) -> Result<()> {
        let entry = pb::open(field, out);
        out.extend_from_slice(&self.key);
        let start = pb::open(2, out);
        out.extend_from_slice(&self.head);
        let is_null = matches!(value, Value::Null);
        out.extend_from_slice(&[6 << 3, u8::from(is_null)]);
        if self.has_moments {
            if let Some(moment) = values::moment(value, zone_seconds) {
                if let Some(nanos) = moment.nanos {
                    pair(7, "nanos", |out| write_integer(nanos.into(), out), out);
                }
                if let Some(shown) = &moment.shown {
                    pair(7, "fmtDate", |out| out.extend_from_slice(shown.as_bytes()), out);
                }
                let text = pb::open(8, out);
                write_integer(moment.millis, out);
                pb::close(text, out);
            }
        } else if !is_null {
            let text = pb::open(8, out);
            values::write(value, &self.kind, out)?;
            if out.len() == text {
                // Omit an empty text together with its tag and its length.
                out.truncate(text.saturating_sub(2));
            } else {
                pb::close(text, out);
            }
        }
        out.extend_from_slice(&self.tail);
        pb::close(start, out);
        pb::close(entry, out);
        Ok(())
    }
}
