//! The tables that the log has announced, and the questions about them.

use std::collections::HashMap;
use std::sync::Arc;

use crate::column::{DeclaredColumn, Kind};
use crate::emit::envelope::EnvelopeTable;
use crate::emit::messages_batch::MessageTable;
use crate::event::table_map::TableMap;
use crate::limits::TABLES_OPEN_MAX;

/// Table ids are dropped at this count; the server announces a table again before its next rows.
const TABLES_KEPT_MAX: usize = 4096;
const _: () = assert!(TABLES_KEPT_MAX < TABLES_OPEN_MAX);

/// So many table ids are compared one by one before they are searched.
const TABLES_RECENT_MAX: usize = 8;

/// A table that was not seen before: how is it to be read?
#[derive(Debug, Clone)]
pub struct TableRequest {
    /// The database.
    pub database: Arc<str>,
    /// The table.
    pub table: Arc<str>,
    /// How many columns its rows have.
    pub column_count: usize,
    /// The columns, where the log alone tells all of them.
    pub columns: Option<Vec<DeclaredColumn>>,
    /// Names of the primary key's columns, where the log tells.
    pub primary_key: Vec<Arc<str>>,
    /// Where the table map stands.
    pub file: Arc<str>,
    /// The offset of the table map.
    pub offset: u64,
    /// The table map, by which `prove` judges definitions.
    pub(super) map: Arc<TableMap>,
    /// Whether the log is MariaDB's.
    pub(super) mariadb: bool,
}

/// How a table is to be read.
#[derive(Debug, Clone)]
pub enum Answer {
    /// Its rows are not wanted.
    Skip,
    /// Its rows are wanted.
    Read {
        /// Its columns; None takes them from the log.
        columns: Option<Vec<DeclaredColumn>>,
        /// The log names the columns, and `columns` only tells the types that lie in plainer ones (MariaDB's UUID,
        /// INET4, INET6 and VECTOR), where it has a column of that name.
        from_log: bool,
        /// Grows with every change of its definition.
        schema_version: i32,
        /// Columns to decode, system columns among them; None means all.
        wanted: Option<Vec<String>>,
        /// The columns of the batch, where they are fixed beforehand.
        declared: Option<Vec<DeclaredColumn>>,
        /// Names of the primary key's columns where the log does not tell them; for messages.
        primary_key: Vec<String>,
        /// Names of the columns by which rows are put into shards; None means the primary key. For messages.
        shard_columns: Option<Vec<String>>,
    },
}

pub(super) enum Usage {
    Skip,
    /// Rows are counted, not decoded.
    Walk,
    Typed(usize),
    Envelope(EnvelopeTable),
    Messages(Box<MessageTable>),
}

pub(super) struct OpenTable {
    pub(super) body: Box<[u8]>,
    pub(super) database: Arc<str>,
    pub(super) table: Arc<str>,
    /// How the rows of a table that is not read are passed over, where the log alone tells.
    pub(super) kinds: Option<Vec<Kind>>,
    pub(super) usage: Usage,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) open: HashMap<u64, Arc<OpenTable>>,
    /// The tables announced last, among which the next nearly always is.
    pub(super) recent: Vec<(u64, Arc<OpenTable>)>,
    /// Where in `recent` the table announced last stands.
    pub(super) last: usize,
    pub(super) known: HashMap<Box<[u8]>, Arc<OpenTable>>,
    pub request: Option<TableRequest>,
    pub answer: Option<Answer>,
}

impl Tables {
    pub fn clear(&mut self) {
        self.open.clear();
        self.recent.clear();
        self.known.clear();
        self.request = None;
        self.answer = None;
    }

    /// The table that rows events call by this number.
    #[inline]
    pub fn get(&self, id: u64) -> Option<&Arc<OpenTable>> {
        match self.recent.get(self.last) {
            Some((last, table)) if *last == id => Some(table),
            _ => match self.recent.iter().find(|(held, _)| *held == id) {
                Some((_, table)) => Some(table),
                None => self.open.get(&id),
            },
        }
    }

    /// Notes that the table was announced just now.
    #[inline]
    pub fn announce(&mut self, id: u64) {
        match self.recent.iter().position(|(held, _)| *held == id) {
            Some(at) => self.last = at,
            None => {
                if let Some(table) = self.open.get(&id).cloned() {
                    self.remember(id, table);
                }
            }
        }
    }

    /// Puts a table among the recent, in place of one of them where there are many.
    fn remember(&mut self, id: u64, table: Arc<OpenTable>) {
        let next = if self.recent.len() < TABLES_RECENT_MAX { self.recent.len() } else { self.last + 1 };
        self.last = next % TABLES_RECENT_MAX;
        match self.recent.get_mut(self.last) {
            Some(place) => *place = (id, table),
            None => self.recent.push((id, table)),
        }
    }

    pub fn insert(&mut self, id: u64, table: Arc<OpenTable>) {
        self.recent.retain(|(held, _)| *held != id);
        self.remember(id, table.clone());
        self.open.insert(id, table);
    }

    /// Bounds the memory of long streams on servers that open tables again and again.
    pub fn trim(&mut self) {
        if self.open.len() > TABLES_KEPT_MAX {
            self.open.clear();
            self.recent.clear();
        }
        if self.known.len() > TABLES_KEPT_MAX {
            self.known.clear();
        }
    }
}
