//! Writes changes in the formats of other products: Canal's entries, Ptubes' events, and the JSON of Canal, Debezium
//! and Maxwell.
//!
//! A dialect receives transactions one by one: `begin` before the first message, `rows` for each rows event of a
//! selected table, `statement` for each DDL statement, `end` after the last message. Transactions without selected
//! changes are omitted. All output goes to a growing buffer ([`Messages`]).

pub mod canal;
pub mod ddl;
pub mod debezium;
pub mod json;
mod json_object;
pub mod keys;
pub mod maxwell;
pub mod protobuf;
pub mod ptubes;
pub mod view;
pub mod walk;
pub mod writer;

use std::sync::Arc;

pub use crate::column::json::JsonStyle;
use crate::emit::messages::Messages;
use crate::error::{Error, ErrorKind, Result};
pub use view::{At, DialectOptions, End, MessageColumn, StatementKind, StatementView, TableView};
pub use walk::{Image, Images, Row};
pub use writer::{Dialect, TableWriter};

/// The names of all dialects.
pub const NAMES: &[&str] = &["canal", "canal_flat", "ptubes", "debezium", "debezium_schema", "maxwell", "json"];

/// A dialect by name.
#[allow(missing_docs)]
pub enum Named {
    Canal(canal::Canal),
    CanalFlat(canal::flat::CanalFlat),
    Ptubes(ptubes::Ptubes),
    Debezium(debezium::Debezium),
    Maxwell(maxwell::Maxwell),
    Json(json::JsonRows),
}

/// The row writer of a table, for any dialect.
#[allow(missing_docs)]
pub enum NamedWriter {
    Canal(canal::CanalTable),
    CanalFlat(canal::flat::FlatTable),
    Ptubes(ptubes::PtubesTable),
    Debezium(debezium::Writer),
    Maxwell(maxwell::Writer),
    Json(json::Writer),
}

/// Runs the same expression for each dialect, with static dispatch.
macro_rules! each {
    ($named:ident, $value:expr, $each:ident => $call:expr) => {
        match $value {
            $named::Canal($each) => $call,
            $named::CanalFlat($each) => $call,
            $named::Ptubes($each) => $call,
            $named::Debezium($each) => $call,
            $named::Maxwell($each) => $call,
            $named::Json($each) => $call,
        }
    };
}

impl Named {
    /// Creates a dialect by name. Raises `OptionInvalid` if the name is unknown.
    pub fn of_options(options: &DialectOptions, instance: &Arc<str>) -> Result<Named> {
        Ok(match options.name.as_str() {
            "canal" => Named::Canal(canal::Canal::new(options)),
            "canal_flat" => Named::CanalFlat(canal::flat::CanalFlat::new(options)),
            "ptubes" => Named::Ptubes(ptubes::Ptubes::new(options)),
            "debezium" => Named::Debezium(debezium::Debezium::new(instance, false, &options.debezium)),
            "debezium_schema" => Named::Debezium(debezium::Debezium::new(instance, true, &options.debezium)),
            "maxwell" => Named::Maxwell(maxwell::Maxwell),
            "json" => Named::Json(json::JsonRows),
            name => {
                let error = Error::new(ErrorKind::OptionInvalid, format!("`{name}` is no dialect"));
                return Err(error.hint(format!("use one of {}", NAMES.join(", "))));
            }
        })
    }
}

impl Dialect for Named {
    type Writer = NamedWriter;

    fn table(&self, table: Arc<TableView>) -> Result<NamedWriter> {
        Ok(match self {
            Named::Canal(dialect) => NamedWriter::Canal(dialect.table(table)?),
            Named::CanalFlat(dialect) => NamedWriter::CanalFlat(dialect.table(table)?),
            Named::Ptubes(dialect) => NamedWriter::Ptubes(dialect.table(table)?),
            Named::Debezium(dialect) => NamedWriter::Debezium(dialect.table(table)?),
            Named::Maxwell(dialect) => NamedWriter::Maxwell(dialect.table(table)?),
            Named::Json(dialect) => NamedWriter::Json(dialect.table(table)?),
        })
    }

    fn json_style(&self) -> JsonStyle {
        each!(Named, self, dialect => dialect.json_style())
    }

    fn marks_last_row(&self) -> bool {
        each!(Named, self, dialect => dialect.marks_last_row())
    }

    fn splits_updates(&self) -> bool {
        each!(Named, self, dialect => dialect.splits_updates())
    }

    fn begin(&mut self, at: &At<'_>, out: &mut Messages) -> Result<()> {
        each!(Named, self, dialect => dialect.begin(at, out))
    }

    fn statement(&mut self, at: &At<'_>, statement: &StatementView<'_>, out: &mut Messages) -> Result<()> {
        each!(Named, self, dialect => dialect.statement(at, statement, out))
    }

    fn rows_query(&mut self, at: &At<'_>, text: &str, out: &mut Messages) -> Result<()> {
        each!(Named, self, dialect => dialect.rows_query(at, text, out))
    }

    fn end(&mut self, at: &At<'_>, end: End<'_>, out: &mut Messages) -> Result<()> {
        each!(Named, self, dialect => dialect.end(at, end, out))
    }
}

impl TableWriter for NamedWriter {
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()> {
        each!(NamedWriter, self, writer => writer.rows(at, rows, out))
    }

    fn writes_changes(&self) -> bool {
        each!(NamedWriter, self, writer => writer.writes_changes())
    }
}
