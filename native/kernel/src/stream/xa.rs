//! The rows of an XA transaction, decoded when it commits.
//!
//! Its events lie before the commit: in memory, or in bytes that the caller is asked for ([`State::Prepared`]). While they are
//! read, the decoder's own place in the log waits in a [`Frame`].

use std::sync::Arc;

use super::decoder::{Decoder, Emitter, Flow, State};
use super::dispatch::event_view;
use super::payload_events::xa_id_in;
use super::prepared::{Holding, PreparedPlace, Transaction, SPAN_BYTES};
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

/// Whether an event belongs to the log itself, or begins a transaction. It has its usual effect, or is refused, at once and
/// not with the XA transaction in which it is found.
fn is_of_log(kind: EventKind) -> bool {
    use EventKind::*;
    let of_file = matches!(kind, Rotate | Stop | PreviousGtids | MariadbGtidList | StartEncryption | Incident);
    of_file || kind.is_gtid()
}

impl Decoder {
    /// Keeps the events of the open transaction, which is an XA transaction, until its outcome is known.
    pub(super) fn hold(&mut self, id: XaId) {
        if let Some(open) = self.open.as_mut().filter(|open| open.holding.is_none()) {
            let bytes_max = if open.skipped { 0 } else { self.options.prepared_bytes_max / 2 };
            open.holding = Some(Box::new(Holding::new(id, bytes_max)));
        }
    }

    /// XA START: where rows are decoded, the events that follow wait for the outcome.
    pub(super) fn begin_xa(&mut self, text: &[u8]) -> Result<Flow> {
        let id = XaId::of_statement(text)?;
        if let Emitter::Messages(batch) = &mut self.emitter {
            batch.note_xa(text_in(text).unwrap_or_default());
        }
        if self.decodes_rows() {
            self.hold(id);
        }
        Ok(Flow::Next)
    }

    /// The end of an XA transaction of which the events were not kept: they are listed, or its begin is missing.
    pub(super) fn end_prepared(&mut self, span: Span) -> Result<Flow> {
        if self.decodes_rows() && self.open.is_some() {
            return Err(malformed("an XA transaction is prepared that was not begun"));
        }
        self.end(span).map(|()| Flow::Next)
    }

    /// Takes an event of an XA transaction that waits for its outcome, or of one that has ended; None for any other event.
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
        let held = self.open.as_ref().is_some_and(|open| open.holding.is_some());
        (held && !is_of_log(kind)).then(|| self.hold_event(header, kind, body, span))
    }

    /// Takes an event of a transaction that is held.
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
            Some(ending) => self.end_held(ending, span),
            None => {
                if let Some(holding) = self.open.as_mut().and_then(|open| open.holding.as_mut()) {
                    holding.add(header, body, span);
                }
                Ok(Flow::Next)
            }
        }
    }

    /// Takes the open transaction's kept events out.
    fn take_held(&mut self, span: Span) -> Option<(XaId, Transaction)> {
        let open = self.open.as_mut()?;
        let (id, events) = open.holding.take()?.into_events();
        let place = PreparedPlace {
            file: self.file.clone(),
            file_number: self.file_number,
            start: open.view.start,
            end: span.end,
        };
        Some((id, Transaction { place, format: self.format.clone(), events }))
    }

    /// The open XA transaction is prepared: it waits for its outcome.
    fn prepare(&mut self, span: Span) -> Result<Flow> {
        if let Some((id, transaction)) = self.take_held(span) {
            self.prepared.insert(id, transaction);
        }
        self.end_unheard(span);
        Ok(Flow::Next)
    }

    /// Ends the open transaction, of which nothing is handed out here.
    pub(super) fn end_unheard(&mut self, span: Span) {
        if let Some(open) = self.open.take().filter(|open| !open.skipped) {
            self.commit_us = open.view.commit_us;
        }
        self.orphan = false;
        self.mark_boundary(span.end);
    }

    /// The open XA transaction ends without a second phase: its rows are decoded now.
    fn end_held(&mut self, ending: Ending, span: Span) -> Result<Flow> {
        let skipped = self.open.as_ref().is_some_and(|open| open.skipped);
        match self.take_held(span) {
            Some((id, transaction)) if !skipped => self.replay(id, Some(transaction), ending, span),
            _ => self.end_unheard(span),
        }
        Ok(Flow::Next)
    }

    /// Remembers where a transaction lies that is passed over without a look at its rows: what prepares it may be before a
    /// range, and what commits it inside.
    pub(super) fn note_passed_payload(&mut self, body: &[u8], span: Span) {
        if !self.decodes_rows() {
            return;
        }
        // A damaged payload that nobody wants stops no reader; a commit of what it prepared is refused as missing.
        let Ok(Some(id)) = xa_id_in(body) else { return };
        self.hold(id);
        if let Some((id, transaction)) = self.take_held(span) {
            self.prepared.insert(id, transaction);
        }
    }

    /// XA COMMIT: the rows of the prepared transaction are decoded now, as rows of the open one.
    pub(super) fn commit_prepared(&mut self, text: &[u8], span: Span) -> Result<Flow> {
        let id = XaId::of_statement(text)?;
        let skipped = self.open.as_ref().is_some_and(|open| open.skipped);
        if skipped || !self.decodes_rows() {
            self.prepared.pass_outcome(id);
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
        self.replay(id, transaction, ending, span);
        Ok(Flow::Next)
    }

    /// XA ROLLBACK: nothing of the prepared transaction became true.
    pub(super) fn forget_prepared(&mut self, text: &[u8], span: Span) -> Result<Flow> {
        self.prepared.pass_outcome(XaId::of_statement(text)?);
        self.end(span).map(|()| Flow::Next)
    }

    fn replay(&mut self, id: XaId, transaction: Option<Transaction>, ending: Ending, span: Span) {
        let origin = match transaction {
            None => Origin::Unknown,
            Some(Transaction { events: Some(events), place, format }) => {
                Origin::Memory { events, at: 0, place, format }
            }
            Some(Transaction { place, .. }) => Origin::Asked(place),
        };
        let (end_event, ended) = (self.event, false);
        self.replay = Some(Box::new(Replay { id, ending, origin, end_event, end_span: span, frame: None, ended }));
    }

    /// Whether the event that comes next is one of an XA transaction that has ended further on.
    #[inline]
    pub(super) fn is_replaying(&self) -> bool {
        self.replay.as_ref().is_some_and(|replay| replay.frame.is_some())
    }

    /// Where the events begin that are read now, if they are of an XA transaction that has ended further on.
    pub(super) fn replayed_start(&self) -> Option<u64> {
        let replay = self.replay.as_ref().filter(|replay| replay.frame.is_some())?;
        match &replay.origin {
            Origin::Memory { place, .. } | Origin::Asked(place) | Origin::Read { place, .. } => Some(place.start),
            Origin::Unknown => None,
        }
    }

    /// The file and the span where an event takes effect: of a prepared transaction, those of its commit.
    pub(super) fn effective_span(&self, span: Span) -> (&Arc<str>, Span) {
        match self.replay.as_deref() {
            Some(Replay { ending: Ending::CommitPrepared(_), frame: Some(frame), end_event, .. }) => {
                (&frame.file, Span { start: end_event.offset, end: end_event.end_offset })
            }
            _ => (&self.file, span),
        }
    }

    /// The number of the file that the range has come to.
    pub(super) fn range_file_number(&self) -> u32 {
        let frame = self.replay.as_ref().and_then(|replay| replay.frame.as_ref());
        frame.map_or(self.file_number, |frame| frame.file_number)
    }

    /// Puts the decoder at a prepared transaction.
    fn enter(&mut self, place: &PreparedPlace, format: Option<Format>) {
        let frame = Frame {
            file: std::mem::replace(&mut self.file, place.file.clone()),
            file_number: std::mem::replace(&mut self.file_number, place.file_number),
            offset: std::mem::replace(&mut self.offset, place.start),
            format: std::mem::replace(&mut self.format, format),
            relay: self.relay,
            format_end: std::mem::replace(&mut self.format_end, 0),
            payload: self.payload.take(),
        };
        if let Some(replay) = &mut self.replay {
            replay.frame = Some(frame);
        }
    }

    /// Puts the decoder back to where the log goes on.
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

    /// The prepared transaction that the decoder needs bytes of.
    pub fn prepared_request(&self) -> Option<PreparedRequest> {
        let replay = self.replay.as_ref()?;
        let place = match &replay.origin {
            Origin::Asked(place) => Some(place.clone()),
            Origin::Unknown => None,
            Origin::Memory { .. } | Origin::Read { .. } => return None,
        };
        let commit = (self.file.clone(), self.open.as_ref()?.view.start);
        Some(PreparedRequest { id: replay.id.to_string(), commit, place })
    }

    /// Says where the bytes of the prepared transaction lie that `feed_prepared` gets; `head` is that file's magic and format
    /// description, which a live server sends itself. Said again, the bytes begin again, and rows decoded so far are dropped
    /// from them.
    pub fn answer_prepared(&mut self, file: &str, start: u64, end: u64, head: Option<&[u8]>) -> Result<()> {
        if !self.replay.as_ref().is_some_and(|replay| replay.needs_bytes()) {
            return Err(Error::new(ErrorKind::OptionInvalid, "no prepared transaction is asked for"));
        }
        self.leave();
        let place = PreparedPlace { file: file.into(), file_number: file_number(file)?, start, end };
        self.enter(&place, None);
        if let Some(replay) = &mut self.replay {
            replay.origin = Origin::Read { place, begun: false };
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

    /// Whether `feed_prepared` needs bytes, or answers about them.
    pub fn reads_prepared(&self) -> bool {
        let replay = self.replay.as_ref();
        replay.is_some_and(|replay| matches!(replay.origin, Origin::Read { .. }) && !replay.ended)
    }

    /// Where a prepared transaction lies that was passed and of which the outcome has not come.
    pub fn prepared_place(&self, id: &str) -> Result<Option<&PreparedPlace>> {
        let id = XaId::of_text(id)?;
        Ok(self.prepared.get(&id).map(|transaction| &transaction.place))
    }

    /// Whether an outcome was passed of a transaction of this id that was prepared earlier.
    pub fn has_outcome(&self, id: &str) -> Result<bool> {
        Ok(self.prepared.has_outcome(&XaId::of_text(id)?))
    }

    /// All prepared transactions that were passed and of which the outcome has not come, in no order.
    pub fn prepared_places(&self) -> impl Iterator<Item = (String, &PreparedPlace)> {
        self.prepared.places()
    }

    /// Notes a transaction that was prepared before what is read.
    pub fn note_prepared(&mut self, id: &str, file: &str, start: u64, end: u64) -> Result<()> {
        let place = PreparedPlace { file: file.into(), file_number: file_number(file)?, start, end };
        self.prepared.insert(XaId::of_text(id)?, Transaction { place, format: None, events: None });
        Ok(())
    }

    /// Takes bytes of the prepared transaction, as `feed` takes those of the range.
    pub fn feed_prepared(&mut self, input: &[u8]) -> Result<usize> {
        match self.state() {
            State::Prepared if self.prepared_request().is_none() => self.feed_while(input, State::Prepared),
            _ => Ok(0),
        }
    }

    /// Goes one step on in the events in memory, and ends the transaction after its last.
    pub(super) fn step_replay(&mut self) -> Result<()> {
        let Some(mut replay) = self.replay.take() else { return Ok(()) };
        if replay.ended {
            self.replay = Some(replay);
            return self.end_replay();
        }
        let Origin::Memory { events, at, place, format } = &mut replay.origin else {
            self.replay = Some(replay);
            return Ok(());
        };
        let (events, first) = (events.clone(), *at);
        if replay.frame.is_none() {
            let (place, format) = (place.clone(), format.take());
            self.replay = Some(replay);
            self.enter(&place, format);
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
        let kind = EventKind::from_code(header.code).ok_or_else(|| malformed("an event was kept that is not known"))?;
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

    /// What an event of a prepared transaction does.
    #[cold]
    #[inline(never)]
    fn replay_event(&mut self, header: &Header, kind: EventKind, body: &[u8], span: Span) -> Result<Flow> {
        let Some(replay) = self.replay.as_mut() else { return Ok(Flow::Next) };
        let mut event = event_view(header, span);
        if matches!(replay.ending, Ending::CommitPrepared(_)) {
            // The rows become true there; that is the place by which readers order them.
            (event.offset, event.end_offset, event.shared) =
                (replay.end_event.offset, replay.end_event.end_offset, true);
        }
        if let Origin::Read { place, begun } = &mut replay.origin {
            if span.start >= place.end || (kind.is_gtid() && std::mem::replace(begun, true)) {
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
                self.statement(header, &query, &text, true, span)
            }
            EventKind::XaPrepare => {
                let id = read_prepare(body)?.1;
                self.end_of_replayed(Some(&id))
            }
            EventKind::Xid => self.end_of_replayed(None),
            EventKind::Rotate | EventKind::Stop | EventKind::FormatDescription | EventKind::Incident => {
                Err(malformed("a prepared XA transaction has no end where it was prepared"))
            }
            _ => Ok(Flow::Next),
        }
    }

    fn end_of_replayed(&mut self, id: Option<&XaId>) -> Result<Flow> {
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
                self.statement(header, &query, text, verb != Verb::Definition, span)
            }
            Verb::Commit | Verb::Rollback | Verb::XaCommit | Verb::XaRollback => self.end_of_replayed(None),
        }
    }
}
