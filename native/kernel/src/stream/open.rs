//! The transaction that is open.

use super::prepared::Holding;
use crate::emit::TransactionView;

/// A transaction of which the end has not come.
#[derive(Debug, Clone)]
pub(super) struct Open {
    pub view: TransactionView,
    /// BEGIN was seen, so a commit is due. Before it, one statement alone is the whole transaction.
    pub begun: bool,
    /// It is out of range: its rows are passed over.
    pub skipped: bool,
    /// Changes that were handed out before a reconnect, and are not handed out again; events, where those are emitted.
    pub resume_rows: u32,
    /// Events so far, where those are emitted.
    pub events: u32,
    /// Changes so far, of tables read or not.
    pub rows: u32,
    /// Changes so far that went into batches.
    pub selected: u32,
    /// Changes that were already handed out in a batch.
    pub handed_out: u32,
    /// Where it ends, if its GTID event says so.
    pub end: Option<u64>,
    /// Changes that had gone into batches at each savepoint, by its name in lower case.
    pub(super) savepoints: Vec<(Vec<u8>, u32)>,
    /// The events of an XA transaction, until it is prepared or ends.
    pub holding: Option<Box<Holding>>,
}
