//! The state of the decoder, and its public interface.

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

/// The action that the decoder expects from the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// More bytes.
    Input,
    /// Call `take_batch`.
    Batch,
    /// Call `answer_table`, which says how to read a table.
    Table,
    /// Call `take_statement`.
    Statement,
    /// Supply the bytes of an XA transaction that was prepared earlier.
    Prepared,
    /// Nothing: the range ends here.
    Done,
}

/// Whether an event was consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    /// The decoder needs an answer first; the event is processed again afterwards.
    Ask,
    Done,
}

/// Totals over the events that the decoder has processed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of complete events.
    pub bytes: u64,
    /// Events, including those inside payloads.
    pub events: u64,
    /// Complete transactions in range.
    pub transactions: u64,
    /// Row changes in range; an update counts as one.
    pub changes: u64,
}

pub(super) enum Emitter {
    Typed(Vec<TableBatch>),
    Envelope(EnvelopeBatch),
    Events(EventsBatch),
    Transactions(TransactionsBatch),
    Messages(Box<MessagesBatch>),
}

/// Decodes a range of a log, as the module's description explains.
pub struct Decoder {
    pub(super) options: Options,
    pub(super) format: Option<Format>,
    pub(super) relay: bool,
    /// Where the format description of the file ends.
    pub(super) format_end: u64,
    pub(super) file: Arc<str>,
    pub(super) file_number: u32,
    pub(super) offset: u64,
    pub(super) boundary: (Arc<str>, u64),
    pub(super) magic_due: bool,
    pub(super) orphan: bool,
    /// Whether the range opened at a BEGIN that may belong to a GTID event before the range.
    pub(super) in_doubt: bool,
    pub(super) open: Option<Open>,
    pub(super) prepared: Prepared,
    /// The XA transaction whose events are being read.
    pub(super) replay: Option<Box<Replay>>,
    /// What was already emitted of the range's first transaction before a reconnect. Kept until the transaction begins.
    pub(super) resume: Option<Resume>,
    pub(super) tally: Tally,
    pub(super) tables: Tables,
    pub(super) payload: Option<Box<Payload>>,
    /// The zstd decoder of the last payload. It is reused, because creating a decoder costs more than decompressing a
    /// small payload.
    pub(super) spare_zstd: Option<zstd::stream::raw::Decoder<'static>>,
    pub(super) emitter: Emitter,
    pub(super) dirty: Vec<usize>,
    pub(super) buffered_rows: usize,
    pub(super) buffered_bytes: usize,
    pub(super) ready: VecDeque<Batch>,
    pub(super) statements: VecDeque<Statement>,
    /// Whether to write the message of the statement that was just returned; None if no statement waits for this
    /// decision.
    pub(super) statement_wanted: Option<bool>,
    /// The current event.
    pub(super) event: EventView,
    /// The XID of the event that commits the open transaction.
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
    /// Starts at `options.file` and `options.offset`. `head` is the first bytes of the file (magic and format
    /// description). With it, the range may start anywhere after these bytes.
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
            buffered_rows: 0,
            buffered_bytes: 0,
            ready: VecDeque::new(),
            statements: VecDeque::new(),
            statement_wanted: None,
            event: EventView::default(),
            xid: None,
            seen: options.gtid_before.clone(),
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

    /// Returns the action that the decoder expects from the caller.
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

    /// Consumes complete events from the start of `input` and returns the number of consumed bytes.
    ///
    /// Stops early when [`Decoder::state`] is no longer `Input`. The caller must pass the remaining bytes again,
    /// followed by more bytes. An error is raised only after all complete transactions before it have been returned.
    pub fn feed(&mut self, input: &[u8]) -> Result<usize> {
        self.feed_while(input, State::Input)
    }

    /// Processes events while the decoder's state is `waits`.
    pub(super) fn feed_while(&mut self, input: &[u8], waits: State) -> Result<usize> {
        if let Some(failure) = &self.failure {
            if self.ready.is_empty() {
                return Err(failure.clone());
            }
            return Ok(0);
        }
        let mut consumed_bytes = 0;
        match self.advance(input, &mut consumed_bytes, waits) {
            Ok(()) => Ok(consumed_bytes),
            Err(error) => {
                let error = error.at(&self.file, self.offset);
                self.flush(false)?;
                self.failure = Some(error.clone());
                if self.ready.is_empty() {
                    Err(error)
                } else {
                    Ok(consumed_bytes)
                }
            }
        }
    }

    fn advance(&mut self, input: &[u8], consumed_bytes: &mut usize, waits: State) -> Result<()> {
        // The end of a prepared transaction is processed without further bytes.
        while self.state() == waits || (self.state() == State::Input && self.replay.is_some()) {
            let rest = input.get(*consumed_bytes..).unwrap_or_default();
            let consumed = if self.replay.is_some() && self.state() == State::Input {
                self.step_replay().map(|()| Some(0))?
            } else if self.payload.is_some() {
                self.step_payload(rest)?
            } else if self.magic_due {
                self.read_magic(rest)?
            } else {
                self.next_event(rest)?
            };
            match consumed {
                Some(bytes) => *consumed_bytes += bytes,
                None => break,
            }
        }
        Ok(())
    }

    /// Ends the input.
    ///
    /// `left` is the number of bytes that were passed but not consumed. The rows of complete transactions become
    /// available. An incomplete transaction is dropped if `drop_open` is set; otherwise it raises `FileTruncated`. A
    /// payload may still contain events that need an answer about a table, so call this function again until the state
    /// is `Done`.
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

    /// Adds the visible images of rows with conditions, for messages: see [`Verdicts::add`].
    ///
    /// [`Verdicts::add`]: crate::emit::verdicts::Verdicts::add
    pub fn judge(&mut self, name: (&str, &str), versions: &[i64], offsets: &[i64], codes: &[u8]) -> Result<()> {
        let Emitter::Messages(batch) = &mut self.emitter else {
            return Err(Error::new(ErrorKind::OptionInvalid, "only messages leave out single rows"));
        };
        batch.verdicts().add(name, versions, offsets, codes)
    }

    /// Drops the open transaction and stops. The rows of complete transactions become available.
    pub fn abandon(&mut self) -> Result<()> {
        (self.payload, self.replay) = (None, None);
        self.tables.request = None;
        self.statements.clear();
        self.done = true;
        self.flush(false)
    }

    /// Copies the prepared transactions that another decoder of the same log recorded.
    pub fn adopt_prepared(&mut self, before: &mut Decoder) {
        std::mem::swap(&mut self.prepared, &mut before.prepared);
    }

    /// Takes the next batch, if one is ready.
    pub fn take_batch(&mut self) -> Option<Batch> {
        self.ready.pop_front()
    }

    /// Takes the next statement, if any.
    pub fn take_statement(&mut self) -> Option<Statement> {
        self.statements.pop_front()
    }

    /// The table whose definition the decoder asks for.
    pub fn table_request(&self) -> Option<&TableRequest> {
        self.tables.request.as_ref()
    }

    /// Tells the decoder how to read the requested table.
    pub fn answer_table(&mut self, answer: Answer) {
        self.tables.answer = Some(answer);
    }

    /// Drops all answers about tables, so that the decoder asks again. Rows that are already decoded become available.
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

    /// File and offset after the last complete transaction, or after the last event between transactions.
    pub fn position(&self) -> (&str, u64) {
        (&self.boundary.0, self.boundary.1)
    }

    /// Where the next event starts.
    pub fn next_offset(&self) -> u64 {
        self.offset
    }

    /// Whether `position` is known to be outside of any transaction.
    pub fn is_aligned(&self) -> bool {
        !self.orphan
    }

    /// Where the open transaction starts. For a transaction that was prepared earlier, where its events start.
    pub fn open_transaction(&self) -> Option<u64> {
        let open = self.open.as_ref()?;
        Some(self.replayed_start().unwrap_or(open.view.start))
    }

    /// GTIDs of all transactions read. They include the transactions of earlier files if the log lists them.
    pub fn gtid_set(&self) -> &GtidSet {
        &self.seen
    }

    /// The parsed format description.
    pub fn format(&self) -> Option<&Format> {
        self.format.as_ref()
    }

    /// The name of the next file, once the log contains it.
    pub fn next_file(&self) -> Option<&str> {
        self.next_file.as_deref()
    }

    /// Whether the server closed the file properly, by a rotation or a shutdown.
    pub fn is_closed(&self) -> bool {
        self.stopped || self.next_file.is_some()
    }

    /// Commit time of the last complete transaction in the range, in microseconds since 1970; 0 before the first.
    pub fn commit_us(&self) -> i64 {
        self.commit_us
    }

    /// Totals over the events that the decoder has processed.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Makes the rows of complete transactions available, and continues. A batch that contains rows of the open
    /// transaction waits for the end of that transaction, except that a batch of messages is split.
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

    /// Tells the decoder whether the last returned statement becomes a message. Without an answer, it does.
    pub fn answer_statement(&mut self, wanted: bool) {
        self.statement_wanted = self.statement_wanted.map(|_| wanted);
    }

    /// Closes the current batches. `all` includes the rows of the open transaction.
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
        self.buffered_rows = 0;
        self.buffered_bytes = 0;
        Ok(())
    }
}
