//! What a dialect writes.

use std::sync::Arc;

use super::view::{At, End, StatementView, TableView};
use super::walk::Images;
use crate::column::json::JsonStyle;
use crate::emit::messages::Messages;
use crate::error::Result;

/// How transactions are told in one dialect.
pub trait Dialect {
    /// What writes the rows of one table.
    type Writer: TableWriter;

    /// Prepares what is the same for all rows of a table with this definition.
    fn table(&self, table: Arc<TableView>) -> Result<Self::Writer>;

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
pub trait TableWriter {
    /// Writes the messages of one rows event. All of `rows` has to be walked, also what is not written.
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()>;

    /// Whether the rows are changes; a dialect's heartbeats are not.
    fn tells_changes(&self) -> bool {
        true
    }
}
