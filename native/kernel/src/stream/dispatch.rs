//! Applies each event to the state of the stream.

use super::decoder::{Decoder, Emitter, Flow};
use super::statement::Statement;
use crate::cursor::Cursor;
use crate::emit::dialect::ddl::outcome_of_failed;
use crate::emit::dialect::{StatementKind, StatementView};
use crate::emit::events::EventRow;
use crate::emit::system::EventView;
use crate::error::{Error, ErrorKind, Result};
use crate::event::compressed::decompress;
use crate::event::gtid::{self, TransactionHead};
use crate::event::query::{Query as QueryBody, Verb};
use crate::event::rotate::Rotate as RotateBody;
use crate::event::session::Session;
use crate::event::{incident, mariadb_gtid, previous_gtids, tagged_gtid, EventKind, Header, FLAG_IGNORABLE};
use crate::frame::events::Span;

/// Returns the event's fields that emitters use.
pub(super) fn event_view(header: &Header, span: Span) -> EventView {
    EventView {
        offset: span.start,
        end_offset: span.end,
        timestamp: header.timestamp,
        server_id: header.server_id,
        shared: false,
    }
}

impl Decoder {
    /// Processes an event of the file or of a payload.
    pub(super) fn dispatch(&mut self, header: &Header, kind: EventKind, body: &[u8], span: Span) -> Result<Flow> {
        use EventKind::*;
        if let Some(flow) = self.xa_event(header, kind, body, span) {
            return flow;
        }
        if self.open.is_none() && !kind.is_gtid() && self.is_past_stop(span.start) {
            return Ok(Flow::Done);
        }
        self.event = event_view(header, span);
        // Events before the first transaction of the range belong to a transaction that began before it.
        if self.orphan && !kind.is_gtid() && self.open.is_none() {
            return self.skip_orphan(header, kind, body, span);
        }
        if kind.change().is_some() {
            return self.rows(header, kind, body, span);
        }
        if kind != TableMap && !kind.is_gtid() && !matches!(kind, Query | QueryCompressed | ExecuteLoadQuery) {
            self.note_event(header, kind, span, None);
        }
        match kind {
            TableMap => {
                if self.open.as_ref().is_some_and(|open| open.skipped) {
                    return Ok(Flow::Next);
                }
                self.table_map(header, body, span)
            }
            Gtid | AnonymousGtid | TaggedGtid | MariadbGtid => self.gtid_event(header, kind, body, span),
            Query | QueryCompressed | ExecuteLoadQuery => self.statement_event(header, kind, body, span),
            Xid => {
                self.xid = Some(Cursor::new(body).u64()?);
                self.end(span).map(|()| Flow::Next)
            }
            RowsQuery | AnnotateRows => {
                self.rows_query(kind, body);
                Ok(Flow::Next)
            }
            TidbCommit => self.note_tidb_commit(body).map(|()| Flow::Next),
            XaPrepare => self.end_prepared(span),
            TransactionPayload => self.open_payload(body, span),
            Incident => self.refuse_incident(body),
            StartEncryption => self.check_encryption(header),
            Rotate | Stop | PreviousGtids | MariadbGtidList => self.mark_file(kind, body, span).map(|()| Flow::Next),
            // All other events need no action. They describe the statement that changed the rows, accompany statements,
            // or belong to group replication.
            _ => Ok(Flow::Next),
        }
    }

    /// Processes an event that has a statement's text.
    fn statement_event(&mut self, header: &Header, kind: EventKind, body: &[u8], span: Span) -> Result<Flow> {
        match kind {
            EventKind::QueryCompressed => {
                let query = QueryBody::read(body)?;
                let text = decompress(query.text)?;
                self.process_query(header, &query, &text, span)
            }
            EventKind::ExecuteLoadQuery => {
                let (query, text) = QueryBody::read_load(body)?;
                self.process_query(header, &query, &text, span)
            }
            _ => {
                let query = QueryBody::read(body)?;
                self.process_query(header, &query, query.text, span)
            }
        }
    }

    fn refuse_incident(&self, body: &[u8]) -> Result<Flow> {
        if self.options.passing {
            return Ok(Flow::Next);
        }
        Err(Error::new(ErrorKind::IncidentLogged, incident::message(body)?)
            .hint("changes may be missing from the log here: take a new full copy of the tables"))
    }

    /// A server that decrypts the events it sends marks START_ENCRYPTION as ignorable, and a copied log keeps the mark.
    fn check_encryption(&self, header: &Header) -> Result<Flow> {
        if self.options.live || header.flags & FLAG_IGNORABLE != 0 {
            return Ok(Flow::Next);
        }
        Err(Error::new(ErrorKind::LogEncrypted, "the rest of the file is encrypted")
            .hint("read it from the server (mysql://...), which decrypts it"))
    }

    /// Processes events about log files: the next file, a shutdown, and the transactions of earlier files.
    fn mark_file(&mut self, kind: EventKind, body: &[u8], span: Span) -> Result<()> {
        match kind {
            EventKind::Rotate => return self.note_next_file(&RotateBody::read(body)?),
            EventKind::Stop => {
                self.stopped = true;
                return Ok(());
            }
            EventKind::MariadbGtidList => self.seen.union(&mariadb_gtid::read_list(body)?),
            _ => self.seen.union(&previous_gtids::read(body)?),
        }
        self.boundary = (self.file.clone(), span.end);
        Ok(())
    }

    /// Opens the transaction of a GTID event.
    fn gtid_event(&mut self, header: &Header, kind: EventKind, body: &[u8], span: Span) -> Result<Flow> {
        let head = match kind {
            EventKind::TaggedGtid => tagged_gtid::read(body)?,
            EventKind::MariadbGtid => mariadb_gtid::read(body, header.server_id)?,
            _ => gtid::read(body, kind == EventKind::AnonymousGtid)?,
        };
        if self.in_doubt {
            let message = "the range was cut between a GTID event and its BEGIN, in a log of which not every server writes GTID events";
            return Err(Error::new(ErrorKind::EventUnsupported, message)
                .hint("read logs of servers before MySQL 5.7 in one range for each file"));
        }
        // MariaDB logs no BEGIN after its GTID event. A flag of the event says whether a commit follows.
        let begun = kind == EventKind::MariadbGtid && !head.standalone;
        let flow = self.begin(header, head, span)?;
        if flow == Flow::Next {
            self.note_event(header, kind, span, None);
        }
        if let Some(open) = &mut self.open {
            open.begun = begun;
        }
        Ok(flow)
    }

    /// Skips the rest of a transaction that began before the range, up to the first event that can start a
    /// transaction.
    fn skip_orphan(&mut self, header: &Header, kind: EventKind, body: &[u8], span: Span) -> Result<Flow> {
        let verb = match kind {
            EventKind::Query => {
                let query = QueryBody::read(body)?;
                Some(query.verb(query.text))
            }
            _ => None,
        };
        let gtid_events = self.format.as_ref().is_some_and(|format| format.gtid_events);
        match (kind, verb) {
            // If the server always writes GTID events, this BEGIN follows a GTID event before the range.
            (_, Some(Verb::Begin)) if !gtid_events => {
                self.orphan = false;
                self.in_doubt = self.counters.events == 0;
                let query = QueryBody::read(body)?;
                self.process_query(header, &query, query.text, span)
            }
            (EventKind::Xid | EventKind::XaPrepare, _) | (_, Some(Verb::Commit)) => {
                self.orphan = false;
                self.boundary = (self.file.clone(), span.end);
                Ok(Flow::Next)
            }
            (_, Some(Verb::Definition)) => {
                // The statement spans the start of the range, so the schema history for the start of the range does not
                // include it. It is therefore returned.
                let query = QueryBody::read(body)?;
                if let Some(statement) = self.build_statement(header, &query, query.text, false, span) {
                    self.push_statement(statement);
                }
                Ok(Flow::Next)
            }
            (EventKind::Rotate, _) => {
                self.note_next_file(&RotateBody::read(body)?)?;
                Ok(Flow::Next)
            }
            (EventKind::Stop, _) => {
                self.stopped = true;
                Ok(Flow::Next)
            }
            _ => Ok(Flow::Next),
        }
    }

    fn process_query(&mut self, header: &Header, query: &QueryBody<'_>, text: &[u8], span: Span) -> Result<Flow> {
        let verb = query.verb(text);
        let opened = self.open.is_none();
        if opened {
            // In a log without GTID events, the statement opens the transaction.
            let flow = self.begin(header, TransactionHead::default(), span)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        if let Some(open) = &mut self.open {
            if open.view.thread_id.is_none() {
                open.view.thread_id = Some(i64::from(query.thread_id));
            }
        }
        self.note_statement(header, query, text, span);
        match verb {
            Verb::Begin => {
                if let Some(open) = &mut self.open {
                    open.begun = true;
                }
                if let Emitter::Messages(batch) = &mut self.emitter {
                    batch.note_begin(self.event);
                }
                if text.starts_with(b"XA") {
                    return self.begin_xa(text);
                }
                if text != b"BEGIN" {
                    return self.process_statement(header, query, text, false, span);
                }
                Ok(Flow::Next)
            }
            Verb::Commit => self.end(span).map(|()| Flow::Next),
            Verb::Rollback => self.roll_back(span).map(|()| Flow::Next),
            Verb::RollbackTo => self.roll_back_to(text).map(|()| Flow::Next),
            Verb::Savepoint => {
                self.note_savepoint(text);
                Ok(Flow::Next)
            }
            Verb::Marker => Ok(Flow::Next),
            Verb::XaRollback => self.forget_prepared(text, span),
            Verb::XaCommit => self.commit_prepared(text, span),
            Verb::Change | Verb::Unknown | Verb::Definition => {
                let flow = self.process_statement(header, query, text, verb != Verb::Definition, span)?;
                let is_whole_transaction = self.open.as_ref().is_some_and(|open| !open.begun);
                if is_whole_transaction && flow == Flow::Next {
                    self.end(span)?;
                }
                Ok(flow)
            }
        }
    }

    pub(super) fn decodes_rows(&self) -> bool {
        matches!(self.emitter, Emitter::Typed(_) | Emitter::Envelope(_) | Emitter::Messages(_))
    }

    pub(super) fn process_statement(
        &mut self,
        header: &Header,
        query: &QueryBody<'_>,
        text: &[u8],
        is_change: bool,
        span: Span,
    ) -> Result<Flow> {
        let Some(statement) = self.build_statement(header, query, text, is_change, span) else {
            return Ok(Flow::Next);
        };
        if is_change || !matches!(self.emitter, Emitter::Messages(_)) {
            self.push_statement(statement);
            return Ok(Flow::Next);
        }
        match self.statement_wanted.take() {
            // The caller decides whether to write the statement as a message, then the event is processed again.
            None if self.options.statements => {
                self.statement_wanted = Some(true);
                self.push_statement(statement);
                return Ok(Flow::Ask);
            }
            Some(false) => {}
            _ => self.write_statement_message(&statement, StatementKind::Definition)?,
        }
        Ok(Flow::Next)
    }

    /// Writes the message of a statement, if messages are emitted.
    fn write_statement_message(&mut self, statement: &Statement, kind: StatementKind) -> Result<()> {
        let (Emitter::Messages(batch), Some(open)) = (&mut self.emitter, &self.open) else { return Ok(()) };
        // If rows after the statement were emitted before a reconnect, the statement was emitted with them.
        if open.skipped || open.rows < open.resume_rows {
            return Ok(());
        }
        let statement = StatementView {
            database: &statement.database,
            text: &statement.text,
            backslash: statement.session.backslash(),
            kind,
            alone: !open.begun,
        };
        self.buffered_rows += 1;
        batch.add_statement(&open.view, self.event, &statement)
    }

    /// Records, for messages, the text of the statement that changed the following rows. MySQL prefixes the text with a
    /// length byte; MariaDB does not.
    pub(super) fn rows_query(&mut self, kind: EventKind, body: &[u8]) {
        if let Emitter::Messages(batch) = &mut self.emitter {
            let text = if kind == EventKind::RowsQuery { body.get(1..).unwrap_or_default() } else { body };
            batch.note_rows_query(self.event, text);
        }
    }

    /// Builds the statement for the caller; None for DDL that failed without effect.
    fn build_statement(
        &self,
        header: &Header,
        query: &QueryBody<'_>,
        text: &[u8],
        is_change: bool,
        span: Span,
    ) -> Option<Statement> {
        let (file, span) = self.effective_span(span);
        let database = String::from_utf8_lossy(query.database).into_owned();
        let mut text = query.text_utf8(text);
        let session = Session::read(query.variables);
        if query.error_code != 0 && !is_change {
            text = outcome_of_failed(&text, &database, session.backslash())?.into_owned();
        }
        Some(Statement {
            database,
            text,
            is_change,
            session,
            is_skipped: self.orphan || self.open.as_ref().is_some_and(|open| open.skipped),
            file: file.clone(),
            offset: span.start,
            end_offset: span.end,
            transaction_end: self.open.as_ref().and_then(|open| open.end),
            timestamp_us: i64::from(header.timestamp) * 1_000_000,
            commit_us: self.open.as_ref().map_or(i64::from(header.timestamp) * 1_000_000, |open| open.view.commit_us),
            server_id: header.server_id,
            gtid: self.open_gtid(),
            commit_ts: self.open.as_ref().and_then(|open| open.commit_ts),
        })
    }

    fn push_statement(&mut self, statement: Statement) {
        if self.options.statements {
            self.statements.push_back(statement);
        }
    }

    /// Returns the GTID of the open transaction; empty if it has none.
    fn open_gtid(&self) -> String {
        let mut gtid = String::new();
        if let Some(open) = &self.open {
            open.view.gtid.write(&mut gtid);
        }
        gtid
    }

    fn note_statement(&mut self, header: &Header, query: &QueryBody<'_>, text: &[u8], span: Span) {
        match &self.emitter {
            Emitter::Transactions(_) => {
                self.tally.events += 1;
                if matches!(query.verb(text), Verb::Definition | Verb::Change | Verb::Unknown) {
                    self.tally.statement = Some(query.text_utf8(text));
                }
            }
            Emitter::Events(_) => {
                let text = query.text_utf8(text);
                let database = String::from_utf8_lossy(query.database).into_owned();
                let kind = header.kind().unwrap_or(EventKind::Query);
                self.add_event_row(
                    header,
                    kind,
                    span,
                    Some(&database).filter(|d| !d.is_empty()).map(String::as_str),
                    None,
                    None,
                    Some(text),
                );
            }
            _ => {}
        }
    }

    /// Records an event for the emitters that list or count events.
    pub(super) fn note_event(
        &mut self,
        header: &Header,
        kind: EventKind,
        span: Span,
        table: Option<(&str, &str, Option<u32>)>,
    ) {
        match self.emitter {
            Emitter::Transactions(_) => self.tally.events += 1,
            Emitter::Events(_) => {
                let (database, name, rows) = match table {
                    Some((database, name, rows)) => (Some(database), Some(name), rows),
                    None => (None, None, None),
                };
                self.add_event_row(header, kind, span, database, name, rows, None);
            }
            _ => {}
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn add_event_row(
        &mut self,
        header: &Header,
        kind: EventKind,
        span: Span,
        database: Option<&str>,
        table: Option<&str>,
        rows: Option<u32>,
        text: Option<String>,
    ) {
        let before = self.options.start.is_some_and(|start| (self.file_number, span.start) < start);
        if before && self.open.is_none() || self.open.as_ref().is_some_and(|open| open.skipped) {
            return;
        }
        if let Some(open) = &mut self.open {
            open.events += 1;
            if open.events <= open.resume_rows {
                return;
            }
        }
        let gtid = self.open_gtid();
        let file = self.file.clone();
        if let Emitter::Events(batch) = &mut self.emitter {
            batch.add(
                header,
                EventRow {
                    file: &file,
                    offset: span.start,
                    end_offset: span.end,
                    kind: kind.name(),
                    gtid: &gtid,
                    database,
                    table,
                    rows,
                    text,
                },
            );
            self.buffered_rows += 1;
        }
    }
}
