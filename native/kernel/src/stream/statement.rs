//! Statements that the schema history, or a person, has to know of.

use std::sync::Arc;

use crate::event::session::Session;

/// One statement of the log: a definition (DDL), or a change that was logged as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// The default database when it ran; may be empty.
    pub database: String,
    /// What its event says of the session.
    pub session: Session,
    /// The text, as UTF-8.
    pub text: String,
    /// Whether it changes rows that are therefore not in the log.
    pub is_change: bool,
    /// Whether its transaction is out of the range.
    pub is_skipped: bool,
    /// The file.
    pub file: Arc<str>,
    /// The offset of its event.
    pub offset: u64,
    /// The offset behind its event.
    pub end_offset: u64,
    /// The offset behind its transaction, if its GTID event says so.
    pub transaction_end: Option<u64>,
    /// When it began, in microseconds since 1970.
    pub timestamp_us: i64,
    /// The GTID of its transaction; may be empty.
    pub gtid: String,
}
