//! The options of a decoder.

use std::sync::Arc;

use crate::emit::dialect::DialectOptions;
use crate::emit::rows::ChangeFilter;
use crate::gtid::GtidSet;
use crate::limits::PREPARED_EVENTS_BYTES_MAX;

/// The format of the batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emit {
    /// The rows of each table, in typed columns.
    Typed,
    /// The changes of all tables, with raw row images.
    Envelope,
    /// A row for each event.
    Events,
    /// A row for each transaction.
    Transactions,
    /// The changes as messages of `Options::dialect`.
    Messages,
}

/// Options of a decoder.
#[derive(Debug, Clone)]
pub struct Options {
    /// The name of the captured cluster, for `_metadata.instance`.
    pub instance: Arc<str>,
    /// The epoch, which becomes a part of the commit version.
    pub epoch: u32,
    /// The file of the first byte.
    pub file: Arc<str>,
    /// The number of the file.
    pub file_number: u32,
    /// The offset of the first byte. 0 means that the magic comes first.
    pub offset: u64,
    /// Whether the first byte is known to be between transactions. If not, a transaction may be open at that point, and
    /// the rest of it is skipped.
    pub aligned: bool,
    /// Whether the bytes come from a live server, which omits events and adds artificial events.
    pub live: bool,
    /// Skip transactions that start before this file number and offset.
    pub start: Option<(u32, u64)>,
    /// End the range before the first transaction that starts at or after this file number and offset.
    pub stop: Option<(u32, u64)>,
    /// Where the next range of the file begins, which must be the start of an event.
    pub joint: Option<u64>,
    /// Skip all transactions, incidents and unknown events, and only record prepared transactions.
    pub passing: bool,
    /// Transactions that precede the first byte in the log. `gtid_after` and `gtid_until` need them.
    pub gtid_before: GtidSet,
    /// Skip the transactions that this set contains, given the transactions that precede them in the log.
    pub gtid_after: Option<GtidSet>,
    /// Skip the transactions in this set wherever they occur, because an earlier part of the log contains them.
    pub gtid_repeated: Option<GtidSet>,
    /// Skip transactions outside this set, and end the range when the whole set was seen.
    pub gtid_until: Option<GtidSet>,
    /// Skip transactions committed before this time, in microseconds since 1970.
    pub time_from_us: Option<i64>,
    /// Skip transactions committed at or after this time, in microseconds since 1970.
    pub time_until_us: Option<i64>,
    /// The format of the batches.
    pub emit: Emit,
    /// The dialect of messages; required for `Emit::Messages`.
    pub dialect: Option<DialectOptions>,
    /// Whether to return statements. Formats that decode rows need them for the schema history.
    pub statements: bool,
    /// The changes and images to emit.
    pub changes: ChangeFilter,
    /// Close a batch at the next end of a transaction after this many rows.
    pub batch_rows_max: usize,
    /// Close a batch at the next end of a transaction after this many bytes of row images.
    pub batch_bytes_max: usize,
    /// Close a batch inside a transaction whose row images exceed this many bytes.
    pub held_bytes_max: usize,
    /// Memory limit for the events of prepared XA transactions. Events above the limit are read again at the commit.
    pub prepared_bytes_max: usize,
    /// Whether to verify checksums, if the log has them.
    pub verify_checksum: bool,
    /// The part of the range's first transaction to drop, because it was emitted before a reconnect.
    pub resume: Option<Resume>,
}

/// The part of a transaction that was emitted before the connection was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// File number and offset of the transaction; None means the first transaction in the range, whichever it is.
    pub start: Option<(u32, u64)>,
    /// Number of changes since the start of the transaction, including those of tables that are not selected.
    pub rows: u32,
}

impl Options {
    /// Options for a whole file with typed rows.
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
            gtid_before: GtidSet::default(),
            gtid_after: None,
            gtid_repeated: None,
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
