//! The visitors of the stream: each turns what passes by into batches of one shape.

pub mod arrow_messages;
pub mod arrow_rows;
mod constants;
pub mod dialect;
pub mod envelope;
pub mod events;
pub mod images;
pub mod messages;
pub mod messages_batch;
pub mod rows;
pub mod system;
pub mod transactions;
pub mod typed;
pub(crate) mod unheld;

use std::sync::Arc;

use arrow_array::RecordBatch;

use crate::gtid::Gtid;

/// The transaction in the making, as emitters see it.
#[derive(Debug, Clone)]
pub struct TransactionView {
    /// The file in which it lies.
    pub file: Arc<str>,
    /// The offset of its first event.
    pub start: u64,
    /// Epoch, file number and start offset in one number that rises with commit order.
    pub commit_version: i64,
    /// When it was committed, in microseconds since 1970.
    pub commit_us: i64,
    /// Its id.
    pub gtid: Gtid,
    /// The connection that made it, where the log tells.
    pub thread_id: Option<i64>,
    /// Its place in the logical clock: the last transaction that it has to follow, and its own number.
    pub clock: Option<(i64, i64)>,
}

/// Rows of one table (or of the whole log) that are ready to leave.
#[derive(Debug, Clone)]
pub struct Batch {
    /// The database, empty for shapes that span tables.
    pub database: Arc<str>,
    /// The table, empty for shapes that span tables.
    pub table: Arc<str>,
    /// The schema version of the rows, 0 for shapes that span tables.
    pub schema_version: i32,
    /// The rows.
    pub record: RecordBatch,
    /// The end of the last whole transaction when the batch was closed: file and offset.
    pub position: (Arc<str>, u64),
}
