//! The emitters. Each converts the stream to batches of one format.

pub mod arrow_messages;
pub mod arrow_rows;
mod constants;
pub mod dialect;
pub mod drainer;
pub mod envelope;
pub mod events;
pub mod images;
pub mod messages;
pub mod messages_batch;
pub mod rows;
pub mod system;
pub mod transactions;
pub mod typed;
pub(crate) mod unrepresentable;
pub mod verdicts;

use std::sync::Arc;

use arrow_array::RecordBatch;

use crate::gtid::Gtid;

/// The current transaction, for emitters.
#[derive(Debug, Clone)]
pub struct TransactionView {
    /// The file of the transaction's first event.
    pub file: Arc<str>,
    /// The offset of the transaction's first event.
    pub start: u64,
    /// The commit version: a number made of epoch, file number and start offset, which increases in commit order.
    pub commit_version: i64,
    /// Commit time, in microseconds since 1970.
    pub commit_us: i64,
    /// Its id.
    pub gtid: Gtid,
    /// The connection that ran the transaction, if logged.
    pub thread_id: Option<i64>,
    /// The transaction's logical clock: the sequence number of the last transaction that must commit before this one,
    /// and this transaction's own sequence number.
    pub clock: Option<(i64, i64)>,
}

/// Rows of a table (or of the whole log) that are ready to be returned.
#[derive(Debug, Clone)]
pub struct Batch {
    /// The database; empty for formats that span tables.
    pub database: Arc<str>,
    /// The table; empty for formats that span tables.
    pub table: Arc<str>,
    /// The schema version of the rows; 0 for formats that span tables.
    pub schema_version: i32,
    /// The rows.
    pub record: RecordBatch,
    /// The end of the last complete transaction when the batch was closed: file and offset.
    pub position: (Arc<str>, u64),
}
