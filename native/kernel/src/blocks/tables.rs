//! Tracks the tables of a block: the bit of each table in the record, and the number of changes in its rows events.

use std::collections::HashMap;
use std::sync::Arc;

use super::counts::{Counts, RowCounts};
use crate::checksum::crc32;
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::compressed::decompress;
use crate::event::format_description::Format;
use crate::event::image_lengths::ImageLengths;
use crate::event::rows::{RowsHead, TABLE_ID_NONE};
use crate::event::table_map::{table_id, TableMap};
use crate::event::EventKind;

/// Between transactions, table maps that together exceed this size in bytes are dropped. The server repeats them before
/// the next rows.
const TABLES_KEPT_BYTES_MAX: usize = 16 << 20;

/// Maximum size in bytes of the table maps of a single transaction.
const TABLES_OPEN_BYTES_MAX: usize = 256 << 20;

/// Number of recent tables that are searched before the map of all tables.
const TABLES_RECENT_MAX: usize = 16;

/// All bits set, for a statement that may change any table.
pub(super) const ALL_TABLES: u64 = u64::MAX;

struct Table {
    body: Box<[u8]>,
    bit: u64,
    rows: Arc<RowCounts>,
    /// How to skip the table's rows; None if the log lacks the metadata.
    lengths: Option<ImageLengths>,
}

/// The tables of all table maps processed so far.
#[derive(Default)]
pub(super) struct Tables {
    open: HashMap<u64, Arc<Table>>,
    /// The tables announced last, all of which are also in `open`. The next table is nearly always among them.
    recent: Vec<(u64, Arc<Table>)>,
    /// Index in `recent` of the table announced last, which nearly always is the table of the next rows event.
    last: usize,
    bytes: usize,
}

impl Tables {
    /// Processes a table map and returns the bit of its table.
    #[inline]
    pub fn announce(&mut self, body: &[u8], format: &Format, counts: &Counts) -> Result<u64> {
        let id = table_id(body, format.table_id_bytes_table_map)?;
        let recent = self.recent.iter().position(|(recent_id, _)| *recent_id == id);
        if let Some((at, table)) = recent.and_then(|at| Some((at, &self.recent.get(at)?.1))) {
            if *table.body == *body {
                self.last = at;
                return Ok(table.bit);
            }
        }
        let table = match self.open.get(&id).filter(|table| *table.body == *body) {
            Some(table) => table.clone(),
            None => self.open_table(id, body, format, counts)?,
        };
        let bit = table.bit;
        self.remember(recent, id, table);
        Ok(bit)
    }

    /// Puts a table into its slot among the recent tables. If there are too many, it replaces another table.
    fn remember(&mut self, slot: Option<usize>, id: u64, table: Arc<Table>) {
        let next = || if self.recent.len() < TABLES_RECENT_MAX { self.recent.len() } else { self.last + 1 };
        self.last = slot.unwrap_or_else(next) % TABLES_RECENT_MAX;
        match self.recent.get_mut(self.last) {
            Some(slot) => *slot = (id, table),
            None => self.recent.push((id, table)),
        }
    }

    /// Returns the table of a rows event.
    #[inline]
    fn get(&self, id: u64) -> Option<&Arc<Table>> {
        match self.recent.get(self.last) {
            Some((last, table)) if *last == id => Some(table),
            _ => match self.recent.iter().find(|(recent_id, _)| *recent_id == id) {
                Some((_, table)) => Some(table),
                None => self.open.get(&id),
            },
        }
    }

    fn open_table(&mut self, id: u64, body: &[u8], format: &Format, counts: &Counts) -> Result<Arc<Table>> {
        self.bytes += body.len();
        if self.bytes > TABLES_OPEN_BYTES_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "one transaction changes too many tables"));
        }
        let name = qualified_name(body, format)?;
        let bit = 1 << (crc32(&name) & 63);
        // Events with a valid checksum are kept even if a column's type is unknown.
        let kinds = TableMap::read(body, format).and_then(|map| map.skip_kinds()).ok();
        let lengths = kinds.map(ImageLengths::new);
        let table = Arc::new(Table { body: body.into(), bit, rows: counts.rows_of(&name), lengths });
        if let Some(previous) = self.open.insert(id, table.clone()) {
            self.bytes -= previous.body.len();
        }
        Ok(table)
    }

    /// Counts the changes of a rows event, and adds them to the metrics; None if the rows cannot be read.
    #[inline]
    pub fn count(&self, kind: EventKind, body: &[u8], format: &Format) -> Result<Option<u32>> {
        let head = RowsHead::read(body, kind, format.table_id_bytes_rows)?;
        let table = match self.get(head.table_id) {
            Some(table) => table,
            None if head.table_id == TABLE_ID_NONE && head.images.is_empty() => return Ok(Some(0)),
            None => return Err(not_announced(head.table_id)),
        };
        let Some(lengths) = &table.lengths else { return Ok(None) };
        let counted = if kind.has_compressed_rows() {
            decompress(head.images).and_then(|images| lengths.count_changes(&head, &images, kind))
        } else {
            lengths.count_changes(&head, head.images, kind)
        };
        if let (Ok(rows), Some(change)) = (&counted, kind.change()) {
            table.rows.add(change, *rows);
        }
        Ok(counted.ok())
    }

    /// Limits memory between transactions.
    #[inline]
    pub fn trim(&mut self) {
        if self.bytes > TABLES_KEPT_BYTES_MAX {
            *self = Tables::default();
        }
    }
}

#[cold]
fn not_announced(id: u64) -> Error {
    Error::new(ErrorKind::TableMapMissing, format!("rows for table number {id}, which no table map announced"))
        .hint("events are missing before this one; read from the start of the transaction")
}

/// Returns `database.table` in the spelling of the table map.
fn qualified_name(body: &[u8], format: &Format) -> Result<Vec<u8>> {
    let mut cursor = Cursor::new(body);
    cursor.skip(format.table_id_bytes_table_map + 2)?;
    let database = cursor.length_encoded_bytes()?;
    if cursor.u8()? != 0 {
        return Err(malformed("a table map's name does not end with a zero"));
    }
    Ok([database, b".", cursor.length_encoded_bytes()?].concat())
}
