//! The transaction that is open.

use crate::gtid::Gtid;

/// A transaction of which the end has not come.
#[derive(Debug, Clone)]
pub(super) struct Open {
    pub start: u64,
    pub gtid: Gtid,
    pub server_id: u32,
    pub time_us: i64,
    /// Its events so far.
    pub events: u32,
    /// BEGIN was seen, so a commit is due. Before it, one statement alone is the whole transaction.
    pub begun: bool,
}
