//! Decodes result sets of the text protocol into Arrow columns.
//!
//! ```text
//! ┌─────────────┬───────────────────┬─────┬──────┬──────┬─────┬─────┐
//! │ columns (n) │ n definitions     │ EOF │ row  │ row  │ ... │ EOF │   each a packet: length u24, seq u8, payload
//! └─────────────┴───────────────────┴─────┴──────┴──────┴─────┴─────┘
//! ```
//!
//! A row has a length-encoded text for each column, fb for NULL (protocol manual, "Text Resultset"). A payload of
//! 0xffffff bytes continues in the next packet. The caller declares the column types; they are not taken from the
//! definitions in the result. The declared types are the types of the table's columns. The binlog is decoded with the
//! same types, so a value is the same whether it is read from a result set or from the binlog.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{Field, Schema};

use crate::charset::Charset;
use crate::column::{ColumnBuilder, DeclaredColumn, Kind};
use crate::cursor::Cursor;
use crate::emit::system::{self, EventView, Images, SystemColumns, TableRef};
use crate::emit::{Batch, TransactionView};
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::Change;
use crate::frame::packet::{server_error, ServerError};
use crate::gtid::Gtid;
use crate::limits::EVENT_BYTES_MAX;

const HEADER_BYTES: usize = 4;
const PAYLOAD_BYTES_MAX: usize = 0xff_ffff;
const NULL: u8 = 0xfb;
const OK: u8 = 0x00;
const EOF: u8 = 0xfe;
const ERROR: u8 = 0xff;
/// An EOF packet is shorter than any row that starts with the same byte.
const EOF_BYTES_MAX: usize = 9;

/// The origin of a result set's rows, for their system columns.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The name of the captured cluster.
    pub instance: Arc<str>,
    /// The table that is read.
    pub table: TableRef,
    /// The log file at the time of the read.
    pub file: Arc<str>,
    /// The offset in the log file.
    pub offset: u64,
    /// The commit version, which orders the rows among changes of the log.
    pub commit_version: i64,
    /// Time of the read, in microseconds since 1970.
    pub timestamp_us: i64,
    /// The server's id.
    pub server_id: u32,
    /// Number of rows that earlier queries returned.
    pub row_first: u32,
}

/// Limits of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Maximum number of rows.
    pub rows: usize,
    /// Maximum size of the rows in bytes, as the server sent them.
    pub bytes: usize,
}

/// The part of the result set that is expected next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Count,
    Definitions(usize),
    DefinitionsEnd,
    Rows,
    Done,
}

struct Target {
    name: Arc<str>,
    kind: Kind,
    charset: Charset,
    builder: ColumnBuilder,
}

/// Decodes a single result set.
pub struct ResultSet {
    targets: Vec<Target>,
    /// The indexes of the columns whose last values are kept, as sent.
    key: Vec<usize>,
    key_last: Vec<Option<Vec<u8>>>,
    system: SystemColumns,
    origin: Origin,
    bounds: Bounds,
    phase: Phase,
    sequence: u8,
    /// The start of a payload that continues in the next packet.
    buffer: Vec<u8>,
    continued: bool,
    rows: u64,
    batch_bytes: usize,
    batch: Option<Batch>,
    error: Option<ServerError>,
}

impl ResultSet {
    /// Starts before the first packet of the result. The result must have the declared columns in the given order.
    /// `key` contains the indexes of the columns whose last values are kept.
    ///
    /// Raises `SchemaInvalid` for an unknown type or charset.
    pub fn new(
        columns: &[DeclaredColumn],
        mariadb: bool,
        key: Vec<usize>,
        origin: Origin,
        bounds: Bounds,
    ) -> Result<ResultSet> {
        let target = |column: &DeclaredColumn| {
            let kind = column.kind(mariadb)?;
            let charset = column.charset.as_deref().and_then(Charset::from_name).unwrap_or(Charset::Utf8mb4);
            let builder = ColumnBuilder::new(&kind);
            Ok(Target { name: column.name.as_str().into(), kind, charset, builder })
        };
        Ok(ResultSet {
            targets: columns.iter().map(target).collect::<Result<_>>()?,
            key_last: Vec::new(),
            key,
            system: SystemColumns::new(origin.instance.clone()),
            origin,
            bounds,
            phase: Phase::Count,
            sequence: 1,
            buffer: Vec::new(),
            continued: false,
            rows: 0,
            batch_bytes: 0,
            batch: None,
            error: None,
        })
    }

    /// Consumes complete packets from the start of `bytes`, up to the end of a batch, and returns the number of
    /// consumed bytes. The caller must pass the remaining bytes again, followed by more bytes if no batch is ready.
    ///
    /// Raises `EventMalformed` if the bytes are not a result set of these columns, `ConnectionLost` if packets are
    /// missing, `ValueMalformed` for values that contradict their type.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<usize> {
        let mut rest = Cursor::new(bytes);
        while self.batch.is_none() && self.phase != Phase::Done {
            let mut cursor = rest;
            if cursor.remaining() < HEADER_BYTES {
                break;
            }
            let length = cursor.u24()? as usize;
            let sequence = cursor.u8()?;
            if cursor.remaining() < length {
                break;
            }
            if sequence != self.sequence {
                let message = format!("packet {sequence} arrives where {} is due", self.sequence);
                return Err(Error::new(ErrorKind::ConnectionLost, message));
            }
            self.sequence = sequence.wrapping_add(1);
            let payload = cursor.take(length)?;
            rest = cursor;
            self.read_packet(payload).map_err(|error| self.locate_error(error))?;
        }
        Ok(bytes.len() - rest.remaining())
    }

    #[cold]
    fn locate_error(&self, error: Error) -> Error {
        let TableRef { database, table, .. } = &self.origin.table;
        error.within(&format!("row {} of {database}.{table}", self.rows + 1))
    }

    #[inline]
    fn read_packet(&mut self, payload: &[u8]) -> Result<()> {
        if payload.len() < PAYLOAD_BYTES_MAX && !self.continued {
            return self.read_payload(payload);
        }
        if self.buffer.len() + payload.len() > EVENT_BYTES_MAX {
            let message = format!("a row of more than {EVENT_BYTES_MAX} bytes");
            return Err(Error::new(ErrorKind::LimitExceeded, message));
        }
        self.buffer.extend_from_slice(payload);
        self.continued = payload.len() == PAYLOAD_BYTES_MAX;
        if self.continued {
            return Ok(());
        }
        let whole = std::mem::take(&mut self.buffer);
        self.read_payload(&whole)
    }

    #[inline]
    fn read_payload(&mut self, payload: &[u8]) -> Result<()> {
        match (self.phase, payload.first()) {
            (_, Some(&ERROR)) => self.read_error(payload),
            (Phase::Rows, Some(&EOF)) if payload.len() < EOF_BYTES_MAX => self.end(payload),
            (Phase::Rows, _) => self.read_row(payload),
            (Phase::Count, _) => self.read_count(payload),
            (Phase::Definitions(left), Some(_)) => {
                self.check_definition(payload, left)?;
                self.phase = if left > 1 { Phase::Definitions(left - 1) } else { Phase::DefinitionsEnd };
                Ok(())
            }
            (Phase::DefinitionsEnd, Some(&EOF)) => {
                self.phase = Phase::Rows;
                Ok(())
            }
            _ => Err(malformed("an answer that is no result set")),
        }
    }

    fn read_count(&mut self, payload: &[u8]) -> Result<()> {
        let column_count = match payload.first() {
            Some(&OK) | Some(&NULL) | None => return Err(malformed("an answer without rows")),
            _ => Cursor::new(payload).length_encoded()?,
        };
        if usize::try_from(column_count) != Ok(self.targets.len()) {
            return Err(malformed(format!("{column_count} columns where {} were asked for", self.targets.len())));
        }
        self.phase = Phase::Definitions(self.targets.len());
        Ok(())
    }

    /// Checks that a column still has the declared family of types and the same charset. Rows of a changed column might
    /// be decoded without an error, but to wrong values.
    fn check_definition(&self, payload: &[u8], left: usize) -> Result<()> {
        let Some(target) = self.targets.get(self.targets.len() - left) else { return Ok(()) };
        let definition = Definition::read(payload)?;
        if definition.fits(&target.kind, target.charset) {
            return Ok(());
        }
        let (name, declared) = (&target.name, target.kind.type_text());
        let Definition { code, collation, .. } = definition;
        let message =
            format!("column `{name}` was {declared}, and the server sends type {code}, collation {collation}");
        let hint = "The table was altered since it was described. Run: penstock resnapshot";
        Err(Error::new(ErrorKind::SchemaChanged, message).hint(hint))
    }

    /// Drops the rows after the last full batch. The caller resumes after the key of that batch.
    #[cold]
    fn read_error(&mut self, payload: &[u8]) -> Result<()> {
        let mut cursor = Cursor::new(payload);
        cursor.skip(1)?;
        self.error = Some(server_error(cursor)?);
        self.phase = Phase::Done;
        Ok(())
    }

    /// Ends the result set. A second result set was not requested and is an error.
    fn end(&mut self, payload: &[u8]) -> Result<()> {
        const MORE_RESULTS: u16 = 0x0008;
        let mut cursor = Cursor::new(payload);
        cursor.skip(3)?;
        if cursor.u16()? & MORE_RESULTS != 0 {
            return Err(malformed("a second result set"));
        }
        self.phase = Phase::Done;
        self.close_batch()
    }

    #[inline]
    fn read_row(&mut self, payload: &[u8]) -> Result<()> {
        if self.system.rows() == 0 {
            self.begin_batch();
        }
        let mut cursor = Cursor::new(payload);
        for target in &mut self.targets {
            let Target { name, kind, charset, builder } = target;
            let Some(sent) = read_value(&mut cursor)? else {
                builder.append_null();
                continue;
            };
            match builder.append_sent(kind, *charset, sent) {
                Ok(None) => {}
                Ok(Some(text)) => self.system.note_unrepresentable(name, text),
                Err(error) => return Err(error.within(&format!("column `{name}`"))),
            }
        }
        if !cursor.is_empty() {
            return Err(malformed(format!("{} bytes behind the last column", cursor.remaining())));
        }
        self.system.add_row();
        self.rows += 1;
        self.batch_bytes += payload.len();
        if self.system.rows() >= self.bounds.rows || self.batch_bytes >= self.bounds.bytes {
            self.keep_key(payload)?;
            self.close_batch()?;
        }
        Ok(())
    }

    /// Reads the last row of a batch again to keep its key.
    fn keep_key(&mut self, payload: &[u8]) -> Result<()> {
        let mut cursor = Cursor::new(payload);
        let values = (0..self.targets.len()).map(|_| read_value(&mut cursor)).collect::<Result<Vec<_>>>()?;
        let key_values = self.key.iter().map(|&at| values.get(at).copied().flatten().map(<[u8]>::to_vec));
        self.key_last = key_values.collect();
        Ok(())
    }

    fn begin_batch(&mut self) {
        let Origin { table, file, offset, commit_version, timestamp_us, server_id, row_first, .. } = &self.origin;
        self.targets.iter_mut().for_each(|target| target.builder.begin());
        let transaction = TransactionView {
            file: file.clone(),
            start: *offset,
            commit_version: *commit_version,
            commit_us: *timestamp_us,
            gtid: Gtid::Anonymous,
            thread_id: None,
            clock: None,
        };
        let event = EventView { offset: *offset, end_offset: *offset, server_id: *server_id, ..EventView::default() };
        let before = u64::from(*row_first).wrapping_add(self.rows);
        // The column is an INT, so row numbers above 2^31 - 1 wrap around. Chunks have far fewer rows.
        let row_first = u32::try_from(before % (1 << 31)).unwrap_or(0);
        self.system.begin_run(&transaction, table, event, Images::Each(Change::Insert), row_first, [0, 0]);
    }

    fn close_batch(&mut self) -> Result<()> {
        let rows = self.system.rows();
        self.batch_bytes = 0;
        if rows == 0 {
            return Ok(());
        }
        let mut fields = Vec::with_capacity(self.targets.len() + system::ALL.len());
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(fields.capacity());
        for Target { name, kind, builder, .. } in &mut self.targets {
            fields.push(Field::new(&**name, kind.arrow_type(), true));
            columns.push(builder.finish());
        }
        for (field, column) in self.system.finish(&system::ALL, rows) {
            fields.push(field);
            columns.push(column);
        }
        let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(rows));
        let record = RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)
            .map_err(|error| malformed(format!("columns of one batch disagree: {error}")))?;
        let TableRef { database, table, schema_version } = &self.origin.table;
        self.batch = Some(Batch {
            database: database.clone(),
            table: table.clone(),
            schema_version: *schema_version,
            record,
            position: (self.origin.file.clone(), self.origin.offset),
        });
        Ok(())
    }

    /// Takes the batch that is ready, if any.
    pub fn take_batch(&mut self) -> Option<Batch> {
        self.batch.take()
    }

    /// Whether a batch is ready.
    pub fn has_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// Whether the result has ended.
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    /// Number of rows read so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The key values in the last row of the last full batch, as sent; empty before the first full batch.
    pub fn key_last(&self) -> &[Option<Vec<u8>>] {
        &self.key_last
    }

    /// The error that the server sent instead of a row, if any.
    pub fn error(&self) -> Option<&ServerError> {
        self.error.as_ref()
    }
}

/// The fields of a column definition that are checked (protocol manual, "Protocol::ColumnDefinition41").
struct Definition {
    collation: u32,
    code: u8,
    unsigned: bool,
    decimals: u8,
}

impl Definition {
    fn read(payload: &[u8]) -> Result<Definition> {
        const UNSIGNED: u16 = 0x20;
        /// Number of texts before the fixed fields: catalog, schema, table, original table, name and original name.
        const TEXTS: usize = 6;
        let mut cursor = Cursor::new(payload);
        for _ in 0..TEXTS {
            cursor.length_encoded_bytes()?;
        }
        // The fixed-length fields follow their length. If MariaDB sends extended metadata in front of them, this reads
        // that metadata instead.
        let rest = cursor.length_encoded_bytes()?;
        let mut cursor = Cursor::new(rest);
        let collation = u32::from(cursor.u16()?);
        cursor.skip(4)?;
        let code = cursor.u8()?;
        let unsigned = cursor.u16()? & UNSIGNED != 0;
        Ok(Definition { collation, code, unsigned, decimals: cursor.u8()? })
    }

    fn fits(&self, kind: &Kind, charset: Charset) -> bool {
        let sent = Charset::from_collation_id(self.collation);
        match kind {
            Kind::Integer { bytes, unsigned } => {
                let code = match bytes {
                    1 => 1,
                    2 => 2,
                    3 => 9,
                    4 => 3,
                    _ => 8,
                };
                self.code == code && self.unsigned == *unsigned
            }
            Kind::Float | Kind::Double => self.code == 5,
            Kind::Decimal { scale, .. } => self.code == 246 && self.decimals == *scale,
            Kind::Bit { .. } => self.code == 16,
            Kind::Year => self.code == 13,
            Kind::Date => matches!(self.code, 10 | 14),
            Kind::Time { .. } => self.code == 11,
            Kind::DateTime { .. } => self.code == 12,
            Kind::Timestamp { .. } => self.code == 7,
            Kind::Text { .. } | Kind::CompressedText { .. } | Kind::Enumeration { .. } | Kind::Set { .. } => {
                self.is_string() && sent == Some(charset)
            }
            Kind::Binary { .. } | Kind::CompressedBinary { .. } => self.is_string() && sent == Some(Charset::Binary),
            Kind::Null
            | Kind::Json { .. }
            | Kind::Geometry { .. }
            | Kind::Vector { .. }
            | Kind::Uuid
            | Kind::Inet4
            | Kind::Inet6 => true,
        }
    }

    fn is_string(&self) -> bool {
        matches!(self.code, 15 | 249..=254 | 247 | 248)
    }
}

/// Reads the next text of a row; None for NULL.
#[inline(always)]
fn read_value<'a>(cursor: &mut Cursor<'a>) -> Result<Option<&'a [u8]>> {
    if cursor.peek().first() == Some(&NULL) {
        cursor.skip(1)?;
        return Ok(None);
    }
    cursor.length_encoded_bytes().map(Some)
}
