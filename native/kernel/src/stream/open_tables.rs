//! The tables of all table maps processed so far, and the requests about these tables.

use std::collections::HashMap;
use std::sync::Arc;

use crate::column::DeclaredColumn;
use crate::emit::envelope::EnvelopeTable;
use crate::emit::messages_batch::MessageTable;
use crate::event::image_lengths::ImageLengths;
use crate::event::table_map::TableMap;
use crate::limits::TABLES_OPEN_MAX;

/// Above this number of table ids, all table ids are dropped. The server announces a table again before its next rows.
const TABLES_KEPT_MAX: usize = 4096;
const _: () = assert!(TABLES_KEPT_MAX < TABLES_OPEN_MAX);

/// Number of table ids that are compared one by one before a hash lookup.
const TABLES_RECENT_MAX: usize = 8;

/// A question to the caller: how to read a table that is new to the decoder.
#[derive(Debug, Clone)]
pub struct TableRequest {
    /// The database.
    pub database: Arc<str>,
    /// The table.
    pub table: Arc<str>,
    /// The number of columns in the table's rows.
    pub column_count: usize,
    /// The columns, if the log alone describes all of them.
    pub columns: Option<Vec<DeclaredColumn>>,
    /// Names of the primary key's columns, if they are logged.
    pub primary_key: Vec<Arc<str>>,
    /// The file of the table map.
    pub file: Arc<str>,
    /// The offset of the table map.
    pub offset: u64,
    /// The table map, against which `prove` checks definitions.
    pub(super) map: Arc<TableMap>,
    /// Whether the log is from MariaDB.
    pub(super) mariadb: bool,
}

/// How to read a table.
#[derive(Debug, Clone)]
pub enum Answer {
    /// Skip the table's rows.
    Skip,
    /// Decode the table's rows.
    Read {
        /// The columns; None takes them from the log.
        columns: Option<Vec<DeclaredColumn>>,
        /// Whether the column names come from the log. Then `columns` only supplies the types of columns with the same
        /// name that are logged as plain strings (MariaDB's UUID, INET4, INET6 and VECTOR).
        from_log: bool,
        /// A number that increases with every change of the definition.
        schema_version: i32,
        /// The columns to decode, including system columns; None means all.
        wanted: Option<Vec<String>>,
        /// The columns of the batch, if they are fixed in advance.
        declared: Option<Vec<DeclaredColumn>>,
        /// Names of the primary key's columns, for messages, if the log does not have them.
        primary_key: Vec<String>,
        /// Names of the columns that determine a row's shard, for messages; None means the primary key.
        shard_columns: Option<Vec<String>>,
        /// Whether only the rows that the caller's conditions allow are visible, in messages.
        judged: bool,
    },
}

pub(super) enum Usage {
    Skip,
    /// Count rows without decoding them.
    Walk,
    Typed(usize),
    Envelope(EnvelopeTable),
    Messages(Box<MessageTable>),
}

pub(super) struct OpenTable {
    pub(super) body: Box<[u8]>,
    pub(super) database: Arc<str>,
    pub(super) table: Arc<str>,
    /// How to skip the rows of a table that is not read, if the log has the metadata.
    pub(super) lengths: Option<ImageLengths>,
    pub(super) usage: Usage,
}

/// The tables of a decoder, as the module's description explains.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) open: HashMap<u64, Arc<OpenTable>>,
    /// The tables announced last. The next table is nearly always among them.
    pub(super) recent: Vec<(u64, Arc<OpenTable>)>,
    /// Index in `recent` of the table announced last.
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

    /// Returns the table with the id that rows events use.
    #[inline]
    pub fn get(&self, id: u64) -> Option<&Arc<OpenTable>> {
        match self.recent.get(self.last) {
            Some((last, table)) if *last == id => Some(table),
            _ => match self.recent.iter().find(|(recent_id, _)| *recent_id == id) {
                Some((_, table)) => Some(table),
                None => self.open.get(&id),
            },
        }
    }

    /// Records that the table was just announced.
    #[inline]
    pub fn announce(&mut self, id: u64) {
        match self.recent.iter().position(|(recent_id, _)| *recent_id == id) {
            Some(at) => self.last = at,
            None => {
                if let Some(table) = self.open.get(&id).cloned() {
                    self.remember(id, table);
                }
            }
        }
    }

    /// Adds a table to the recent tables, replacing one of them if there are too many.
    fn remember(&mut self, id: u64, table: Arc<OpenTable>) {
        let next = if self.recent.len() < TABLES_RECENT_MAX { self.recent.len() } else { self.last + 1 };
        self.last = next % TABLES_RECENT_MAX;
        match self.recent.get_mut(self.last) {
            Some(slot) => *slot = (id, table),
            None => self.recent.push((id, table)),
        }
    }

    pub fn insert(&mut self, id: u64, table: Arc<OpenTable>) {
        self.recent.retain(|(recent_id, _)| *recent_id != id);
        self.remember(id, table.clone());
        self.open.insert(id, table);
    }

    /// Limits memory in long streams, in which the server reopens tables many times.
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
