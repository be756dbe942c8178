//! Statements, which the caller adds to the schema history or shows to the user.

use std::sync::Arc;

use crate::event::session::Session;

/// A statement of the log: DDL, or a change logged in statement format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// The default database of the session; may be empty.
    pub database: String,
    /// The session state in the statement's event.
    pub session: Session,
    /// The statement's text, as UTF-8.
    pub text: String,
    /// Whether the statement changes rows whose images are not in the log.
    pub is_change: bool,
    /// Whether the statement's transaction is outside the range.
    pub is_skipped: bool,
    /// The file.
    pub file: Arc<str>,
    /// The offset of the statement's event.
    pub offset: u64,
    /// The offset after the statement's event.
    pub end_offset: u64,
    /// The offset after the statement's transaction, if the GTID event contains it.
    pub transaction_end: Option<u64>,
    /// Start time of the statement, in microseconds since 1970.
    pub timestamp_us: i64,
    /// Commit time of the statement's transaction, in microseconds since 1970. If the log has no commit time, the start
    /// time of the statement.
    pub commit_us: i64,
    /// The server that ran the statement.
    pub server_id: u32,
    /// The GTID of the statement's transaction; empty if the transaction has none.
    pub gtid: String,
    /// The commit timestamp, for a statement of a TiDB cluster.
    pub commit_ts: Option<i64>,
}
