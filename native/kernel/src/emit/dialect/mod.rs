//! Changes as others write them: Canal's entries, Ptubes' events, and the JSON of Canal, Debezium and Maxwell.
//!
//! A dialect gets one transaction after the other: `begin` before its first message, `rows` for each rows event of a
//! table that is read, `statement` for each definition, `end` behind the last message. A transaction of which nothing is
//! selected is not told at all. Whatever a dialect writes goes to one growing buffer ([`Messages`]).

pub mod canal;
mod canal_columns;
pub mod canal_flat;
pub mod ddl;
pub mod debezium;
mod debezium_schema;
mod json_object;
pub mod json_rows;
pub mod keys;
pub mod maxwell;
pub mod protobuf;
pub mod ptubes;
pub mod walk;

use std::sync::Arc;

pub use crate::column::json::JsonStyle;
use crate::column::Kind;
use crate::emit::messages::Messages;
use crate::emit::system::EventView;
use crate::emit::TransactionView;
use crate::error::{Error, ErrorKind, Result};
use crate::event::rotate::file_number;
use crate::event::session::Backslash;
pub use walk::{Image, Images, Row};

/// Which dialect, and what it lets be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DialectOptions {
    /// Its name, one of [`NAMES`].
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

/// The names of all dialects.
pub const NAMES: &[&str] = &["canal", "canal_flat", "ptubes", "debezium", "debezium_schema", "maxwell", "json"];

/// Makes the dialect of a name. Raises `OptionInvalid` for one that is not known.
pub fn of_options(options: &DialectOptions, instance: &Arc<str>) -> Result<Box<dyn Dialect>> {
    Ok(match options.name.as_str() {
        "canal" => Box::new(canal::Canal::new(options)),
        "canal_flat" => Box::new(canal_flat::CanalFlat::new(options)),
        "ptubes" => Box::new(ptubes::Ptubes::new(options)),
        "debezium" => Box::new(debezium::Debezium::new(instance, false)),
        "debezium_schema" => Box::new(debezium::Debezium::new(instance, true)),
        "maxwell" => Box::new(maxwell::Maxwell),
        "json" => Box::new(json_rows::JsonRows),
        other => {
            let message = format!("`{other}` is no dialect");
            return Err(Error::new(ErrorKind::OptionInvalid, message).hint(format!("use one of {}", NAMES.join(", "))));
        }
    })
}

/// How transactions are told in one dialect.
pub trait Dialect: Send + Sync {
    /// Prepares what is the same for all rows of a table with this definition.
    fn table(&self, table: Arc<TableView>) -> Result<Box<dyn TableWriter>>;

    /// How documents show that a partial update made anew.
    fn json_style(&self) -> JsonStyle {
        JsonStyle::Server
    }

    /// Whether the last row of a transaction is marked as such, so that it stays until the end is known.
    fn marks_last_row(&self) -> bool {
        false
    }

    /// A transaction of which messages follow. `at.event` is its BEGIN, or the GTID event where there is none.
    fn begin(&mut self, at: &At<'_>, out: &mut Messages) -> Result<()>;

    /// A definition (DDL), or after the end the statement that commits a prepared XA transaction.
    fn statement(&mut self, at: &At<'_>, statement: &StatementView<'_>, out: &mut Messages) -> Result<()>;

    /// The text of the statement behind the rows that follow, where the server logs it.
    fn rows_query(&mut self, at: &At<'_>, text: &str, out: &mut Messages) -> Result<()> {
        let _ = (at, text, out);
        Ok(())
    }

    /// The transaction is whole. Comes only where `begin` came; `end_offset` of the message is the framework's.
    fn end(&mut self, at: &At<'_>, end: End<'_>, out: &mut Messages) -> Result<()>;
}

/// Writes the rows of one table in one dialect.
pub trait TableWriter: Send + Sync {
    /// Writes the messages of one rows event. All of `rows` has to be walked, also what is not written.
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()>;

    /// Whether the rows are changes; a dialect's heartbeats are not.
    fn tells_changes(&self) -> bool {
        true
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
