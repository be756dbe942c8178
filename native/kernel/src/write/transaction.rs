//! Writes a transaction: its GTID event, table maps, rows and commit, or a statement.

use super::events::EventWriter;
use super::file::SERVER_VERSION_NUMBER;
use super::table::WrittenTable;
use crate::checksum::crc32;
use crate::error::{Error, ErrorKind, Result};
use crate::event::tidb_commit::TidbCommit;
use crate::event::{Change, EventKind, FLAG_IGNORABLE};
use crate::limits::{CHECKSUM_BYTES, EVENT_HEADER_BYTES};

/// A rows event is closed once it has this many bytes, which limits the memory that readers need.
pub const ROWS_BYTES: usize = 1 << 20;

/// Flag of the last rows event of a statement.
const STATEMENT_ENDS: u16 = 1;

/// The offset of the transaction's length in its GTID event. It follows the flags, UUID, number, clock and commit time,
/// and the byte which says that the length has eight bytes.
const LENGTH_START: usize = EVENT_HEADER_BYTES + 1 + 16 + 8 + 17 + 7 + 1;

/// The properties of a transaction that its GTID event contains.
#[derive(Debug, Clone, Copy)]
pub struct Opening {
    /// Where the transaction starts in its file.
    pub offset: u64,
    /// The server id of every event.
    pub server_id: u32,
    /// Commit time, in microseconds since 1970.
    pub commit_us: u64,
    /// Whether rows follow, instead of a statement.
    pub rows: bool,
    /// Size in bytes of the whole transaction; 0 if `TransactionWriter::set_length` sets it.
    pub length: u64,
}

/// The rows event that is being written.
#[derive(Debug, Clone, Copy)]
struct OpenRows {
    start: usize,
    change: Change,
}

/// Writes a transaction after the last event of a file.
#[derive(Debug, Clone)]
pub struct TransactionWriter {
    events: EventWriter,
    rows: Option<OpenRows>,
}

impl TransactionWriter {
    /// Opens a transaction with an anonymous GTID event.
    pub fn open(opening: &Opening) -> Result<TransactionWriter> {
        let time_s = u32::try_from(opening.commit_us / 1_000_000).unwrap_or(u32::MAX);
        let mut events = EventWriter::new(opening.offset, opening.server_id, time_s);
        events.event(EventKind::AnonymousGtid, 0, |out| {
            out.push(u8::from(!opening.rows));
            // Write no UUID, no number, and a logical clock without an order, so that transactions are applied one
            // after another.
            out.extend_from_slice(&[0; 24]);
            out.push(2);
            out.extend_from_slice(&[0; 16]);
            out.extend_from_slice(opening.commit_us.to_le_bytes().get(..7).unwrap_or_default());
            out.push(254);
            out.extend_from_slice(&opening.length.to_le_bytes());
            out.extend_from_slice(&SERVER_VERSION_NUMBER.to_le_bytes());
        })?;
        Ok(TransactionWriter { events, rows: None })
    }

    /// Appends the event with the timestamps of the TiDB transaction that this transaction represents.
    pub fn tidb_commit(&mut self, commit: &TidbCommit) -> Result<()> {
        self.events.event(EventKind::TidbCommit, FLAG_IGNORABLE, |out| commit.write(out))
    }

    /// Appends a statement, or BEGIN before rows. Raises `LimitExceeded` for a name of over 255 bytes.
    pub fn statement(&mut self, database: &str, text: &str, session: &WrittenSession<'_>) -> Result<()> {
        let database_bytes = short(database)?;
        let variables = session.variables()?;
        self.events.event(EventKind::Query, 0, |out| {
            // Write no connection and no run time.
            out.extend_from_slice(&[0; 8]);
            out.push(database_bytes);
            out.extend_from_slice(&0u16.to_le_bytes());
            out.extend_from_slice(&(variables.len() as u16).to_le_bytes());
            out.extend_from_slice(&variables);
            out.extend_from_slice(database.as_bytes());
            out.push(0);
            out.extend_from_slice(text.as_bytes());
        })
    }

    /// Appends the table map of the rows that follow.
    pub fn table(&mut self, table: &WrittenTable) -> Result<()> {
        let start = self.events.open();
        table.write(self.events.body())?;
        self.events.close(start, EventKind::TableMap, 0)
    }

    /// Appends a change of the table, whose images `write` appends.
    #[inline]
    pub fn row(
        &mut self,
        table: &WrittenTable,
        change: Change,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        match self.rows {
            Some(open) if open.change == change && self.events.body().len() - open.start < ROWS_BYTES => {}
            _ => {
                self.close_rows(0)?;
                self.open_rows(table, change);
            }
        }
        write(self.events.body())
    }

    /// Ends the statement that changed the table. The next rows get their own table map.
    pub fn end_table(&mut self) -> Result<()> {
        self.close_rows(STATEMENT_ENDS)
    }

    /// Appends the commit.
    pub fn commit(&mut self, xid: u64) -> Result<()> {
        self.events.event(EventKind::Xid, 0, |out| out.extend_from_slice(&xid.to_le_bytes()))
    }

    /// Size in bytes of the complete events.
    pub fn complete_bytes(&mut self) -> usize {
        self.rows.map_or_else(|| self.events.body().len(), |open| open.start)
    }

    /// Removes and returns all complete events.
    pub fn take(&mut self) -> Vec<u8> {
        let count = self.complete_bytes();
        if let Some(open) = &mut self.rows {
            open.start = 0;
        }
        self.events.take(count)
    }

    /// Sets the length in the GTID event of a transaction whose bytes are all available.
    pub fn set_length(&mut self) {
        let bytes = self.events.body();
        let length = bytes.len() as u64;
        let end = LENGTH_START + 8 + 4;
        if let Some(field) = bytes.get_mut(LENGTH_START..LENGTH_START + 8) {
            field.copy_from_slice(&length.to_le_bytes());
        }
        let checksum = crc32(bytes.get(..end).unwrap_or_default());
        if let Some(field) = bytes.get_mut(end..end + CHECKSUM_BYTES) {
            field.copy_from_slice(&checksum.to_le_bytes());
        }
    }

    fn open_rows(&mut self, table: &WrittenTable, change: Change) {
        let start = self.events.open();
        let out = self.events.body();
        out.extend_from_slice(table.id.to_le_bytes().get(..6).unwrap_or_default());
        // Write the flags, which `close_rows` replaces, and the length of an empty extra header.
        out.extend_from_slice(&[0, 0, 2, 0]);
        let width = table.columns.len();
        super::events::length_encoded(width as u64, out);
        let images = if change == Change::Update { 2 } else { 1 };
        out.extend(std::iter::repeat_n(0xff, width.div_ceil(8) * images));
        self.rows = Some(OpenRows { start, change });
    }

    fn close_rows(&mut self, flags: u16) -> Result<()> {
        let Some(OpenRows { start, change }) = self.rows.take() else { return Ok(()) };
        let flags_start = start + EVENT_HEADER_BYTES + 6;
        if let Some(field) = self.events.body().get_mut(flags_start..flags_start + 2) {
            field.copy_from_slice(&flags.to_le_bytes());
        }
        let kind = match change {
            Change::Insert => EventKind::WriteRows,
            Change::Update => EventKind::UpdateRows,
            Change::Delete => EventKind::DeleteRows,
        };
        self.events.close(start, kind, 0)
    }
}

/// The session of a statement, as far as it affects the statement's meaning.
#[derive(Debug, Clone, Copy, Default)]
pub struct WrittenSession<'a> {
    /// The SQL mode, in MySQL's bits.
    pub sql_mode: u64,
    /// The time zone as MySQL names it; empty if the statement does not depend on it.
    pub time_zone: &'a str,
}

impl WrittenSession<'_> {
    /// Returns the status variables of a QUERY event: no options, the SQL mode, catalog `std`, utf8mb4 for the text, and
    /// the time zone.
    fn variables(&self) -> Result<Vec<u8>> {
        let mut variables = vec![0, 0, 0, 0, 0, 1];
        variables.extend_from_slice(&self.sql_mode.to_le_bytes());
        variables.extend_from_slice(&[6, 3, b's', b't', b'd', 4, 45, 0, 46, 0, 46, 0]);
        if !self.time_zone.is_empty() {
            variables.extend_from_slice(&[5, short(self.time_zone)?]);
            variables.extend_from_slice(self.time_zone.as_bytes());
        }
        Ok(variables)
    }
}

/// Returns the length of a name, which must fit into one byte.
fn short(name: &str) -> Result<u8> {
    u8::try_from(name.len())
        .map_err(|_| Error::new(ErrorKind::LimitExceeded, format!("`{name}` has {} bytes, of at most 255", name.len())))
}

/// Appends an image: a bitmap of the nulls, then the values. `value` appends the value of a column and returns whether
/// it is null.
#[inline]
pub fn image(
    width: usize,
    out: &mut Vec<u8>,
    mut value: impl FnMut(usize, &mut Vec<u8>) -> Result<bool>,
) -> Result<()> {
    let start = out.len();
    out.extend(std::iter::repeat_n(0, width.div_ceil(8)));
    for index in 0..width {
        if value(index, out)? {
            if let Some(byte) = out.get_mut(start + index / 8) {
                *byte |= 1 << (index % 8);
            }
        }
    }
    Ok(())
}
