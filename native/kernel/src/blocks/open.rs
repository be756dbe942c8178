//! The open transaction.

use crate::gtid::Gtid;

/// A transaction whose end has not been read yet.
#[derive(Debug, Clone)]
pub(super) struct Open {
    pub start: u64,
    pub gtid: Gtid,
    pub server_id: u32,
    pub time_us: i64,
    /// Number of the transaction's events so far.
    pub events: u32,
    /// Whether a BEGIN was read, so that a commit must follow. Without BEGIN, a single statement is the whole
    /// transaction.
    pub begun: bool,
}
