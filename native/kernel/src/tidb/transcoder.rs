//! Transcodes the transactions of a TiDB cluster into transactions of a MySQL binlog.
//!
//! The output depends only on the payloads, the definitions and the position in the file, so a transaction that is
//! transcoded again after a crash has the same bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::binlog::{Binlog, BinlogKind};
use super::changes::{next_mutation, schema_version, table_id, FieldCursor, RowCursor};
use super::row::{write_deleted, write_inserted, write_updated};
use super::table::TidbTable;
use super::table_info;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::tidb_commit::TidbCommit;
use crate::event::Change;
use crate::write::transaction::{Opening, TransactionWriter, WrittenSession};

/// A transaction of at most this many bytes is returned in one piece. A larger transaction is returned in pieces that
/// are about as large as a rows event.
const WHOLE_BYTES_MAX: usize = 4 << 20;

/// How many definitions are kept per table: the current definition, and earlier ones for rows that were written with
/// them.
const VERSIONS_MAX: usize = 8;

/// A definition of a table, or the error that explains why the table's rows cannot be written.
#[derive(Debug, Clone)]
struct Definition {
    /// The commit timestamp from which rows are written with this definition.
    commit_ts: i64,
    table: Result<Arc<TidbTable>>,
}

/// Tables by number. The definitions of each table are keyed by the schema version from which they apply.
type Tables = HashMap<i64, BTreeMap<i64, Definition>>;

/// How to write the statement of a DDL.
#[derive(Debug, Clone, Copy, Default)]
pub struct DdlStatement<'a> {
    /// The default database.
    pub database: &'a str,
    /// The statement's text, if it differs from the text in the payload.
    pub text: Option<&'a str>,
    /// The session that executed the statement.
    pub session: WrittenSession<'a>,
}

/// The definitions of a cluster's tables, and the settings for writing its transactions.
#[derive(Debug, Clone)]
pub struct Transcoder {
    cluster_id: u64,
    server_id: u32,
    tables: Arc<Tables>,
}

impl Transcoder {
    /// Creates a transcoder without tables. All events get `server_id`.
    pub fn new(cluster_id: u64, server_id: u32) -> Transcoder {
        Transcoder { cluster_id, server_id, tables: Arc::default() }
    }

    /// Sets the definition of a table from a schema version on.
    ///
    /// Rows that commit at or after `commit_ts` are written with this definition, whatever their schema version. The
    /// reason is that a server that has not loaded the new version may still write rows, but these rows come after the
    /// statement in the log. Returns the table's number. Rows of the table's partitions count as rows of the table. A
    /// table with a column type that MySQL does not have is rejected when its rows arrive. Raises `SchemaInvalid` like
    /// [`TidbTable::read`].
    pub fn define(&mut self, database: &str, definition: &[u8], schema_version: i64, commit_ts: i64) -> Result<i64> {
        let json = table_info::parse(definition)?;
        let (id, partitions) = table_info::numbers(&json)?;
        let mut table = TidbTable::read(database, &json);
        if let Err(error) = &table {
            if error.kind() != ErrorKind::EventUnsupported {
                return Err(error.clone());
            }
        }
        let tables = Arc::make_mut(&mut self.tables);
        if let (Ok(table), Some(versions)) = (&mut table, tables.get(&id)) {
            let earlier = versions.range(..schema_version).next_back();
            if let Some((_, Definition { table: Ok(earlier), .. })) = earlier {
                table.follow(earlier);
            }
        }
        let table = table.map(Arc::new);
        for number in partitions.iter().chain([&id]) {
            let versions = tables.entry(*number).or_default();
            versions.insert(schema_version, Definition { commit_ts, table: table.clone() });
            while versions.len() > VERSIONS_MAX {
                versions.pop_first();
            }
        }
        Ok(id)
    }

    /// Forgets a table and its partitions. The table's rows are refused from now on.
    pub fn forget(&mut self, id: i64) {
        let tables = Arc::make_mut(&mut self.tables);
        if let Some(versions) = tables.remove(&id) {
            let known = versions.values().flat_map(|definition| &definition.table);
            for partition in known.flat_map(|table| &table.partitions) {
                tables.remove(partition);
            }
        }
    }

    /// Returns the schema version under which a payload's rows were written, and the numbers of its tables.
    pub fn tables_of(payload: &[u8]) -> Result<(i64, Vec<i64>)> {
        let value = Binlog::read(payload)?.prewrite_value;
        let mut cursor = FieldCursor::default();
        let mut ids = Vec::new();
        while let Some(message) = next_mutation(value, &mut cursor)? {
            ids.push(table_id(message)?);
        }
        Ok((schema_version(value)?, ids))
    }

    /// Returns the bytes of a DDL at `offset` of a file.
    ///
    /// Raises `EventMalformed` for a payload that is not a DDL.
    pub fn ddl(&self, payload: &[u8], offset: u64, statement: &DdlStatement<'_>) -> Result<Vec<u8>> {
        let binlog = Binlog::read(payload)?;
        if binlog.kind != BinlogKind::Commit || binlog.ddl_job_id <= 0 {
            return Err(malformed(format!("the TiDB payload of {} is no committed DDL", binlog.start_ts)));
        }
        let commit = self.commit_of(&binlog, 0)?;
        let opening = self.opening(&commit, offset, false);
        let mut writer = TransactionWriter::open(&opening)?;
        writer.tidb_commit(&commit)?;
        writer.statement(statement.database, statement.text.unwrap_or(&binlog.query()), &statement.session)?;
        writer.set_length();
        Ok(writer.take())
    }

    /// Begins to transcode all payloads with the same commit timestamp into a transaction at `offset` of a file.
    ///
    /// The whole transaction is checked before the first piece. Raises `EventMalformed` for payloads that are not
    /// committed changes with the same commit timestamp, or that are inconsistent; `SchemaUnknown` for rows of a table
    /// without a definition for their schema version; `SchemaMismatch` and `ValueMalformed` for rows that do not fit
    /// the definition.
    pub fn transaction(&self, payloads: &[&[u8]], offset: u64) -> Result<Pieces> {
        let mut heads = Vec::with_capacity(payloads.len());
        for payload in payloads {
            let binlog = Binlog::read(payload)?;
            if binlog.kind != BinlogKind::Commit || binlog.ddl_job_id != 0 {
                return Err(malformed(format!("the TiDB payload of {} has no committed rows", binlog.start_ts)));
            }
            heads.push(binlog);
        }
        let Some(first) = heads.first() else { return Err(malformed("a transaction of no TiDB payload")) };
        if let Some(other) = heads.iter().find(|head| head.commit_ts != first.commit_ts) {
            let message = format!("TiDB payloads of {} and {} in one transaction", first.commit_ts, other.commit_ts);
            return Err(malformed(message));
        }
        let mut version = 0;
        for head in &heads {
            version = version.max(schema_version(head.prewrite_value)?);
        }
        let commit = self.commit_of(first, version)?;
        let opening = self.opening(&commit, offset, true);
        let mut pieces = Pieces::new(self.tables.clone(), opening, commit)?;
        let Some(whole) = pieces.step(payloads, WHOLE_BYTES_MAX)? else { return Ok(pieces) };
        if pieces.ended {
            return Ok(pieces.of_one(whole));
        }
        let mut length = whole.len() as u64;
        drop(whole);
        while let Some(piece) = pieces.step(payloads, 0)? {
            length += piece.len() as u64;
        }
        Pieces::new(self.tables.clone(), Opening { length, ..opening }, commit)
    }

    fn commit_of(&self, binlog: &Binlog<'_>, schema_version: i64) -> Result<TidbCommit> {
        match (u64::try_from(binlog.commit_ts), u64::try_from(binlog.start_ts)) {
            (Ok(commit_ts @ 1..), Ok(start_ts)) => {
                Ok(TidbCommit { commit_ts, start_ts, cluster_id: self.cluster_id, schema_version })
            }
            _ => Err(malformed(format!("the TiDB payload of {} has no commit timestamp", binlog.start_ts))),
        }
    }

    fn opening(&self, commit: &TidbCommit, offset: u64, rows: bool) -> Opening {
        Opening { offset, server_id: self.server_id, commit_us: commit.commit_us(), rows, length: 0 }
    }
}

/// A transaction that is being transcoded, in pieces of whole events.
#[derive(Debug)]
pub struct Pieces {
    tables: Arc<Tables>,
    writer: TransactionWriter,
    commit: TidbCommit,
    /// The payload that is being read.
    payload: usize,
    mutations: FieldCursor,
    rows: Option<OpenMutation>,
    ended: bool,
    /// The only piece of a small transaction.
    whole: Option<Vec<u8>>,
}

/// The table whose rows are being written.
#[derive(Debug)]
struct OpenMutation {
    table: Arc<TidbTable>,
    /// The largest column number at the time when the rows were written.
    complete_to: i64,
    /// The location of the `TableMutation` in the payload's `PrewriteValue`.
    start: usize,
    end: usize,
    cursor: RowCursor,
}

impl Pieces {
    fn new(tables: Arc<Tables>, opening: Opening, commit: TidbCommit) -> Result<Pieces> {
        let mut writer = TransactionWriter::open(&opening)?;
        writer.tidb_commit(&commit)?;
        writer.statement("", "BEGIN", &WrittenSession::default())?;
        let mutations = FieldCursor::default();
        Ok(Pieces { tables, writer, commit, payload: 0, mutations, rows: None, ended: false, whole: None })
    }

    fn of_one(mut self, whole: Vec<u8>) -> Pieces {
        self.whole = Some(whole);
        self
    }

    /// Returns the next piece; None after the last. `payloads` must be those passed at the start.
    pub fn next(&mut self, payloads: &[&[u8]]) -> Result<Option<Vec<u8>>> {
        match self.whole.take() {
            Some(whole) => Ok(Some(whole)),
            None => self.step(payloads, 0),
        }
    }

    /// Transcodes until more than `bytes_max` bytes of whole events are available, or to the end.
    fn step(&mut self, payloads: &[&[u8]], bytes_max: usize) -> Result<Option<Vec<u8>>> {
        if self.ended {
            return Ok(None);
        }
        let is_first = self.payload == 0 && self.rows.is_none();
        while self.writer.complete_bytes() <= bytes_max {
            let Some(payload) = payloads.get(self.payload) else {
                self.writer.commit(self.commit.commit_ts)?;
                self.ended = true;
                if is_first && bytes_max > 0 {
                    self.writer.set_length();
                }
                break;
            };
            let value = Binlog::read(payload)?.prewrite_value;
            self.payload_rows(value, bytes_max)?;
        }
        Ok(Some(self.writer.take()))
    }

    /// Transcodes rows of a payload until enough bytes are available, or until the payload ends.
    fn payload_rows(&mut self, value: &[u8], bytes_max: usize) -> Result<()> {
        while self.writer.complete_bytes() <= bytes_max {
            let Some(open) = &mut self.rows else {
                let Some(message) = next_mutation(value, &mut self.mutations)? else {
                    self.payload += 1;
                    self.mutations = FieldCursor::default();
                    return Ok(());
                };
                let commit_ts = i64::try_from(self.commit.commit_ts).unwrap_or(i64::MAX);
                let (table, complete_to) =
                    table_at(&self.tables, table_id(message)?, schema_version(value)?, commit_ts)?;
                self.writer.table(&table.written)?;
                let end = self.mutations.position();
                let (start, cursor) = (end - message.len(), RowCursor::default());
                self.rows = Some(OpenMutation { table, complete_to, start, end, cursor });
                continue;
            };
            let message = value.get(open.start..open.end).unwrap_or_default();
            let Some((change, row)) = open.cursor.next(message)? else {
                self.writer.end_table()?;
                self.rows = None;
                continue;
            };
            let (table, complete_to) = (&open.table, open.complete_to);
            self.writer.row(&table.written, change, |out| match change {
                Change::Insert => write_inserted(table, row, out),
                Change::Update => write_updated(table, complete_to, row, out),
                Change::Delete => write_deleted(table, complete_to, row, out),
            })?;
        }
        Ok(())
    }
}

/// Returns the definition with which rows are written, and the largest number of a column at their schema version.
///
/// A row may commit after its table was changed, although the server that wrote the row had not loaded the change. In
/// the log, the row comes after the statement that made the change. So it is written with the newest definition, which
/// identifies values by column number.
fn table_at(tables: &Tables, id: i64, schema_version: i64, commit_ts: i64) -> Result<(Arc<TidbTable>, i64)> {
    let versions = tables.get(&id);
    let newest = versions.and_then(|versions| {
        let in_force =
            |(version, table): &(&i64, &Definition)| **version <= schema_version || table.commit_ts <= commit_ts;
        versions.iter().rfind(in_force)
    });
    if let (Some(versions), Some((_, newest))) = (versions, newest) {
        let table = newest.table.clone()?;
        let own = versions.range(..=schema_version).next_back().and_then(|(_, own)| own.table.as_ref().ok());
        let complete_to = own.map_or(table.last_number, |own| own.last_number);
        return Ok((table, complete_to));
    }
    let message = format!("no definition of TiDB's table {id} at schema version {schema_version}");
    Err(Error::new(ErrorKind::SchemaUnknown, message)
        .hint("the table was dropped before, or its DDL job has not been read; penstock check shows what is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::CHECKSUM_BYTES;

    const TABLE: &str = r#"{"id": 86, "name": {"O": "Test", "L": "test"}, "pk_is_handle": true, "cols": [
        {"id": 1, "name": {"O": "id", "L": "id"}, "offset": 0, "state": 5, "type": {"Tp": 3, "Flag": 4099}},
        {"id": 2, "name": {"O": "v", "L": "v"}, "offset": 1, "state": 5, "version": 2, "origin_default": "x",
         "type": {"Tp": 15, "Flag": 0, "Flen": 1000, "Charset": "utf8mb4", "Collate": "utf8mb4_bin"}}]}"#;

    fn transcoder() -> Transcoder {
        let mut transcoder = Transcoder::new(7001, 9);
        assert_eq!(transcoder.define("shop", TABLE.as_bytes(), 43, 43), Ok(86));
        transcoder
    }

    /// A Commit that inserts `rows` rows, each with `text`.
    fn payload(commit_ts: i64, rows: usize, text: &[u8]) -> Vec<u8> {
        let mut mutation = vec![8, 86];
        for _ in 0..rows {
            let mut row = vec![8, 2, 8, 4, 2];
            let mut length = text.len() as u64 * 2;
            while length >= 0x80 {
                row.push(length as u8 | 0x80);
                length >>= 7;
            }
            row.push(length as u8);
            row.extend_from_slice(text);
            mutation.push(0x12);
            mutation.extend(length_of(row.len()));
            mutation.extend(row);
        }
        mutation.extend([0x38, 0].repeat(rows));
        let value = [&[8, 43, 0x12][..], &length_of(mutation.len()), &mutation].concat();
        let binlog = Binlog {
            kind: BinlogKind::Commit,
            start_ts: 1 << 40,
            commit_ts,
            prewrite_key: b"",
            prewrite_value: &value,
            ddl_query: b"",
            ddl_job_id: 0,
            ddl_schema_state: 0,
        };
        let mut out = Vec::new();
        binlog.write(&mut out);
        out
    }

    fn length_of(mut length: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while length >= 0x80 {
            out.push(length as u8 | 0x80);
            length >>= 7;
        }
        out.push(length as u8);
        out
    }

    fn pieces(payloads: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let mut pieces = transcoder().transaction(payloads, 4711)?;
        let mut out = Vec::new();
        while let Some(piece) = pieces.next(payloads)? {
            out.push(piece);
        }
        Ok(out)
    }

    /// Returns the type codes of the events, after checking each event's checksum and position.
    fn codes(bytes: &[u8]) -> Vec<u8> {
        let mut codes = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let size = u32::from_le_bytes(rest[9..13].try_into().unwrap()) as usize;
            let (event, after) = rest.split_at(size);
            assert!(crate::frame::events::checksum_holds(event));
            let end = u32::from_le_bytes(event[13..17].try_into().unwrap());
            assert_eq!(end as usize, 4711 + bytes.len() - after.len());
            codes.push(event[4]);
            rest = after;
        }
        codes
    }

    #[test]
    fn a_small_transaction_is_one_piece_that_states_its_length() {
        let bytes = pieces(&[&payload(1 << 41, 2, b"a")]).unwrap();
        assert_eq!(bytes.len(), 1);
        assert_eq!(codes(&bytes[0]), [34, 121, 2, 19, 30, 16]);
        let head = crate::event::gtid::read(&bytes[0][19..85 - CHECKSUM_BYTES], true).unwrap();
        assert_eq!(head.length, Some(bytes[0].len() as u64));
        assert_eq!(head.commit_us, Some(8_388_608_000));
    }

    #[test]
    fn a_large_transaction_comes_in_bounded_pieces_of_the_same_bytes() {
        let (first, second) = (payload(1 << 41, 9_000, &[b'x'; 900]), payload(1 << 41, 1, b"y"));
        let payloads: [&[u8]; 2] = [&first, &second];
        let bytes = pieces(&payloads).unwrap();
        assert!(bytes.len() > 6 && bytes.iter().all(|piece| piece.len() < 3 << 20), "{}", bytes.len());
        let whole = bytes.concat();
        let rows = 30;
        let codes = codes(&whole);
        assert_eq!(codes.iter().filter(|code| **code == rows).count(), codes.len() - 6);
        let head = crate::event::gtid::read(&whole[19..85 - CHECKSUM_BYTES], true).unwrap();
        assert_eq!(head.length, Some(whole.len() as u64));
    }

    #[test]
    fn a_damaged_row_is_refused_before_the_first_piece() {
        let mut damaged = payload(1 << 41, 9_000, &[b'x'; 900]);
        let last_row = damaged.len() - 2 * 9_000 - 4 - 905;
        damaged[last_row] = 0x0b;
        assert!(transcoder().transaction(&[&damaged], 4).is_err());
    }

    #[test]
    fn payloads_of_two_commits_are_no_transaction() {
        let (first, second) = (payload(1 << 41, 1, b"a"), payload(1 << 42, 1, b"b"));
        assert!(pieces(&[&first, &second]).is_err());
        assert!(pieces(&[]).is_err());
        assert!(pieces(&[&payload(0, 1, b"a")]).is_err(), "no commit timestamp");
    }

    #[test]
    fn rows_that_commit_after_a_statement_are_written_with_its_definition() {
        let renamed = TABLE.replace("\"O\": \"v\"", "\"O\": \"renamed\"");
        let mut transcoder = transcoder();
        transcoder.define("shop", renamed.as_bytes(), 44, 1 << 42).unwrap();
        for (commit_ts, column) in [((1 << 42) - 1, &b"\x02id\x01v"[..]), (1 << 42, b"\x02id\x07renamed")] {
            let mut pieces = transcoder.transaction(&[&payload(commit_ts, 1, b"a")], 4).unwrap();
            let events = pieces.next(&[&payload(commit_ts, 1, b"a")]).unwrap().unwrap();
            assert!(events.windows(column.len()).any(|bytes| bytes == column), "{commit_ts}");
        }
    }

    #[test]
    fn rows_are_read_with_the_definition_of_their_schema_version() {
        let mut transcoder = transcoder();
        transcoder.forget(86);
        let unknown = transcoder.transaction(&[&payload(1 << 41, 1, b"a")], 4).unwrap_err();
        assert_eq!(unknown.kind(), ErrorKind::SchemaUnknown);
        transcoder.define("shop", TABLE.as_bytes(), 44, 1 << 42).unwrap();
        let later = transcoder.transaction(&[&payload(1 << 41, 1, b"a")], 4).unwrap_err();
        assert_eq!(later.kind(), ErrorKind::SchemaUnknown);
        let foreign = TABLE.replace("\"Tp\": 15", "\"Tp\": 225");
        transcoder.define("shop", foreign.as_bytes(), 43, 43).unwrap();
        let unsupported = transcoder.transaction(&[&payload(1 << 41, 1, b"a")], 4).unwrap_err();
        assert_eq!(unsupported.kind(), ErrorKind::EventUnsupported);
    }
}
