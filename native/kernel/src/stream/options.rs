//! What a decoder is told at its start.

use std::sync::Arc;

use crate::emit::dialect::DialectOptions;
use crate::emit::rows::ChangeFilter;
use crate::gtid::GtidSet;
use crate::limits::PREPARED_EVENTS_BYTES_MAX;

/// The shape of the batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emit {
    /// Rows of each table in its own types.
    Typed,
    /// Changes of all tables with raw images.
    Envelope,
    /// One row for each event.
    Events,
    /// One row for each transaction.
    Transactions,
    /// Changes as a dialect writes them, `Options::dialect`.
    Messages,
}

/// See the fields.
#[derive(Debug, Clone)]
pub struct Options {
    /// The name of the captured cluster, for `_metadata.instance`.
    pub instance: Arc<str>,
    /// The epoch, for the commit version.
    pub epoch: u32,
    /// The file in which the first byte lies.
    pub file: Arc<str>,
    /// Its number.
    pub file_number: u32,
    /// Where the first byte lies in it. 0 means the magic comes first.
    pub offset: u64,
    /// Whether the first byte is known to lie between two transactions. Otherwise the rest of the transaction in which it
    /// may lie is passed over.
    pub aligned: bool,
    /// Whether the bytes come from a live server, which leaves events out and makes others up.
    pub live: bool,
    /// Transactions that start before this file number and offset are passed over.
    pub start: Option<(u32, u64)>,
    /// The range ends before the first transaction that starts at or behind this.
    pub stop: Option<(u32, u64)>,
    /// Where the next range of the file begins: an event must begin there.
    pub joint: Option<u64>,
    /// Every transaction is passed over, and so are incidents and unknown events: only what is prepared is noted.
    pub passing: bool,
    /// Transactions in this set are passed over.
    pub gtid_after: Option<GtidSet>,
    /// Transactions outside this set are passed over, and the range ends when all of it was seen.
    pub gtid_until: Option<GtidSet>,
    /// Transactions committed before this are passed over, in microseconds since 1970.
    pub time_from_us: Option<i64>,
    /// Transactions committed at or after this are passed over.
    pub time_until_us: Option<i64>,
    /// The shape of the batches.
    pub emit: Emit,
    /// The dialect of messages, which `Emit::Messages` needs.
    pub dialect: Option<DialectOptions>,
    /// Whether statements are handed out. Shapes that decode rows need them for the schema history.
    pub statements: bool,
    /// Which images are wanted.
    pub changes: ChangeFilter,
    /// A batch closes after so many rows, at the next end of a transaction.
    pub batch_rows_max: usize,
    /// A batch closes after so many bytes of row images, at the next end of a transaction.
    pub batch_bytes_max: usize,
    /// A batch closes inside a transaction that alone has so many bytes of row images.
    pub held_bytes_max: usize,
    /// Events of prepared XA transactions that are kept in memory; those over it are read again when they commit.
    pub prepared_bytes_max: usize,
    /// Whether checksums are verified where the log has them.
    pub verify_checksum: bool,
    /// What was handed out of the first transaction in range before a reconnect, and is dropped.
    pub resume: Option<Resume>,
}

/// The part of a transaction that was handed out before a connection was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// File number and offset of the transaction; None takes the first in range, unproved.
    pub start: Option<(u32, u64)>,
    /// Changes from its start, of tables read or not.
    pub rows: u32,
}

impl Options {
    /// Everything from the front of a file, typed.
    pub fn of_file(instance: &str, file: &str, file_number: u32) -> Options {
        Options {
            instance: instance.into(),
            epoch: 0,
            file: file.into(),
            file_number,
            offset: 0,
            aligned: true,
            live: false,
            start: None,
            stop: None,
            joint: None,
            passing: false,
            gtid_after: None,
            gtid_until: None,
            time_from_us: None,
            time_until_us: None,
            emit: Emit::Typed,
            dialect: None,
            statements: true,
            changes: ChangeFilter::default(),
            batch_rows_max: 1 << 16,
            batch_bytes_max: 8 << 20,
            held_bytes_max: 64 << 20,
            prepared_bytes_max: PREPARED_EVENTS_BYTES_MAX,
            verify_checksum: true,
            resume: None,
        }
    }
}
