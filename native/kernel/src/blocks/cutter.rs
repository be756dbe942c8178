//! The cutter's state, and what can be taken from it.

use std::sync::Arc;

use super::gathered::Gathered;
use super::open::Open;
use super::record::{Block, Run};
use super::tables::Tables;
use super::unpacking::Unpacking;
use crate::error::{Error, ErrorKind, Result};
use crate::event::format_description::Format;
use crate::event::rotate::file_number;
use crate::event::session::Session;
use crate::frame::packet::{Packets, ServerError};
use crate::gtid::{Gtid, GtidSet};

/// Offsets of a file stay below this, so that adding the length of an event never passes 64 bits.
pub(super) const OFFSET_MAX: u64 = 1 << 62;

/// A transaction that passes this many blocks may be cut into several.
pub(super) const TRANSACTION_BLOCKS_MAX: u64 = 16;

/// A packet of at least this length is taken as it arrives, so that nobody has to hold it whole beside the chunk.
const PIECEWISE_BYTES_MIN: usize = 256 << 10;

/// See the fields.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The epoch, for the records.
    pub epoch: u32,
    /// The source's file in which the first byte lies.
    pub file: Arc<str>,
    /// Where the first byte lies in it: the start of an event between transactions. 0 means the magic comes first.
    pub offset: u64,
    /// Every transaction before it.
    pub gtid_set: GtidSet,
    /// A block closes at this size, at the next end of a transaction.
    pub block_bytes: u64,
    /// The largest commit time of the log before it, in microseconds since 1970.
    pub time_max_us: i64,
    /// Whether the bytes come from a live server, which leaves events out and makes others up.
    pub live: bool,
    /// Whether the packets carry the marks of semi-synchronous replication.
    pub semi_sync: bool,
    /// Whether definitions are handed out.
    pub statements: bool,
}

/// What the cutter waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// More bytes.
    Input,
    /// Somebody to take in that a new source file begins.
    File,
    /// Somebody to take in that bytes of the source file are left out.
    Hole,
}

/// A definition in the log (DDL).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// The text, as UTF-8.
    pub text: String,
    /// The default database when it ran; may be empty.
    pub database: String,
    /// What its event says of the session.
    pub session: Session,
    /// The source offset of its event.
    pub start: u64,
    /// The source offset behind its event.
    pub end: u64,
}

/// What has passed by so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Events that were kept.
    pub events: u64,
    /// Whole transactions.
    pub transactions: u64,
    /// Changes, an update counts once; those of the open transaction too.
    pub changes: u64,
    /// Heartbeats.
    pub heartbeats: u64,
}

/// See the text of the module above.
pub struct BlockCutter {
    pub(super) settings: Settings,
    pub(super) format: Option<Format>,
    pub(super) format_description: Vec<u8>,
    pub(super) file: Arc<str>,
    pub(super) file_number: u32,
    pub(super) offset: u64,
    pub(super) magic_due: bool,
    /// Where the next file begins, as the server said ahead of its format description.
    pub(super) rotated: Option<(String, u64)>,
    pub(super) state: State,
    pub(super) failure: Option<Error>,
    pub(super) packets: Packets,
    pub(super) acknowledge: Option<(Arc<str>, u64)>,
    pub(super) gathered: Gathered,
    pub(super) data_file: Arc<str>,
    /// The event behind a hole waits in front of whatever comes.
    pub(super) held: bool,
    pub(super) boundary: u64,
    pub(super) open: Option<Open>,
    pub(super) run: Option<Run>,
    /// Behind the last whole transaction of the file, or where the file is read from.
    pub(super) last_end: u64,
    pub(super) tables: Tables,
    pub(super) unpacking: Unpacking,
    pub(super) block: Option<Block>,
    pub(super) records: Vec<u8>,
    pub(super) statements: Vec<Statement>,
    pub(super) seen: GtidSet,
    pub(super) last_gtid: Gtid,
    pub(super) last_time_us: i64,
    pub(super) time_max_us: i64,
    pub(super) last_heartbeat: Option<(String, u64)>,
    pub(super) counters: Counters,
}

impl BlockCutter {
    /// Starts where the settings say. `head` is magic and format description of the file; without it reading starts
    /// at the file's front, or the stream brings it.
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
            rotated: None,
            state: State::Input,
            failure: None,
            packets: Packets::new(settings.semi_sync, PIECEWISE_BYTES_MIN),
            acknowledge: None,
            gathered: Gathered::default(),
            data_file: settings.file.clone(),
            held: false,
            boundary: settings.offset,
            open: None,
            run: None,
            last_end: settings.offset,
            tables: Tables::default(),
            unpacking: Unpacking::default(),
            block: None,
            records: Vec::new(),
            statements: Vec::new(),
            seen: settings.gtid_set.clone(),
            last_gtid: Gtid::Anonymous,
            last_time_us: 0,
            time_max_us: settings.time_max_us,
            last_heartbeat: None,
            counters: Counters::default(),
            settings,
        };
        cutter.gathered.move_to(cutter.offset);
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

    /// What the cutter waits for.
    pub fn state(&self) -> State {
        self.state
    }

    /// The file being read; in the state `File` the one that begins.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Where the next event is due; in the state `File` where the first of the new file stands, behind its format
    /// description, in the state `Hole` where the bytes go on.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The file's format description, as it was sent. Empty before the first.
    pub fn format_description(&self) -> &[u8] {
        &self.format_description
    }

    /// What the format description says.
    pub fn format(&self) -> Option<&Format> {
        self.format.as_ref()
    }

    /// The event bytes gathered since the last call, whole events of one file.
    pub fn take_data(&mut self) -> Vec<u8> {
        self.gathered.take()
    }

    /// Takes back the memory of data that nobody needs any more.
    pub fn recycle(&mut self, data: Vec<u8>) {
        self.gathered.recycle(data);
    }

    /// The file of the event bytes, records and statements that wait to be taken.
    pub fn data_file(&self) -> &str {
        &self.data_file
    }

    /// How many event bytes wait to be taken.
    pub fn gathered(&self) -> usize {
        self.gathered.whole()
    }

    /// The source offsets of the bytes that wait: of the first, and behind the last.
    pub fn data_range(&self) -> (u64, u64) {
        (self.gathered.start, self.gathered.end)
    }

    /// The source offset behind the last whole transaction of the bytes gathered.
    pub fn boundary(&self) -> u64 {
        self.boundary
    }

    /// Whether a transaction is open.
    pub fn in_transaction(&self) -> bool {
        self.open.is_some()
    }

    /// Records of the blocks closed since the last call, back to back.
    pub fn take_records(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.records)
    }

    /// The record of the block in the making; None where no event lies in it.
    pub fn open_record(&self) -> Option<Vec<u8>> {
        let block = self.block.as_ref().filter(|block| block.end > block.start)?;
        Some(block.encode(self.time_max_us, self.open.is_some(), self.run.as_ref()))
    }

    /// Closes the block in the making, if an event lies in it.
    pub fn close_block(&mut self) {
        let record = self.open_record();
        self.records.extend(record.unwrap_or_default());
        self.block = None;
    }

    /// Definitions since the last call.
    pub fn take_statements(&mut self) -> Vec<Statement> {
        std::mem::take(&mut self.statements)
    }

    /// Goes on with the file that begins. Data and records of the one before must have been taken, otherwise nothing
    /// happens and the answer is false.
    pub fn take_file(&mut self) -> bool {
        if self.state != State::File || self.is_untaken() {
            return false;
        }
        self.state = State::Input;
        // A server that died in mid-transaction goes on with a new file; what it had logged of it never was.
        self.open = None;
        self.tables = Tables::default();
        self.data_file = self.file.clone();
        self.gathered.move_to(self.offset);
        self.boundary = self.offset;
        self.last_end = self.offset;
        if let Some(run) = &mut self.run {
            // The file has no transaction yet, so none that the run does not hold.
            run.start = self.offset;
        }
        true
    }

    /// Goes on behind the bytes that are left out. Data and records before them must have been taken, otherwise
    /// nothing happens and the answer is false. The next call of `feed` or `feed_packets` begins with the event that
    /// showed the hole.
    pub fn take_hole(&mut self) -> bool {
        if self.state != State::Hole || self.is_untaken() {
            return false;
        }
        self.state = State::Input;
        self.gathered.move_to(self.offset);
        if self.open.is_none() {
            self.boundary = self.offset;
        }
        true
    }

    /// Whether data or records wait to be taken.
    pub fn is_untaken(&self) -> bool {
        self.gathered.whole() > 0 || !self.records.is_empty()
    }

    /// Every whole transaction so far, those before the start included.
    pub fn gtid_set(&self) -> &GtidSet {
        &self.seen
    }

    /// The id of the last whole transaction.
    pub fn last_gtid(&self) -> &Gtid {
        &self.last_gtid
    }

    /// The commit time of the last whole transaction, in microseconds since 1970; 0 before the first.
    pub fn last_time_us(&self) -> i64 {
        self.last_time_us
    }

    /// The largest commit time so far, that of the open transaction included.
    pub fn time_max_us(&self) -> i64 {
        self.time_max_us
    }

    /// The position of the last heartbeat: up to there the server has sent everything.
    pub fn last_heartbeat(&self) -> Option<(&str, u64)> {
        self.last_heartbeat.as_ref().map(|(file, offset)| (file.as_str(), *offset))
    }

    /// What has passed by.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether the server ended the stream.
    pub fn ended(&self) -> bool {
        self.packets.ended()
    }

    /// The error that the server sent instead of an event.
    pub fn server_error(&self) -> Option<&ServerError> {
        self.packets.error()
    }

    /// The position up to which the server waits for an acknowledgement.
    pub fn acknowledge(&self) -> Option<(&str, u64)> {
        self.acknowledge.as_ref().map(|(file, offset)| (&**file, *offset))
    }

    /// The same, and forgets it.
    pub fn take_acknowledge(&mut self) -> Option<(Arc<str>, u64)> {
        self.acknowledge.take()
    }
}
