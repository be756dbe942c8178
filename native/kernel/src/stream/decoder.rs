//! The decoder's state, and its face.

use std::collections::VecDeque;
use std::sync::Arc;

use super::open::Open;
use super::open_tables::{Answer, TableRequest, Tables};
use super::options::{Emit, Options, Resume};
use super::payload::Payload;
use super::prepared::Prepared;
use super::replay::Replay;
use super::statement::Statement;
use crate::emit::envelope::EnvelopeBatch;
use crate::emit::events::EventsBatch;
use crate::emit::messages_batch::MessagesBatch;
use crate::emit::system::EventView;
use crate::emit::transactions::{Tally, TransactionsBatch};
use crate::emit::typed::TableBatch;
use crate::emit::Batch;
use crate::error::{Error, ErrorKind, Result};
use crate::event::format_description::Format;
use crate::gtid::GtidSet;

/// What the decoder waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// More bytes.
    Input,
    /// Somebody to take a batch.
    Batch,
    /// Somebody to say how a table is to be read.
    Table,
    /// Somebody to take a statement.
    Statement,
    /// The bytes of an XA transaction that was prepared before.
    Prepared,
    /// Nothing: the range ends here.
    Done,
}

/// Whether an event was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    /// A question stands; the same event comes again.
    Ask,
    Done,
}

/// What has passed by so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of whole events.
    pub bytes: u64,
    /// Events, those inside payloads included.
    pub events: u64,
    /// Whole transactions in range.
    pub transactions: u64,
    /// Changes in range: an update counts once.
    pub changes: u64,
}

pub(super) enum Emitter {
    Typed(Vec<TableBatch>),
    Envelope(EnvelopeBatch),
    Events(EventsBatch),
    Transactions(TransactionsBatch),
    Messages(Box<MessagesBatch>),
}

/// See the text of the module above.
pub struct Decoder {
    pub(super) options: Options,
    pub(super) format: Option<Format>,
    pub(super) relay: bool,
    /// Where the file's format description ends.
    pub(super) format_end: u64,
    pub(super) file: Arc<str>,
    pub(super) file_number: u32,
    pub(super) offset: u64,
    pub(super) boundary: (Arc<str>, u64),
    pub(super) magic_due: bool,
    pub(super) orphan: bool,
    /// The range opened at a BEGIN that may belong to a GTID event before it.
    pub(super) in_doubt: bool,
    pub(super) open: Option<Open>,
    pub(super) prepared: Prepared,
    /// The XA transaction of which the events are read now.
    pub(super) replay: Option<Box<Replay>>,
    /// What was handed out of the first transaction in range, until it begins.
    pub(super) resume: Option<Resume>,
    pub(super) tally: Tally,
    pub(super) tables: Tables,
    pub(super) payload: Option<Box<Payload>>,
    /// What the last payload was decompressed with; making one anew costs more than a small payload.
    pub(super) spare_zstd: Option<zstd::stream::raw::Decoder<'static>>,
    pub(super) emitter: Emitter,
    pub(super) dirty: Vec<usize>,
    pub(super) gathered_rows: usize,
    pub(super) gathered_bytes: usize,
    pub(super) ready: VecDeque<Batch>,
    pub(super) statements: VecDeque<Statement>,
    /// A statement was handed out before its message is written: whether it is to be.
    pub(super) statement_wanted: Option<bool>,
    /// The event being read.
    pub(super) event: EventView,
    /// The number of the XID event that commits the open transaction.
    pub(super) xid: Option<u64>,
    pub(super) seen: GtidSet,
    pub(super) next_file: Option<String>,
    pub(super) stopped: bool,
    pub(super) done: bool,
    pub(super) failure: Option<Error>,
    pub(super) counters: Counters,
    pub(super) commit_us: i64,
}

impl Decoder {
    /// Starts where `options.file` and `options.offset` say. With `head`, the first bytes of the file (magic and
    /// format description), reading may start anywhere behind them.
    pub fn new(options: Options, head: Option<&[u8]>) -> Result<Decoder> {
        let emitter = match options.emit {
            Emit::Typed => Emitter::Typed(Vec::new()),
            Emit::Envelope => Emitter::Envelope(EnvelopeBatch::new(&options.instance)),
            Emit::Events => Emitter::Events(EventsBatch::default()),
            Emit::Transactions => Emitter::Transactions(TransactionsBatch::default()),
            Emit::Messages => match &options.dialect {
                Some(dialect) => Emitter::Messages(Box::new(MessagesBatch::new(dialect, &options.instance)?)),
                None => return Err(Error::new(ErrorKind::OptionInvalid, "messages need a dialect")),
            },
        };
        let mut decoder = Decoder {
            format: None,
            relay: false,
            format_end: 0,
            file: options.file.clone(),
            file_number: options.file_number,
            offset: options.offset,
            boundary: (options.file.clone(), options.offset),
            magic_due: options.offset == 0 && !options.live,
            orphan: !options.aligned,
            in_doubt: false,
            open: None,
            prepared: Prepared::new(options.prepared_bytes_max),
            replay: None,
            resume: options.resume,
            tally: Tally::default(),
            tables: Tables::default(),
            payload: None,
            spare_zstd: None,
            emitter,
            dirty: Vec::new(),
            gathered_rows: 0,
            gathered_bytes: 0,
            ready: VecDeque::new(),
            statements: VecDeque::new(),
            statement_wanted: None,
            event: EventView::default(),
            xid: None,
            seen: GtidSet::default(),
            next_file: None,
            stopped: false,
            done: false,
            failure: None,
            counters: Counters::default(),
            commit_us: 0,
            options,
        };
        if let Some(head) = head {
            decoder.read_head(head)?;
        } else if decoder.offset > 0 && !decoder.options.live {
            let message = "reading from inside a file needs the file's first bytes";
            return Err(Error::new(ErrorKind::OptionInvalid, message));
        }
        Ok(decoder)
    }

    /// What the decoder waits for.
    #[inline]
    pub fn state(&self) -> State {
        if !self.ready.is_empty() {
            State::Batch
        } else if !self.statements.is_empty() {
            State::Statement
        } else if self.tables.request.is_some() && self.tables.answer.is_none() {
            State::Table
        } else if self.done {
            State::Done
        } else if self.replay.as_ref().is_some_and(|replay| replay.needs_bytes()) {
            State::Prepared
        } else {
            State::Input
        }
    }

    /// Takes whole events from the front of `input` and returns how many bytes that were. Stops early when
    /// [`Decoder::state`] is no longer `Input`. The rest must be offered again, with more behind it.
    ///
    /// An error is raised only after every whole transaction before it has been handed out.
    pub fn feed(&mut self, input: &[u8]) -> Result<usize> {
        self.feed_while(input, State::Input)
    }

    /// Takes events while `waits` is what the decoder waits for.
    pub(super) fn feed_while(&mut self, input: &[u8], waits: State) -> Result<usize> {
        if let Some(failure) = &self.failure {
            if self.ready.is_empty() {
                return Err(failure.clone());
            }
            return Ok(0);
        }
        let mut used = 0;
        match self.advance(input, &mut used, waits) {
            Ok(()) => Ok(used),
            Err(error) => {
                let error = error.at(&self.file, self.offset);
                self.flush(false)?;
                self.failure = Some(error.clone());
                if self.ready.is_empty() {
                    Err(error)
                } else {
                    Ok(used)
                }
            }
        }
    }

    fn advance(&mut self, input: &[u8], used: &mut usize, waits: State) -> Result<()> {
        // After the last bytes of a prepared transaction its end is due, and that needs no more of them.
        while self.state() == waits || (self.state() == State::Input && self.replay.is_some()) {
            let rest = input.get(*used..).unwrap_or_default();
            let taken = if self.replay.is_some() && self.state() == State::Input {
                self.step_replay().map(|()| Some(0))?
            } else if self.payload.is_some() {
                self.step_payload(rest)?
            } else if self.magic_due {
                self.read_magic(rest)?
            } else {
                self.next_event(rest)?
            };
            match taken {
                Some(bytes) => *used += bytes,
                None => break,
            }
        }
        Ok(())
    }

    /// Ends the input. `left` is how many bytes were offered and not taken. Rows of whole transactions become
    /// available; a transaction that is not whole is dropped when `drop_open`, and raises `FileTruncated` otherwise.
    ///
    /// Events inside a payload may still be due, and with them a table to ask about: call again until the state is
    /// `Done`.
    pub fn finish(&mut self, left: usize, drop_open: bool) -> Result<()> {
        if (self.payload.is_some() || self.replay.is_some()) && self.failure.is_none() {
            self.feed(&[])?;
            if self.state() != State::Input {
                return Ok(());
            }
        }
        self.flush(false)?;
        if let Some(failure) = self.failure.clone() {
            return if self.ready.is_empty() { Err(failure) } else { Ok(()) };
        }
        if self.done || drop_open {
            self.done = true;
            return Ok(());
        }
        let what = if left > 0 {
            Some(format!("the bytes end inside an event, of which {left} bytes are there"))
        } else if self.open.is_some() {
            Some("the bytes end inside a transaction".to_owned())
        } else if self.magic_due {
            Some("the file is empty".to_owned())
        } else {
            None
        };
        self.done = true;
        if let Some(what) = what {
            let hint =
                "penstock inspect shows the last whole transaction; copy the file again once the server closed it";
            let error = Error::new(ErrorKind::FileTruncated, what).at(&self.file, self.offset).hint(hint);
            self.failure = Some(error.clone());
            if self.ready.is_empty() {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives the open transaction up: what whole transactions have left becomes available, and nothing more is read.
    pub fn abandon(&mut self) -> Result<()> {
        (self.payload, self.replay) = (None, None);
        self.tables.request = None;
        self.statements.clear();
        self.done = true;
        self.flush(false)
    }

    /// Takes over the prepared transactions that another decoder of the same log remembers.
    pub fn adopt_prepared(&mut self, before: &mut Decoder) {
        std::mem::swap(&mut self.prepared, &mut before.prepared);
    }

    /// The next batch, if one is ready.
    pub fn take_batch(&mut self) -> Option<Batch> {
        self.ready.pop_front()
    }

    /// The next statement, if one waits.
    pub fn take_statement(&mut self) -> Option<Statement> {
        self.statements.pop_front()
    }

    /// The table that the decoder asks about.
    pub fn table_request(&self) -> Option<&TableRequest> {
        self.tables.request.as_ref()
    }

    /// Says how the table asked about is to be read.
    pub fn answer_table(&mut self, answer: Answer) {
        self.tables.answer = Some(answer);
    }

    /// Forgets what was said of tables, so that each is asked about again. Rows decoded so far become available.
    pub fn forget_tables(&mut self) -> Result<()> {
        self.tables.clear();
        if self.open.is_none() {
            self.flush(true)?;
            if let Emitter::Typed(batches) = &mut self.emitter {
                batches.clear();
            }
        }
        Ok(())
    }

    /// The end of the last whole transaction, or of the event between transactions that came last: file and offset.
    pub fn position(&self) -> (&str, u64) {
        (&self.boundary.0, self.boundary.1)
    }

    /// Where the next event starts.
    pub fn next_offset(&self) -> u64 {
        self.offset
    }

    /// Whether `position` is known to have no transaction open before it.
    pub fn is_aligned(&self) -> bool {
        !self.orphan
    }

    /// Where the open transaction starts; of one that was prepared before it commits, where its events begin.
    pub fn open_transaction(&self) -> Option<u64> {
        let open = self.open.as_ref()?;
        Some(self.replayed_start().unwrap_or(open.view.start))
    }

    /// All transactions seen, those of earlier files included where the log tells.
    pub fn gtid_set(&self) -> &GtidSet {
        &self.seen
    }

    /// What the format description said.
    pub fn format(&self) -> Option<&Format> {
        self.format.as_ref()
    }

    /// The file that follows, once the log said so.
    pub fn next_file(&self) -> Option<&str> {
        self.next_file.as_deref()
    }

    /// Whether the file ended with a word of the server: rotated, or stopped.
    pub fn is_closed(&self) -> bool {
        self.stopped || self.next_file.is_some()
    }

    /// When the last whole transaction in range was committed, in microseconds since 1970; 0 before the first.
    pub fn commit_us(&self) -> i64 {
        self.commit_us
    }

    /// What has passed by.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Makes the rows of whole transactions available, and goes on: the decoder may be fed what follows. Where a
    /// transaction is open of which a batch holds rows, that batch waits for its end (one of messages is divided).
    pub fn close_batches(&mut self) -> Result<()> {
        if self.open.is_none() {
            return self.flush(true);
        }
        let position = self.boundary.clone();
        match &mut self.emitter {
            Emitter::Typed(batches) => {
                for batch in batches.iter_mut().filter(|batch| batch.is_whole()) {
                    self.ready.extend(batch.finish(true, position.clone())?);
                }
            }
            Emitter::Envelope(batch) if batch.is_whole() => self.ready.extend(batch.finish(true, position)?),
            Emitter::Envelope(_) => {}
            Emitter::Events(batch) => self.ready.extend(batch.finish(position)?),
            Emitter::Transactions(batch) => self.ready.extend(batch.finish(position)?),
            Emitter::Messages(batch) => self.ready.extend(batch.close(position)?),
        }
        Ok(())
    }

    /// Says whether the statement taken last is told of in messages; without an answer it is.
    pub fn answer_statement(&mut self, wanted: bool) {
        self.statement_wanted = self.statement_wanted.map(|_| wanted);
    }

    /// Closes the batches in the making. `all` includes the open transaction's rows.
    pub(super) fn flush(&mut self, all: bool) -> Result<()> {
        let position = self.boundary.clone();
        match &mut self.emitter {
            Emitter::Typed(batches) => {
                for batch in batches {
                    self.ready.extend(batch.finish(all, position.clone())?);
                }
            }
            Emitter::Envelope(batch) => self.ready.extend(batch.finish(all, position)?),
            Emitter::Events(batch) => self.ready.extend(batch.finish(position)?),
            Emitter::Transactions(batch) => self.ready.extend(batch.finish(position)?),
            Emitter::Messages(batch) => self.ready.extend(batch.finish(all, position)?),
        }
        self.dirty.clear();
        self.gathered_rows = 0;
        self.gathered_bytes = 0;
        Ok(())
    }
}
