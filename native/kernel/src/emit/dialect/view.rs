//! The input of dialects: options, transactions, statements and tables.

use std::sync::Arc;

use super::debezium::handling::DebeziumOptions;
use crate::column::Kind;
use crate::emit::system::EventView;
use crate::emit::TransactionView;
use crate::event::rotate::file_number;
use crate::event::session::Backslash;

/// The dialect and its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DialectOptions {
    /// The dialect's name, one of [`super::NAMES`].
    pub name: String,
    /// Whether each row of a rows event becomes a separate message, so that each row has its own slot.
    pub message_per_row: bool,
    /// Seconds to add to UTC if a dialect shows TIMESTAMP in the server's time zone.
    pub server_zone_seconds: i32,
    /// The GTID set executed before the range. Messages that can carry the executed set do so only if it is given.
    pub gtid_set: Option<crate::gtid::GtidSet>,
    /// The forms of Debezium's messages.
    pub debezium: DebeziumOptions,
}

impl DialectOptions {
    /// Returns the default options of a dialect.
    pub fn of_name(name: &str) -> DialectOptions {
        DialectOptions {
            name: name.to_owned(),
            message_per_row: false,
            server_zone_seconds: 0,
            gtid_set: None,
            debezium: DebeziumOptions::default(),
        }
    }
}

/// The origin of a message.
#[derive(Debug, Clone, Copy)]
pub struct At<'a> {
    /// The captured cluster.
    pub instance: &'a str,
    /// The transaction.
    pub transaction: &'a TransactionView,
    /// The transaction's GTID as text; empty if it has none.
    pub gtid: &'a str,
    /// The GTID set executed up to and including this transaction; empty if it was not requested.
    pub gtid_set: &'a str,
    /// The event.
    pub event: EventView,
    /// The XA id in the server's syntax, if the transaction is an XA transaction.
    pub xa_id: Option<&'a str>,
    /// Number of changes of the transaction before this event, including tables that are not read.
    pub row_first: u32,
    /// Whether the rows were read from the table instead of the log.
    pub snapshot: bool,
}

impl At<'_> {
    /// Returns the number of the log file.
    pub fn file_number(&self) -> u32 {
        // A file with an unusual name may have no number.
        file_number(&self.transaction.file).unwrap_or(0)
    }
}

/// How a transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End<'a> {
    /// Committed by an XID event with this number.
    Xid(u64),
    /// Committed by a COMMIT statement.
    Commit,
    /// Committed as an XA transaction with this id.
    Xa(&'a str),
}

/// A statement that is written as a message.
#[derive(Debug, Clone, Copy)]
pub struct StatementView<'a> {
    /// The default database of the session; may be empty.
    pub database: &'a str,
    /// The statement's text, as UTF-8.
    pub text: &'a str,
    /// The meaning of a backslash in the statement's strings.
    pub backslash: Backslash,
    /// The kind of statement.
    pub kind: StatementKind,
    /// Whether the statement is a whole transaction, so that its message is also the end of the transaction.
    pub alone: bool,
}

/// The kind of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatementKind {
    /// DDL, or another statement that changes no rows.
    Definition,
    /// XA COMMIT.
    XaCommit,
}

/// A table, as the dialects see it.
#[derive(Debug, Clone, PartialEq)]
pub struct TableView {
    /// The database.
    pub database: Arc<str>,
    /// The table.
    pub table: Arc<str>,
    /// `database.table`.
    pub name: Arc<str>,
    /// The version number of the table's definition.
    pub schema_version: i32,
    /// The columns in table order.
    pub columns: Vec<MessageColumn>,
    /// Indexes of the columns that determine the slot, in table order.
    pub shard_columns: Vec<usize>,
    /// Number of JSON columns.
    pub json_columns: usize,
    /// Whether the server is MariaDB.
    pub mariadb: bool,
    /// Whether only the rows that the caller's conditions allow are visible.
    pub judged: bool,
}

impl TableView {
    /// The names of the primary key's columns, in the table's order.
    pub fn key_names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().filter(|column| column.is_key).map(|column| &*column.name)
    }

    /// Whether some rows or columns are not visible.
    pub fn is_limited(&self) -> bool {
        self.judged || self.columns.iter().any(|column| !column.wanted)
    }
}

/// A column.
#[derive(Debug, Clone, PartialEq)]
pub struct MessageColumn {
    /// Its name.
    pub name: Arc<str>,
    /// How to read the column's values.
    pub kind: Kind,
    /// The SQL type: as declared if the declaration is known, otherwise as logged.
    pub type_text: Arc<str>,
    /// Whether the column may be null.
    pub nullable: bool,
    /// Whether the column belongs to the primary key.
    pub is_key: bool,
    /// Whether to emit the column. Other columns are absent from every row.
    pub wanted: bool,
}
