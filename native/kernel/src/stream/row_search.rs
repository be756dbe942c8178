//! Locates the transactions that may change a given row, without decoding values.
//!
//! Every event is verified. Rows events of the table are searched for the bytes of the key. Every event that the bytes
//! cannot rule out is a candidate: statements, XA transactions, keys of other types, and everything after an event that
//! cannot be read. For an event that is too long to be buffered, only the table is checked. The decoder then reads the
//! candidates, and reports their errors.

use std::sync::Arc;

use memchr::memmem::Finder;

use super::key_bytes::key_bytes;
use super::payload_events::visit_payload;
use super::proof::source_columns;
use crate::column::DeclaredColumn;
use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::format_description::Format;
use crate::event::query::{Query, Verb};
use crate::event::table_map::{table_id, table_names, TableMap};
use crate::event::{EventKind, Header, FLAG_IGNORABLE};
use crate::frame::events::{checked_body, declared_size, event_size, span_at};
use crate::limits::{EVENT_HEADER_BYTES, MAGIC_BYTES, SEARCHED_EVENT_BYTES_MAX};

/// For an event that is too long to buffer, only this many bytes are read: the header and the table id.
const EVENT_START_BYTES: usize = EVENT_HEADER_BYTES + 6;

/// Above this number of ids, the ids of the table are dropped. The server announces the table again before its next
/// rows.
const TABLE_IDS_MAX: usize = 64;

/// A row: its table, and the text of each value of its key.
#[derive(Debug, Clone, Default)]
pub struct SearchedRow {
    /// The database.
    pub database: String,
    /// The table.
    pub table: String,
    /// The columns of the values; empty for the primary key.
    pub columns: Vec<String>,
    /// The values; empty if every change of the table is a candidate.
    pub values: Vec<String>,
    /// The columns of the table and the names of its key columns, for a log that does not name columns.
    pub declared: Option<(Vec<DeclaredColumn>, Vec<String>)>,
}

/// The bytes to search for in the images of a table; None if every change is a candidate.
type Needles = Option<Vec<Finder<'static>>>;

/// A search through a range of a log that starts at a transaction boundary, as the module's description explains.
pub struct RowSearch {
    row: SearchedRow,
    format: Format,
    /// Candidates with no more than this many bytes between them are joined.
    gap_bytes: u64,
    offset: u64,
    partial_event: Vec<u8>,
    /// How many bytes of an event that is too long are still to be skipped.
    left_bytes: usize,
    transaction_start: u64,
    /// The start of the ignorable events that directly precede the current offset. These events describe the next
    /// transaction.
    ignorable_start: Option<u64>,
    is_candidate: bool,
    candidates: Vec<(u64, u64)>,
    /// The ids of the table, each with the bytes to search for.
    tables: Vec<(u64, Arc<Needles>)>,
    last_map: Option<(Box<[u8]>, Arc<Needles>)>,
    needs_definition: bool,
    is_redefined: bool,
    is_unreadable: bool,
}

impl RowSearch {
    /// Starts at an offset of a file, between transactions. `head` is the file's magic and format description.
    pub fn new(row: SearchedRow, head: &[u8], offset: u64, gap_bytes: u64) -> Result<RowSearch> {
        let event = head.get(MAGIC_BYTES + EVENT_HEADER_BYTES..).unwrap_or_default();
        let format = Format::read(event)?;
        Ok(RowSearch {
            row,
            // Without GTID events, only the statements show where transactions begin.
            is_unreadable: !format.gtid_events,
            format,
            gap_bytes,
            offset,
            partial_event: Vec::new(),
            left_bytes: 0,
            transaction_start: offset,
            ignorable_start: None,
            is_candidate: false,
            candidates: Vec::new(),
            tables: Vec::new(),
            last_map: None,
            needs_definition: false,
            is_redefined: false,
        })
    }

    /// Processes the next bytes, which may be split anywhere.
    pub fn feed(&mut self, bytes: &[u8]) {
        if !self.is_unreadable && self.feed_events(bytes).is_err() {
            self.is_unreadable = true;
        }
    }

    /// Returns the candidates at the end of the range, as ascending pairs of start and end.
    pub fn finish(&mut self) -> Vec<(u64, u64)> {
        let is_incomplete = self.is_unreadable || !self.partial_event.is_empty() || self.left_bytes > 0;
        self.is_candidate |= is_incomplete;
        self.end_transaction(if is_incomplete { u64::MAX } else { self.offset });
        std::mem::take(&mut self.candidates)
    }

    /// Whether changes of the table are candidates only because the log does not name the columns.
    pub fn needs_definition(&self) -> bool {
        self.needs_definition
    }

    fn feed_events(&mut self, mut bytes: &[u8]) -> Result<()> {
        bytes = self.pass_over(bytes);
        while !self.partial_event.is_empty() {
            let size = declared_size(&self.partial_event)?;
            let wanted = match size {
                Some(size) if size > SEARCHED_EVENT_BYTES_MAX => EVENT_START_BYTES,
                size => size.unwrap_or(EVENT_HEADER_BYTES),
            };
            let missing = wanted.saturating_sub(self.partial_event.len());
            let Some((more, rest)) = bytes.split_at_checked(missing) else {
                self.partial_event.extend_from_slice(bytes);
                return Ok(());
            };
            self.partial_event.extend_from_slice(more);
            bytes = rest;
            if let Some(size) = size.filter(|size| *size > SEARCHED_EVENT_BYTES_MAX) {
                let start = std::mem::take(&mut self.partial_event);
                self.process_start(&start, size)?;
                bytes = self.pass_over(bytes);
            } else if event_size(&self.partial_event)?.is_some() {
                let event = std::mem::take(&mut self.partial_event);
                self.process(&event)?;
            }
        }
        while let Some(size) = event_size(bytes)? {
            let (event, rest) = bytes.split_at_checked(size).unwrap_or((bytes, &[]));
            self.process(event)?;
            bytes = rest;
        }
        match declared_size(bytes)? {
            Some(size) if size > SEARCHED_EVENT_BYTES_MAX && bytes.len() >= EVENT_START_BYTES => {
                self.process_start(bytes, size)
            }
            _ => {
                self.partial_event.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Skips the rest of an event that is too long.
    fn pass_over<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (passed, rest) = bytes.split_at(self.left_bytes.min(bytes.len()));
        self.left_bytes -= passed.len();
        rest
    }

    /// Processes the start of an event that is too long to be buffered, and records how much of it is left.
    fn process_start(&mut self, start: &[u8], size: usize) -> Result<()> {
        let header = Header::read(&mut Cursor::new(start))?;
        self.offset = span_at(self.offset, &header, false)?.end;
        self.left_bytes = size - start.len();
        self.ignorable_start = None;
        let is_rows = header.kind().is_some_and(|kind| kind.change().is_some());
        if !is_rows {
            self.note_statement();
            return Ok(());
        }
        let body = start.get(EVENT_HEADER_BYTES..).unwrap_or_default();
        let id = table_id(body, self.format.table_id_bytes_rows)?;
        self.is_candidate |= self.tables.iter().any(|(table, _)| *table == id);
        Ok(())
    }

    fn process(&mut self, event: &[u8]) -> Result<()> {
        let header = Header::read(&mut Cursor::new(event))?;
        let kind = header.kind();
        let body = checked_body(Some(&self.format), false, true, kind, event)?;
        let span = span_at(self.offset, &header, false)?;
        self.offset = span.end;
        let Some(kind) = kind else {
            self.is_candidate |= header.flags & FLAG_IGNORABLE == 0;
            return Ok(());
        };
        if kind == EventKind::Ignorable {
            self.ignorable_start.get_or_insert(span.start);
            return Ok(());
        }
        let ignorable_start = self.ignorable_start.take();
        match kind {
            _ if kind.is_gtid() => self.end_transaction(ignorable_start.unwrap_or(span.start)),
            EventKind::TransactionPayload => {
                let is_read = visit_payload(body, |header, body| match header.kind() {
                    Some(kind) => self.dispatch(kind, body),
                    None => Err(malformed("an unknown event")),
                });
                self.is_candidate |= is_read.is_err();
            }
            kind => self.dispatch(kind, body)?,
        }
        Ok(())
    }

    /// Processes an event of a transaction, or of its payload.
    fn dispatch(&mut self, kind: EventKind, body: &[u8]) -> Result<()> {
        use EventKind::*;
        match kind {
            _ if kind.change().is_some() => self.search_rows(kind, body)?,
            TableMap => self.announce(body)?,
            Query => self.process_query(body)?,
            Xid | RowsQuery | AnnotateRows | IntVar | Rand | UserVar | TidbPayload | TidbCommit => {}
            Rotate | Stop | PreviousGtids | MariadbGtidList | BinlogCheckpoint => {}
            TransactionContext | ViewChange | Heartbeat | HeartbeatV2 => {}
            // The remaining types include MariaDB's QueryCompressed, whose text is not read.
            _ => self.note_statement(),
        }
        Ok(())
    }

    fn end_transaction(&mut self, end: u64) {
        if std::mem::take(&mut self.is_candidate) {
            match self.candidates.last_mut() {
                Some((_, last)) if self.transaction_start <= last.saturating_add(self.gap_bytes) => *last = end,
                _ => self.candidates.push((self.transaction_start, end)),
            }
        }
        self.transaction_start = end;
    }

    /// Only statements that begin or end transactions are known to change no rows and no table definitions.
    fn process_query(&mut self, body: &[u8]) -> Result<()> {
        let query = Query::read(body)?;
        match query.verb(query.text) {
            Verb::Begin if query.text == b"BEGIN" => {}
            Verb::Commit | Verb::Rollback | Verb::RollbackTo | Verb::Savepoint | Verb::Marker => {}
            _ => self.note_statement(),
        }
        Ok(())
    }

    /// Records an event that may change any row and any table definition.
    fn note_statement(&mut self) {
        self.is_candidate = true;
        self.is_redefined = true;
        self.last_map = None;
    }

    fn announce(&mut self, body: &[u8]) -> Result<()> {
        let id_bytes = self.format.table_id_bytes_table_map;
        let id = table_id(body, id_bytes)?;
        let (database, table) = table_names(body, id_bytes)?;
        if (database, table) != (self.row.database.as_bytes(), self.row.table.as_bytes()) {
            self.tables.retain(|(table, _)| *table != id);
            return Ok(());
        }
        if self.tables.len() >= TABLE_IDS_MAX {
            self.tables.clear();
        }
        let needles = match &self.last_map {
            Some((map, needles)) if **map == *body => needles.clone(),
            _ => {
                let needles = Arc::new(self.needles_of(&TableMap::read(body, &self.format)?));
                self.last_map = Some((body.into(), needles.clone()));
                needles
            }
        };
        match self.tables.iter_mut().find(|(table, _)| *table == id) {
            Some((_, known)) => *known = needles,
            None => self.tables.push((id, needles)),
        }
        Ok(())
    }

    fn needles_of(&mut self, map: &TableMap) -> Needles {
        if self.row.values.is_empty() {
            return None;
        }
        let (declared, primary_key) = if map.is_complete() {
            (None, map.primary_key.iter().map(|name| name.to_string()).collect())
        } else {
            self.needs_definition |= self.row.declared.is_none();
            // After a statement, the table definition may have changed.
            let (columns, primary_key) = self.row.declared.as_ref().filter(|_| !self.is_redefined)?;
            (Some(columns.as_slice()), primary_key.clone())
        };
        let sources = source_columns(map, declared, self.format.mariadb).ok()?;
        let key = if self.row.columns.is_empty() { &primary_key } else { &self.row.columns };
        if key.len() != self.row.values.len() {
            return None;
        }
        let mut needles = Vec::new();
        for (name, text) in key.iter().zip(&self.row.values) {
            let column = sources.iter().find(|column| *column.name == **name)?;
            // If a text is not a value of the column, do not search for it. The reader then reports the error.
            if let Some(bytes) = key_bytes(&column.kind, text, self.format.mariadb).ok()? {
                needles.push(Finder::new(&bytes).into_owned());
            }
        }
        Some(needles)
    }

    fn search_rows(&mut self, kind: EventKind, body: &[u8]) -> Result<()> {
        if self.is_candidate || self.tables.is_empty() {
            return Ok(());
        }
        let id = table_id(body, self.format.table_id_bytes_rows)?;
        if let Some((_, needles)) = self.tables.iter().find(|(table, _)| *table == id) {
            let has_all = |needles: &Vec<Finder<'_>>| needles.iter().all(|needle| needle.find(body).is_some());
            self.is_candidate = kind.has_compressed_rows() || needles.as_ref().as_ref().is_none_or(has_all);
        }
        Ok(())
    }
}
