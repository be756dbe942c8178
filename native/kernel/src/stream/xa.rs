//! Decodes the rows of an XA transaction when it commits.
//!
//! The events with the rows precede the commit in the log. They are either still in memory, or the caller supplies
//! their bytes ([`State::Prepared`]). While these events are read, a [`Frame`] saves the decoder's position in the log.

use std::sync::Arc;

use super::decoder::{Decoder, Emitter, Flow, State};
use super::dispatch::event_view;
use super::payload_events::read_xa_id;
use super::prepared::{HeldEvents, PreparedLocation, Transaction, SPAN_BYTES};
use super::replay::{Ending, Frame, Origin, PreparedRequest, Replay};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::compressed::decompress;
use crate::event::format_description::Format;
use crate::event::query::{Query as QueryBody, Verb};
use crate::event::rotate::file_number;
use crate::event::xa::{read_prepare, text_in, XaId};
use crate::event::{EventKind, Header};
use crate::frame::events::Span;
use crate::limits::EVENT_HEADER_BYTES;

/// Whether an event concerns the log itself or begins a transaction. Such events are processed (or rejected)
/// immediately, even between the events of an XA transaction.
fn is_log_event(kind: EventKind) -> bool {
    use EventKind::*;
    let of_file = matches!(kind, Rotate | Stop | PreviousGtids | MariadbGtidList | StartEncryption | Incident);
    of_file || kind.is_gtid()
}

impl Decoder {
    /// Holds the events of the open XA transaction until its outcome is known.
    pub(super) fn hold_events(&mut self, id: XaId) {
        if let Some(open) = self.open.as_mut().filter(|open| open.held_events.is_none()) {
            let bytes_max = if open.skipped { 0 } else { self.options.prepared_bytes_max / 2 };
            open.held_events = Some(Box::new(HeldEvents::new(id, bytes_max)));
        }
    }

    /// Processes XA START: if rows are decoded, the events that follow are held until the outcome.
    pub(super) fn begin_xa(&mut self, text: &[u8]) -> Result<Flow> {
        let id = XaId::of_statement(text)?;
        if let Emitter::Messages(batch) = &mut self.emitter {
            batch.note_xa(text_in(text).unwrap_or_default());
        }
        if self.decodes_rows() {
            self.hold_events(id);
        }
        Ok(Flow::Next)
    }

    /// Ends an XA transaction whose events were not held because events are only listed. In any other mode, an open
    /// transaction at this point means that the begin of the XA transaction is missing, which is an error.
    pub(super) fn end_prepared(&mut self, span: Span) -> Result<Flow> {
        if self.decodes_rows() && self.open.is_some() {
            return Err(malformed("an XA transaction is prepared that was not begun"));
        }
        self.end(span).map(|()| Flow::Next)
    }

    /// Processes an event of an XA transaction that is held or replayed; None for any other event.
    #[inline]
    pub(super) fn xa_event(
        &mut self,
        header: &Header,
        kind: EventKind,
        body: &[u8],
        span: Span,
    ) -> Option<Result<Flow>> {
        if self.is_replaying() {
            return Some(self.replay_event(header, kind, body, span));
        }
        let is_held = self.open.as_ref().is_some_and(|open| open.held_events.is_some());
        (is_held && !is_log_event(kind)).then(|| self.hold_event(header, kind, body, span))
    }

    /// Processes an event of a held transaction.
    #[cold]
    #[inline(never)]
    fn hold_event(&mut self, header: &Header, kind: EventKind, body: &[u8], span: Span) -> Result<Flow> {
        self.event = event_view(header, span);
        let ending = match kind {
            EventKind::XaPrepare => match read_prepare(body)?.0 {
                true => Some(Ending::CommitAtOnce),
                false => return self.prepare(span),
            },
            EventKind::Xid => {
                self.xid = Some(Cursor::new(body).u64()?);
                Some(Ending::CommitAtOnce)
            }
            EventKind::Query => {
                let query = QueryBody::read(body)?;
                match query.verb(query.text) {
                    Verb::Commit | Verb::XaCommit => Some(Ending::CommitAtOnce),
                    Verb::Rollback | Verb::XaRollback => Some(Ending::RollBack),
                    _ => None,
                }
            }
            _ => None,
        };
        match ending {
            Some(ending) => self.end_held_transaction(ending, span),
            None => {
                if let Some(held_events) = self.open.as_mut().and_then(|open| open.held_events.as_mut()) {
                    held_events.add(header, body, span);
                }
                Ok(Flow::Next)
            }
        }
    }

    /// Takes the held events of the open transaction.
    fn take_held_events(&mut self, span: Span) -> Option<(XaId, Transaction)> {
        let open = self.open.as_mut()?;
        let (id, events) = open.held_events.take()?.into_events();
        let location = PreparedLocation {
            file: self.file.clone(),
            file_number: self.file_number,
            start: open.view.start,
            end: span.end,
        };
        Some((id, Transaction { location, format: self.format.clone(), events }))
    }

    /// Records the open XA transaction as prepared, until its outcome is known.
    fn prepare(&mut self, span: Span) -> Result<Flow> {
        if let Some((id, transaction)) = self.take_held_events(span) {
            self.prepared.insert(id, transaction);
        }
        self.end_without_rows(span);
        Ok(Flow::Next)
    }

    /// Ends the open transaction without emitting its rows.
    pub(super) fn end_without_rows(&mut self, span: Span) {
        if let Some(open) = self.open.take() {
            self.seen.add(&open.view.gtid);
            if !open.skipped {
                self.commit_us = open.view.commit_us;
            }
        }
        self.orphan = false;
        self.mark_boundary(span.end);
    }

    /// Ends the open XA transaction, which has no second phase: its rows are decoded now.
    fn end_held_transaction(&mut self, ending: Ending, span: Span) -> Result<Flow> {
        let skipped = self.open.as_ref().is_some_and(|open| open.skipped);
        match self.take_held_events(span) {
            Some((id, transaction)) if !skipped => self.begin_replay(id, Some(transaction), ending, span),
            _ => self.end_without_rows(span),
        }
        Ok(Flow::Next)
    }

    /// Records the location of a skipped payload, because it may prepare an XA transaction that commits inside the
    /// range.
    pub(super) fn note_skipped_payload(&mut self, body: &[u8], span: Span) {
        if !self.decodes_rows() {
            return;
        }
        // A damaged payload that is skipped must not stop the reader. If the transaction that the payload prepared is
        // committed later, that commit is rejected.
        let Ok(Some(id)) = read_xa_id(body) else { return };
        self.hold_events(id);
        if let Some((id, transaction)) = self.take_held_events(span) {
            self.prepared.insert(id, transaction);
        }
    }

    /// Processes XA COMMIT: decodes the rows of the prepared transaction as rows of the open transaction.
    pub(super) fn commit_prepared(&mut self, text: &[u8], span: Span) -> Result<Flow> {
        let id = XaId::of_statement(text)?;
        let skipped = self.open.as_ref().is_some_and(|open| open.skipped);
        if skipped || !self.decodes_rows() {
            self.prepared.note_outcome(id);
            return self.end(span).map(|()| Flow::Next);
        }
        if self.payload.is_some() {
            return Err(malformed("a transaction payload holds an XA COMMIT"));
        }
        if let Emitter::Messages(batch) = &mut self.emitter {
            batch.note_begin(self.event);
            batch.note_xa(text_in(text).unwrap_or_default());
        }
        let transaction = self.prepared.get(&id).cloned();
        let ending = Ending::CommitPrepared(String::from_utf8_lossy(text).into());
        self.begin_replay(id, transaction, ending, span);
        Ok(Flow::Next)
    }

    /// Processes XA ROLLBACK: the prepared transaction has no effect.
    pub(super) fn forget_prepared(&mut self, text: &[u8], span: Span) -> Result<Flow> {
        self.prepared.note_outcome(XaId::of_statement(text)?);
        self.end(span).map(|()| Flow::Next)
    }

    fn begin_replay(&mut self, id: XaId, transaction: Option<Transaction>, ending: Ending, span: Span) {
        let origin = match transaction {
            None => Origin::Unknown,
            Some(Transaction { events: Some(events), location, format }) => {
                Origin::Memory { events, at: 0, location, format }
            }
            Some(Transaction { location, .. }) => Origin::Requested(location),
        };
        let (end_event, ended) = (self.event, false);
        self.replay = Some(Box::new(Replay { id, ending, origin, end_event, end_span: span, frame: None, ended }));
    }

    /// Whether the next event belongs to a held XA transaction that is being replayed.
    #[inline]
    pub(super) fn is_replaying(&self) -> bool {
        self.replay.as_ref().is_some_and(|replay| replay.frame.is_some())
    }

    /// Returns where the events of the replayed XA transaction start.
    pub(super) fn replayed_start(&self) -> Option<u64> {
        let replay = self.replay.as_ref().filter(|replay| replay.frame.is_some())?;
        match &replay.origin {
            Origin::Memory { location, .. } | Origin::Requested(location) | Origin::Read { location, .. } => {
                Some(location.start)
            }
            Origin::Unknown => None,
        }
    }

    /// Returns the file and span at which an event takes effect: for a prepared transaction, those of its commit.
    pub(super) fn effective_span(&self, span: Span) -> (&Arc<str>, Span) {
        match self.replay.as_deref() {
            Some(Replay { ending: Ending::CommitPrepared(_), frame: Some(frame), end_event, .. }) => {
                (&frame.file, Span { start: end_event.offset, end: end_event.end_offset })
            }
            _ => (&self.file, span),
        }
    }

    /// Returns the number of the file that the range has reached.
    pub(super) fn range_file_number(&self) -> u32 {
        let frame = self.replay.as_ref().and_then(|replay| replay.frame.as_ref());
        frame.map_or(self.file_number, |frame| frame.file_number)
    }

    /// Moves the decoder to a prepared transaction and saves its state.
    fn enter(&mut self, location: &PreparedLocation, format: Option<Format>) {
        let frame = Frame {
            file: std::mem::replace(&mut self.file, location.file.clone()),
            file_number: std::mem::replace(&mut self.file_number, location.file_number),
            offset: std::mem::replace(&mut self.offset, location.start),
            format: std::mem::replace(&mut self.format, format),
            relay: self.relay,
            format_end: std::mem::replace(&mut self.format_end, 0),
            payload: self.payload.take(),
        };
        if let Some(replay) = &mut self.replay {
            replay.frame = Some(frame);
        }
    }

    /// Restores the state that `enter` saved.
    fn leave(&mut self) {
        let Some(frame) = self.replay.as_mut().and_then(|replay| replay.frame.take()) else { return };
        self.file = frame.file;
        self.file_number = frame.file_number;
        self.offset = frame.offset;
        self.format = frame.format;
        self.relay = frame.relay;
        self.format_end = frame.format_end;
        self.payload = frame.payload;
    }

    /// The prepared transaction whose bytes the decoder needs.
    pub fn prepared_request(&self) -> Option<PreparedRequest> {
        let replay = self.replay.as_ref()?;
        let location = match &replay.origin {
            Origin::Requested(location) => Some(location.clone()),
            Origin::Unknown => None,
            Origin::Memory { .. } | Origin::Read { .. } => return None,
        };
        let commit = (self.file.clone(), self.open.as_ref()?.view.start);
        Some(PreparedRequest { id: replay.id.to_string(), commit, location })
    }

    /// Sets the location of the prepared transaction's bytes. The caller then passes these bytes to `feed_prepared`.
    /// `head` is the magic and format description of the file; it is not needed for a live server, which sends them
    /// itself. A second call starts again at the first byte, and drops rows that were already decoded.
    pub fn answer_prepared(&mut self, file: &str, start: u64, end: u64, head: Option<&[u8]>) -> Result<()> {
        if !self.replay.as_ref().is_some_and(|replay| replay.needs_bytes()) {
            return Err(Error::new(ErrorKind::OptionInvalid, "no prepared transaction is asked for"));
        }
        self.leave();
        let location = PreparedLocation { file: file.into(), file_number: file_number(file)?, start, end };
        self.enter(&location, None);
        if let Some(replay) = &mut self.replay {
            replay.origin = Origin::Read { location, begun: false };
        }
        if let Some(open) = &mut self.open {
            open.resume_rows = open.resume_rows.max(open.rows);
            open.rows = 0;
        }
        if let Emitter::Messages(batch) = &mut self.emitter {
            batch.begin_again();
        }
        match head {
            Some(head) => self.read_head(head),
            None => Ok(()),
        }
    }

    /// Whether the decoder waits for `feed_prepared`, or for an answer about the bytes fed to it.
    pub fn reads_prepared(&self) -> bool {
        let replay = self.replay.as_ref();
        replay.is_some_and(|replay| matches!(replay.origin, Origin::Read { .. }) && !replay.ended)
    }

    /// Returns the location of a prepared transaction that was read and whose outcome is unknown.
    pub fn prepared_location(&self, id: &str) -> Result<Option<&PreparedLocation>> {
        let id = XaId::of_text(id)?;
        Ok(self.prepared.get(&id).map(|transaction| &transaction.location))
    }

    /// Whether the outcome of an earlier prepared transaction with this id was read.
    pub fn has_outcome(&self, id: &str) -> Result<bool> {
        Ok(self.prepared.has_outcome(&XaId::of_text(id)?))
    }

    /// Returns all prepared transactions that were read and whose outcome is unknown, in any order.
    pub fn prepared_locations(&self) -> impl Iterator<Item = (String, &PreparedLocation)> {
        self.prepared.locations()
    }

    /// Records a transaction that was prepared before the range.
    pub fn note_prepared(&mut self, id: &str, file: &str, start: u64, end: u64) -> Result<()> {
        let location = PreparedLocation { file: file.into(), file_number: file_number(file)?, start, end };
        self.prepared.insert(XaId::of_text(id)?, Transaction { location, format: None, events: None });
        Ok(())
    }

    /// Consumes bytes of the prepared transaction, as `feed` does for bytes of the range.
    pub fn feed_prepared(&mut self, input: &[u8]) -> Result<usize> {
        match self.state() {
            State::Prepared if self.prepared_request().is_none() => self.feed_while(input, State::Prepared),
            _ => Ok(0),
        }
    }

    /// Processes the next event in memory, and ends the transaction after the last event.
    pub(super) fn step_replay(&mut self) -> Result<()> {
        let Some(mut replay) = self.replay.take() else { return Ok(()) };
        if replay.ended {
            self.replay = Some(replay);
            return self.end_replay();
        }
        let Origin::Memory { events, at, location, format } = &mut replay.origin else {
            self.replay = Some(replay);
            return Ok(());
        };
        let (events, first) = (events.clone(), *at);
        if replay.frame.is_none() {
            let (location, format) = (location.clone(), format.take());
            self.replay = Some(replay);
            self.enter(&location, format);
            return Ok(());
        }
        let Some(bytes) = events.get(first..).filter(|bytes| !bytes.is_empty()) else {
            replay.ended = true;
            self.replay = Some(replay);
            return Ok(());
        };
        let mut cursor = Cursor::new(bytes);
        let span = Span { start: cursor.u64()?, end: cursor.u64()? };
        let header = Header::read(&mut cursor)?;
        let size = header.size as usize;
        let body = cursor.take(size.saturating_sub(EVENT_HEADER_BYTES))?;
        self.offset = span.start;
        self.replay = Some(replay);
        let kind = header.kind().ok_or_else(|| malformed("an event was kept that is not known"))?;
        if self.replay_event(&header, kind, body, span)? == Flow::Next {
            if let Some(Origin::Memory { at, .. }) = self.replay.as_mut().map(|replay| &mut replay.origin) {
                *at = first + SPAN_BYTES + size;
            }
        }
        Ok(())
    }

    fn end_replay(&mut self) -> Result<()> {
        self.leave();
        let Some(replay) = self.replay.take() else { return Ok(()) };
        self.event = replay.end_event;
        let outcome = match replay.ending {
            Ending::RollBack => return self.roll_back(replay.end_span),
            Ending::CommitAtOnce => None,
            Ending::CommitPrepared(statement) => Some(statement),
        };
        self.prepared.remove(&replay.id);
        if let Emitter::Messages(batch) = &mut self.emitter {
            batch.note_xa_commit(outcome);
        }
        self.end(replay.end_span)
    }

    /// Processes an event of a replayed transaction.
    #[cold]
    #[inline(never)]
    fn replay_event(&mut self, header: &Header, kind: EventKind, body: &[u8], span: Span) -> Result<Flow> {
        let Some(replay) = self.replay.as_mut() else { return Ok(Flow::Next) };
        let mut event = event_view(header, span);
        if matches!(replay.ending, Ending::CommitPrepared(_)) {
            // The rows take effect at the commit, whose position determines their order for readers.
            (event.offset, event.end_offset, event.shared) =
                (replay.end_event.offset, replay.end_event.end_offset, true);
        }
        if let Origin::Read { location, begun } = &mut replay.origin {
            if span.start >= location.end || (kind.is_gtid() && std::mem::replace(begun, true)) {
                return Err(malformed("a prepared XA transaction has no end where it was prepared"));
            }
        }
        self.event = event;
        if kind.change().is_some() {
            return self.rows(header, kind, body, span);
        }
        match kind {
            EventKind::TableMap => self.table_map(header, body, span),
            EventKind::Query => self.replay_query(header, body, None, span),
            EventKind::QueryCompressed => {
                let text = decompress(QueryBody::read(body)?.text)?;
                self.replay_query(header, body, Some(&text), span)
            }
            EventKind::RowsQuery | EventKind::AnnotateRows => {
                self.rows_query(kind, body);
                Ok(Flow::Next)
            }
            EventKind::TransactionPayload => self.open_payload(body, span),
            EventKind::ExecuteLoadQuery => {
                let (query, text) = QueryBody::read_load(body)?;
                self.process_statement(header, &query, &text, true, span)
            }
            EventKind::XaPrepare => {
                let id = read_prepare(body)?.1;
                self.end_replayed(Some(&id))
            }
            EventKind::Xid => self.end_replayed(None),
            EventKind::Rotate | EventKind::Stop | EventKind::FormatDescription | EventKind::Incident => {
                Err(malformed("a prepared XA transaction has no end where it was prepared"))
            }
            _ => Ok(Flow::Next),
        }
    }

    fn end_replayed(&mut self, id: Option<&XaId>) -> Result<Flow> {
        let Some(replay) = self.replay.as_mut() else { return Ok(Flow::Next) };
        let fits = match (&replay.ending, id) {
            (Ending::CommitPrepared(_), None) => false,
            (_, id) => id.is_none_or(|id| *id == replay.id),
        };
        if !fits {
            return Err(malformed(format!("another XA transaction was prepared here than {}", replay.id)));
        }
        replay.ended = true;
        Ok(Flow::Next)
    }

    fn replay_query(&mut self, header: &Header, body: &[u8], plain: Option<&[u8]>, span: Span) -> Result<Flow> {
        let query = QueryBody::read(body)?;
        let text = plain.unwrap_or(query.text);
        match query.verb(text) {
            Verb::Begin | Verb::Marker => Ok(Flow::Next),
            Verb::RollbackTo => self.roll_back_to(text).map(|()| Flow::Next),
            Verb::Savepoint => {
                self.note_savepoint(text);
                Ok(Flow::Next)
            }
            verb @ (Verb::Change | Verb::Unknown | Verb::Definition) => {
                self.process_statement(header, &query, text, verb != Verb::Definition, span)
            }
            Verb::Commit | Verb::Rollback | Verb::XaCommit | Verb::XaRollback => self.end_replayed(None),
        }
    }
}
