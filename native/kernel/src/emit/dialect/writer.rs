//! The interface of a dialect.

use std::sync::Arc;

use super::view::{At, End, StatementView, TableView};
use super::walk::Images;
use crate::column::json::JsonStyle;
use crate::emit::messages::Messages;
use crate::error::Result;

/// Writes transactions in a dialect.
pub trait Dialect {
    /// The writer of a table's rows.
    type Writer: TableWriter;

    /// Precomputes the parts that are the same for all rows of a table with this definition.
    fn table(&self, table: Arc<TableView>) -> Result<Self::Writer>;

    /// The style of documents that result from partial updates.
    fn json_style(&self) -> JsonStyle {
        JsonStyle::Server
    }

    /// Whether the last row of a transaction is marked, so that it must be held back until the transaction ends.
    fn marks_last_row(&self) -> bool {
        false
    }

    /// Whether an update of which a single image is visible is written as a delete or an insert.
    fn splits_updates(&self) -> bool {
        false
    }

    /// Begins a transaction with messages. `at.event` is its BEGIN, or its GTID event if there is no BEGIN.
    fn begin(&mut self, at: &At<'_>, out: &mut Messages) -> Result<()>;

    /// Writes a DDL statement, or, after `end`, the statement that commits a prepared XA transaction.
    fn statement(&mut self, at: &At<'_>, statement: &StatementView<'_>, out: &mut Messages) -> Result<()>;

    /// Records the text of the statement whose row changes follow, if the server logs it.
    fn rows_query(&mut self, at: &At<'_>, text: &str, out: &mut Messages) -> Result<()> {
        let _ = (at, text, out);
        Ok(())
    }

    /// Ends a complete transaction. Called only after `begin`. The caller sets `end_offset` of the message.
    fn end(&mut self, at: &At<'_>, end: End<'_>, out: &mut Messages) -> Result<()>;
}

/// Writes the rows of a table in a dialect.
pub trait TableWriter {
    /// Writes the messages of a rows event. Must iterate over all of `rows`, including rows that are not written.
    fn rows(&self, at: &At<'_>, rows: &mut Images<'_, '_>, out: &mut Messages) -> Result<()>;

    /// Whether the rows are changes, as opposed to a dialect's heartbeats.
    fn writes_changes(&self) -> bool {
        true
    }
}
