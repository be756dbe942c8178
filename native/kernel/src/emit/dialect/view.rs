//! What dialects are shown: their choices, transactions, statements and tables.

use std::sync::Arc;

use crate::column::Kind;
use crate::emit::system::EventView;
use crate::emit::TransactionView;
use crate::event::rotate::file_number;
use crate::event::session::Backslash;

/// Which dialect, and what it lets be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DialectOptions {
    /// Its name, one of [`super::NAMES`].
    pub name: String,
    /// Whether a rows event becomes one message for each row, so that each has its slot.
    pub message_per_row: bool,
    /// Seconds to add to UTC where a dialect shows TIMESTAMP on the server's clock.
    pub server_zone_seconds: i32,
    /// The transactions executed before the first of the range, as a GTID set; messages that can carry the executed set
    /// do so only where this is given.
    pub gtid_set: Option<crate::gtid::GtidSet>,
}

impl DialectOptions {
    /// The dialect of a name, with the usual choices.
    pub fn of_name(name: &str) -> DialectOptions {
        DialectOptions { name: name.to_owned(), message_per_row: false, server_zone_seconds: 0, gtid_set: None }
    }
}

/// Where a message comes from.
#[derive(Debug, Clone, Copy)]
pub struct At<'a> {
    /// The captured cluster.
    pub instance: &'a str,
    /// The transaction.
    pub transaction: &'a TransactionView,
    /// The transaction's GTID as text; empty where there is none.
    pub gtid: &'a str,
    /// The transactions executed up to and with this one; empty where it was not asked for.
    pub gtid_set: &'a str,
    /// The event.
    pub event: EventView,
    /// The XA transaction's id as the server writes it, where it is one.
    pub xa_id: Option<&'a str>,
    /// Changes of the transaction before this event, those that nobody reads included.
    pub row_first: u32,
    /// Whether its rows were read from the table, and are no changes of the log.
    pub snapshot: bool,
}

impl At<'_> {
    /// The number of the log's file.
    pub fn file_number(&self) -> u32 {
        // A file that stands alone may have none.
        file_number(&self.transaction.file).unwrap_or(0)
    }
}

/// How a transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End<'a> {
    /// By an XID event with this number.
    Xid(u64),
    /// By a COMMIT statement.
    Commit,
    /// It was an XA transaction with this id.
    Xa(&'a str),
}

/// A statement that is told of.
#[derive(Debug, Clone, Copy)]
pub struct StatementView<'a> {
    /// The default database when it ran; may be empty.
    pub database: &'a str,
    /// Its text, as UTF-8.
    pub text: &'a str,
    /// What a backslash means in its strings.
    pub backslash: Backslash,
    /// What it is.
    pub kind: StatementKind,
    /// Whether it is a transaction of its own, so that its message is also the end.
    pub alone: bool,
}

/// What a statement is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatementKind {
    /// A definition (DDL), or one of the other statements that change no rows.
    Definition,
    /// XA COMMIT.
    XaCommit,
}

/// One table as dialects see it.
#[derive(Debug, Clone, PartialEq)]
pub struct TableView {
    /// The database.
    pub database: Arc<str>,
    /// The table.
    pub table: Arc<str>,
    /// `database.table`.
    pub name: Arc<str>,
    /// The number of its definition.
    pub schema_version: i32,
    /// Its columns, in their order.
    pub columns: Vec<MessageColumn>,
    /// The columns whose values decide the slot, by their place, in the table's order.
    pub shard_columns: Vec<usize>,
    /// How many of them are JSON.
    pub json_columns: usize,
    /// Whether the server is MariaDB.
    pub mariadb: bool,
}

impl TableView {
    /// The names of the primary key's columns, in the table's order.
    pub fn key_names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().filter(|column| column.is_key).map(|column| &*column.name)
    }
}

/// One column.
#[derive(Debug, Clone, PartialEq)]
pub struct MessageColumn {
    /// Its name.
    pub name: Arc<str>,
    /// How to read it.
    pub kind: Kind,
    /// Its SQL type: as it was declared where that is known, else as the log tells it.
    pub type_text: Arc<str>,
    /// Whether it may be null.
    pub nullable: bool,
    /// Whether it belongs to the primary key.
    pub is_key: bool,
    /// Whether it is to be shown. One that is not is absent from every row.
    pub wanted: bool,
}
