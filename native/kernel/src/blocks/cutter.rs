//! Defines the cutter: its state, its settings, and access to its output.

use std::sync::Arc;

use bytes::Bytes;

use super::counts::Counts;
use super::decompressor::Decompressor;
use super::event_buffer::EventBuffer;
use super::open::Open;
use super::record::{Block, Run};
use super::tables::Tables;
use crate::error::{Error, ErrorKind, Result};
use crate::event::format_description::Format;
use crate::event::rotate::file_number;
use crate::event::session::Session;
use crate::frame::packet::{Packets, ServerError};
use crate::gtid::{Gtid, GtidSet};

/// Offsets stay below this limit, so that adding the length of an event cannot overflow 64 bits.
pub(super) const OFFSET_MAX: u64 = 1 << 62;

/// A transaction longer than this many blocks may be split between blocks.
pub(super) const TRANSACTION_BLOCKS_MAX: u64 = 16;

/// Packets of at least this length are processed in pieces, so that the caller need not buffer a whole packet.
const PIECEWISE_BYTES_MIN: usize = 256 << 10;

/// Settings of a cutter.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The epoch to write into the records.
    pub epoch: u32,
    /// The source file of the first byte.
    pub file: Arc<str>,
    /// The offset of the first byte: the start of an event between transactions. 0 means that the magic comes first.
    pub offset: u64,
    /// GTIDs of all transactions before the first byte.
    pub gtid_set: GtidSet,
    /// A block that has reached this size is closed at the next end of a transaction.
    pub block_bytes: u64,
    /// The largest commit time in the log so far, in microseconds since 1970.
    pub time_max_us: i64,
    /// Whether the bytes come from a live server, which omits events and adds artificial events.
    pub live: bool,
    /// Whether the packets have the marker bytes of semi-synchronous replication.
    pub semi_sync: bool,
    /// Whether to return DDL statements.
    pub statements: bool,
}

/// The action that the cutter expects from the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// More bytes.
    Input,
    /// Call `take_file`: a new source file begins.
    File,
    /// Call `take_hole`: bytes of the source file are missing from the stream.
    Hole,
}

/// A DDL statement in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// The statement's text, as UTF-8.
    pub text: String,
    /// The default database of the session; may be empty.
    pub database: String,
    /// The session state in the statement's event.
    pub session: Session,
    /// Source offset of the statement's event.
    pub start: u64,
    /// Source offset after the statement's event.
    pub end: u64,
}

/// Totals over the bytes that the cutter has processed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of events that were kept.
    pub events: u64,
    /// Number of complete transactions.
    pub transactions: u64,
    /// Number of row changes, including those of the open transaction. An update counts as one.
    pub changes: u64,
    /// Heartbeats.
    pub heartbeats: u64,
}

/// Cuts a log into blocks, as the module's description explains.
pub struct BlockCutter {
    pub(super) settings: Settings,
    pub(super) format: Option<Format>,
    pub(super) format_description: Vec<u8>,
    pub(super) file: Arc<str>,
    pub(super) file_number: u32,
    pub(super) offset: u64,
    pub(super) magic_due: bool,
    /// The next file and the offset in it, which a live server announces before the format description.
    pub(super) next_file: Option<(String, u64)>,
    pub(super) state: State,
    pub(super) failure: Option<Error>,
    pub(super) packets: Packets,
    pub(super) acknowledge: Option<(Arc<str>, u64)>,
    pub(super) buffer: EventBuffer,
    pub(super) data_file: Arc<str>,
    /// Whether the event after a hole is buffered, so that it is processed before any new input.
    pub(super) event_held: bool,
    pub(super) boundary: u64,
    pub(super) open: Option<Open>,
    pub(super) run: Option<Run>,
    /// The end of the last complete transaction in the file, or the offset where reading began.
    pub(super) last_end: u64,
    pub(super) tables: Tables,
    pub(super) decompressor: Decompressor,
    pub(super) block: Option<Block>,
    pub(super) records: Vec<u8>,
    pub(super) statements: Vec<Statement>,
    pub(super) seen: GtidSet,
    pub(super) last_gtid: Gtid,
    pub(super) last_time_us: i64,
    pub(super) time_max_us: i64,
    pub(super) last_heartbeat: Option<(String, u64)>,
    pub(super) counters: Counters,
    pub(super) counts: Arc<Counts>,
}

impl BlockCutter {
    /// Starts at the position in the settings. `head` is the magic and format description of the file. It is needed
    /// only to start inside a file that does not come from a live server.
    pub fn new(settings: Settings, head: Option<&[u8]>) -> Result<BlockCutter> {
        if settings.offset > OFFSET_MAX {
            return Err(Error::new(ErrorKind::OptionInvalid, format!("a file with an offset {}", settings.offset)));
        }
        let mut cutter = BlockCutter {
            format: None,
            format_description: Vec::new(),
            file: settings.file.clone(),
            file_number: file_number(&settings.file)?,
            offset: settings.offset,
            magic_due: settings.offset == 0 && !settings.live,
            next_file: None,
            state: State::Input,
            failure: None,
            packets: Packets::new(settings.semi_sync, PIECEWISE_BYTES_MIN),
            acknowledge: None,
            buffer: EventBuffer::default(),
            data_file: settings.file.clone(),
            event_held: false,
            boundary: settings.offset,
            open: None,
            run: None,
            last_end: settings.offset,
            tables: Tables::default(),
            decompressor: Decompressor::default(),
            block: None,
            records: Vec::new(),
            statements: Vec::new(),
            seen: settings.gtid_set.clone(),
            last_gtid: Gtid::Anonymous,
            last_time_us: 0,
            time_max_us: settings.time_max_us,
            last_heartbeat: None,
            counters: Counters::default(),
            counts: Arc::default(),
            settings,
        };
        cutter.buffer.move_to(cutter.offset);
        match head {
            Some(head) => cutter.read_head(head)?,
            None if cutter.offset > 4 && !cutter.settings.live => {
                let message = "reading from inside a file needs the file's first bytes";
                return Err(Error::new(ErrorKind::OptionInvalid, message));
            }
            None => {}
        }
        Ok(cutter)
    }

    /// Also counts events and changes in `counts`, which outlives the cutter.
    pub fn with_counts(mut self, counts: Arc<Counts>) -> BlockCutter {
        self.counts = counts;
        self
    }

    /// Returns the action that the cutter expects from the caller.
    pub fn state(&self) -> State {
        self.state
    }

    /// The file being read; in the state `File`, the new file.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The source offset of the next event. In the state `File`, the offset of the new file's first event after its
    /// format description. In the state `Hole`, the offset after the hole.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The file's format description as the server sent it; empty before the first one.
    pub fn format_description(&self) -> &[u8] {
        &self.format_description
    }

    /// The parsed format description.
    pub fn format(&self) -> Option<&Format> {
        self.format.as_ref()
    }

    /// Takes the event bytes buffered since the last call: complete events of a single file.
    pub fn take_data(&mut self) -> Bytes {
        self.buffer.take()
    }

    /// The file of the buffered event bytes, records and statements.
    pub fn data_file(&self) -> &str {
        &self.data_file
    }

    /// Size of the buffered events, in bytes.
    pub fn buffered_bytes(&self) -> usize {
        self.buffer.complete_bytes()
    }

    /// The source offsets of the buffered events: start of the first, end of the last.
    pub fn data_range(&self) -> (u64, u64) {
        (self.buffer.start, self.buffer.end)
    }

    /// The source offset after the last complete transaction in the event bytes read so far.
    pub fn boundary(&self) -> u64 {
        self.boundary
    }

    /// Whether a transaction is open.
    pub fn in_transaction(&self) -> bool {
        self.open.is_some()
    }

    /// Takes the records of the blocks closed since the last call, one after the other.
    pub fn take_records(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.records)
    }

    /// The record of the current block; None if the block has no events.
    pub fn open_record(&self) -> Option<Vec<u8>> {
        let block = self.block.as_ref().filter(|block| block.end > block.start)?;
        Some(block.encode(self.time_max_us, self.open.is_some(), self.run.as_ref()))
    }

    /// Closes the current block if it has events.
    pub fn close_block(&mut self) {
        let record = self.open_record();
        self.records.extend(record.unwrap_or_default());
        self.block = None;
    }

    /// Takes the DDL statements since the last call.
    pub fn take_statements(&mut self) -> Vec<Statement> {
        std::mem::take(&mut self.statements)
    }

    /// Continues with the new file. Does nothing and returns false while data or records of the previous file have
    /// not been taken.
    pub fn take_file(&mut self) -> bool {
        if self.state != State::File || self.has_output() {
            return false;
        }
        self.state = State::Input;
        // After a crash inside a transaction, the server continues with a new file. The transaction never committed.
        self.open = None;
        self.tables = Tables::default();
        self.data_file = self.file.clone();
        self.buffer.move_to(self.offset);
        self.boundary = self.offset;
        self.last_end = self.offset;
        if let Some(run) = &mut self.run {
            // The run now starts in the new file, where no other transaction precedes it.
            run.start = self.offset;
        }
        true
    }

    /// Continues after a hole. Does nothing and returns false while data or records before the hole have not been
    /// taken. The next call of `feed` or `feed_packets` starts with the event that revealed the hole.
    pub fn take_hole(&mut self) -> bool {
        if self.state != State::Hole || self.has_output() {
            return false;
        }
        self.state = State::Input;
        self.buffer.move_to(self.offset);
        if self.open.is_none() {
            self.boundary = self.offset;
        }
        true
    }

    /// Whether data or records are waiting to be taken.
    pub fn has_output(&self) -> bool {
        self.buffer.complete_bytes() > 0 || !self.records.is_empty()
    }

    /// GTIDs of all complete transactions, including those before the first byte.
    pub fn gtid_set(&self) -> &GtidSet {
        &self.seen
    }

    /// The GTID of the last complete transaction.
    pub fn last_gtid(&self) -> &Gtid {
        &self.last_gtid
    }

    /// Commit time of the last complete transaction in microseconds since 1970; 0 before the first.
    pub fn last_time_us(&self) -> i64 {
        self.last_time_us
    }

    /// The largest commit time read so far, including that of the open transaction.
    pub fn time_max_us(&self) -> i64 {
        self.time_max_us
    }

    /// The position of the last heartbeat, up to which the server has sent everything.
    pub fn last_heartbeat(&self) -> Option<(&str, u64)> {
        self.last_heartbeat.as_ref().map(|(file, offset)| (file.as_str(), *offset))
    }

    /// Totals over the bytes that the cutter has processed.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether the server ended the stream.
    pub fn ended(&self) -> bool {
        self.packets.ended()
    }

    /// The error that the server sent, if any.
    pub fn server_error(&self) -> Option<&ServerError> {
        self.packets.error()
    }

    /// The position that the server waits for the client to acknowledge.
    pub fn acknowledge(&self) -> Option<(&str, u64)> {
        self.acknowledge.as_ref().map(|(file, offset)| (&**file, *offset))
    }

    /// Returns the position that `acknowledge` reports, and clears it.
    pub fn take_acknowledge(&mut self) -> Option<(Arc<str>, u64)> {
        self.acknowledge.take()
    }
}
