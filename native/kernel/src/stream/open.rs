//! The open transaction.

use super::prepared::HeldEvents;
use crate::emit::TransactionView;

/// A transaction whose end has not been read yet.
#[derive(Debug, Clone)]
pub(super) struct Open {
    pub view: TransactionView,
    /// Whether a BEGIN was read, so that a commit must follow. Without BEGIN, a single statement is the whole
    /// transaction.
    pub begun: bool,
    /// Whether the transaction is outside the range, so that its rows are skipped.
    pub skipped: bool,
    /// Number of changes, or of events if events are emitted, to drop because they were emitted before a reconnect.
    pub resume_rows: u32,
    /// Number of events read so far, if events are emitted.
    pub events: u32,
    /// Number of changes read so far, including those of tables that are not selected.
    pub rows: u32,
    /// Number of changes added to batches so far.
    pub selected: u32,
    /// Number of changes that were returned in a batch.
    pub handed_out: u32,
    /// Offset of the transaction's end, if the GTID event contains it.
    pub end: Option<u64>,
    /// The savepoints: each name in lower case, and how many changes were in batches when the savepoint was set.
    pub(super) savepoints: Vec<(Vec<u8>, u32)>,
    /// The events of an XA transaction, until it is prepared or ends.
    pub held_events: Option<Box<HeldEvents>>,
    /// The commit timestamp of a TiDB transaction, which is its commit version.
    pub commit_ts: Option<i64>,
}
