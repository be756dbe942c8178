//! Tables as blocks need them: which bit is theirs, and how many changes their rows events hold.

use std::collections::HashMap;
use std::sync::Arc;

use crate::checksum::crc32;
use crate::column::Kind;
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::compressed::decompress;
use crate::event::format_description::Format;
use crate::event::rows::{count_changes, RowsHead, TABLE_ID_NONE};
use crate::event::table_map::{table_id, TableMap};
use crate::event::EventKind;

/// Between transactions tables are forgotten from this many bytes on; the server announces them again before their
/// next rows.
const TABLES_KEPT_BYTES_MAX: usize = 16 << 20;

/// One transaction may announce so many bytes of tables.
const TABLES_OPEN_BYTES_MAX: usize = 256 << 20;

/// Every bit: a statement may concern any table.
pub(super) const ALL_TABLES: u64 = u64::MAX;

struct Table {
    body: Box<[u8]>,
    bit: u64,
    /// How its rows are passed over; None where the log does not tell.
    kinds: Option<Vec<Kind>>,
}

/// The tables that the log has announced.
#[derive(Default)]
pub(super) struct Tables {
    open: HashMap<u64, Arc<Table>>,
    /// The one announced last, which is nearly always the one whose rows come next.
    last: Option<(u64, Arc<Table>)>,
    bytes: usize,
}

impl Tables {
    /// Takes in a table map and returns its table's bit.
    #[inline]
    pub fn announce(&mut self, body: &[u8], format: &Format) -> Result<u64> {
        let id = table_id(body, format.table_id_bytes_table_map)?;
        if let Some((last, table)) = &self.last {
            if *last == id && *table.body == *body {
                return Ok(table.bit);
            }
        }
        let table = match self.open.get(&id).filter(|table| *table.body == *body) {
            Some(table) => table.clone(),
            None => self.open_anew(id, body, format)?,
        };
        let bit = table.bit;
        self.last = Some((id, table));
        Ok(bit)
    }

    fn open_anew(&mut self, id: u64, body: &[u8], format: &Format) -> Result<Arc<Table>> {
        self.bytes += body.len();
        if self.bytes > TABLES_OPEN_BYTES_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "one transaction changes too many tables"));
        }
        let bit = 1 << (crc32(&qualified_name(body, format)?) & 63);
        // Bytes whose checksum holds are kept even where a table's columns are of a kind that is not known.
        let kinds = TableMap::read(body, format).and_then(|map| map.skip_kinds()).ok();
        let table = Arc::new(Table { body: body.into(), bit, kinds });
        if let Some(before) = self.open.insert(id, table.clone()) {
            self.bytes -= before.body.len();
        }
        Ok(table)
    }

    /// How many changes a rows event holds; None where that cannot be told.
    #[inline]
    pub fn count(&self, kind: EventKind, body: &[u8], format: &Format) -> Result<Option<u32>> {
        let head = RowsHead::read(body, kind, format.table_id_bytes_rows)?;
        let table = match &self.last {
            Some((last, table)) if *last == head.table_id => table,
            _ => match self.open.get(&head.table_id) {
                Some(table) => table,
                None if head.table_id == TABLE_ID_NONE && head.images.is_empty() => return Ok(Some(0)),
                None => return Err(not_announced(head.table_id)),
            },
        };
        let Some(kinds) = &table.kinds else { return Ok(None) };
        if kind.has_compressed_rows() {
            let counted = decompress(head.images).and_then(|images| count_changes(&head, &images, kinds, kind));
            return Ok(counted.ok());
        }
        Ok(count_changes(&head, head.images, kinds, kind).ok())
    }

    /// Bounds what is kept, where no transaction needs it.
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

/// `database.table`, as the table map spells them.
fn qualified_name(body: &[u8], format: &Format) -> Result<Vec<u8>> {
    let mut cursor = Cursor::new(body);
    cursor.skip(format.table_id_bytes_table_map + 2)?;
    let database = cursor.length_encoded_bytes()?;
    if cursor.u8()? != 0 {
        return Err(malformed("a table map's name does not end with a zero"));
    }
    Ok([database, b".", cursor.length_encoded_bytes()?].concat())
}
