//! Updates transactions, tables and blocks for each event.

use super::cutter::{BlockCutter, Statement};
use super::open::Open;
use super::record::{Run, FLAG_STATEMENT, FLAG_UNCOUNTED};
use super::tables::ALL_TABLES;
use crate::emit::dialect::ddl::outcome_of_failed;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::compressed::decompress;
use crate::event::gtid::{self, TransactionHead};
use crate::event::query::{Query, Verb};
use crate::event::session::Session;
use crate::event::{mariadb_gtid, previous_gtids, tagged_gtid, EventKind, Header, FLAG_IGNORABLE};
use crate::frame::events::{unknown, Span};

impl BlockCutter {
    /// Processes an event of the log or of a payload.
    #[inline]
    pub(super) fn dispatch(&mut self, header: &Header, kind: Option<EventKind>, body: &[u8], span: Span) -> Result<()> {
        use EventKind::*;
        let Some(kind) = kind else {
            return if header.flags & FLAG_IGNORABLE != 0 { Ok(()) } else { Err(unknown(header.code)) };
        };
        if kind.change().is_some() {
            return self.count_rows(kind, body);
        }
        match kind {
            TableMap => {
                let Some(format) = &self.format else { return Ok(()) };
                let bit = self.tables.announce(body, format, &self.counts)?;
                if let Some(block) = &mut self.block {
                    block.tables |= bit;
                }
                Ok(())
            }
            Xid | XaPrepare => {
                self.end(span);
                Ok(())
            }
            Gtid | AnonymousGtid => self.begin(header, gtid::read(body, kind == AnonymousGtid)?, span),
            TaggedGtid => self.begin(header, tagged_gtid::read(body)?, span),
            MariadbGtid => {
                let head = mariadb_gtid::read(body, header.server_id)?;
                let begun = !head.standalone;
                self.begin(header, head, span)?;
                if let Some(open) = &mut self.open {
                    open.begun = begun;
                }
                Ok(())
            }
            Query => self.process_query(header, body, false, span),
            QueryCompressed => self.process_query(header, body, true, span),
            TransactionPayload => self.process_payload(body, span),
            PreviousGtids => {
                self.seen.union(&previous_gtids::read(body)?);
                Ok(())
            }
            MariadbGtidList => {
                self.seen.union(&mariadb_gtid::read_list(body)?);
                Ok(())
            }
            ExecuteLoadQuery => {
                self.note_statement();
                Ok(())
            }
            // A server that decrypts the events it sends marks START_ENCRYPTION as ignorable, and a copied log keeps
            // the mark.
            StartEncryption if !self.settings.live && header.flags & FLAG_IGNORABLE == 0 => {
                Err(Error::new(ErrorKind::LogEncrypted, "the rest of the file is encrypted")
                    .hint("read it from the server (mysql://...), which decrypts it"))
            }
            _ => Ok(()),
        }
    }

    fn count_rows(&mut self, kind: EventKind, body: &[u8]) -> Result<()> {
        if self.open.is_none() {
            return Err(malformed("row images outside a transaction"));
        }
        let Some(format) = &self.format else { return Ok(()) };
        match self.tables.count(kind, body, format)? {
            Some(changes) => {
                self.counters.changes += u64::from(changes);
                if let Some(block) = &mut self.block {
                    block.changes = block.changes.saturating_add(changes);
                }
            }
            None => self.note_uncounted(),
        }
        Ok(())
    }

    /// Opens a transaction at its GTID event, or at its first statement in a log without GTID events.
    fn begin(&mut self, header: &Header, head: TransactionHead, span: Span) -> Result<()> {
        if let Some(open) = &self.open {
            return Err(malformed(format!("a transaction begins inside the one of {}", open.start)));
        }
        let time_us = match head.commit_us.and_then(|us| i64::try_from(us).ok()) {
            Some(us) => us,
            None => i64::from(header.timestamp) * 1_000_000,
        };
        self.time_max_us = self.time_max_us.max(time_us);
        if let Some(block) = &mut self.block {
            block.note_transaction(&head.gtid, header.server_id, time_us);
        }
        if !self.run.as_mut().is_some_and(|run| run.extend(&head.gtid)) {
            self.run = Run::new(&head.gtid, self.last_end);
        }
        self.open = Some(Open {
            start: span.start,
            gtid: head.gtid,
            server_id: header.server_id,
            time_us,
            events: 0,
            begun: false,
        });
        Ok(())
    }

    /// Closes the transaction. Its GTID counts as executed from here on, because the transaction is complete.
    pub(super) fn end(&mut self, span: Span) {
        let Some(open) = self.open.take() else { return };
        self.seen.add(&open.gtid);
        self.last_gtid = open.gtid;
        self.last_time_us = open.time_us;
        self.counters.transactions += 1;
        self.counts.add_transaction(span.end - open.start);
        if let Some(block) = &mut self.block {
            block.transactions = block.transactions.saturating_add(1);
            block.last_boundary = span.end;
        }
        self.last_end = span.end;
        self.tables.trim();
    }

    fn process_query(&mut self, header: &Header, body: &[u8], compressed: bool, span: Span) -> Result<()> {
        let query = Query::read(body)?;
        let plain = if compressed { Some(decompress(query.text)?) } else { None };
        let text = plain.as_deref().unwrap_or(query.text);
        if self.open.is_none() {
            // In a log without GTID events, the statement opens the transaction.
            self.begin(header, TransactionHead::default(), span)?;
        }
        match query.verb(text) {
            Verb::Begin => {
                if let Some(open) = &mut self.open {
                    open.begun = true;
                }
                if text != b"BEGIN" && !text.starts_with(b"XA") {
                    self.push_statement(&query, text, span);
                }
            }
            Verb::XaCommit => {
                if let Some(block) = &mut self.block {
                    block.tables = ALL_TABLES;
                }
                self.end(span);
            }
            Verb::Commit | Verb::Rollback | Verb::XaRollback => self.end(span),
            Verb::RollbackTo | Verb::Savepoint | Verb::Marker => {}
            verb @ (Verb::Change | Verb::Unknown | Verb::Definition) => {
                if verb == Verb::Change {
                    self.note_statement();
                } else {
                    self.push_statement(&query, text, span);
                }
                if self.open.as_ref().is_some_and(|open| !open.begun) {
                    self.end(span);
                }
            }
        }
        Ok(())
    }

    /// Returns a DDL statement to the caller for the schema history.
    fn push_statement(&mut self, query: &Query<'_>, text: &[u8], span: Span) {
        self.note_statement();
        if !self.settings.statements {
            return;
        }
        let database = String::from_utf8_lossy(query.database).into_owned();
        let mut text = query.text_utf8(text);
        let session = Session::read(query.variables);
        if query.error_code != 0 {
            let Some(outcome) = outcome_of_failed(&text, &database, session.backslash()) else { return };
            text = outcome.into_owned();
        }
        self.statements.push(Statement { text, database, session, start: span.start, end: span.end });
    }

    fn note_statement(&mut self) {
        if let Some(block) = &mut self.block {
            block.flags |= FLAG_STATEMENT;
            block.tables = ALL_TABLES;
        }
    }

    pub(super) fn note_uncounted(&mut self) {
        if let Some(block) = &mut self.block {
            block.flags |= FLAG_UNCOUNTED;
            block.tables = ALL_TABLES;
        }
    }
}
