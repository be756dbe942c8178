//! Writes transactions whose values are given as text, for sources that describe their changes in messages.

use super::table::{KeyPart, WrittenColumn, WrittenTable, COLLATION_BINARY};
use super::text::{pack_number_or_text, pack_text};
use super::transaction::{image, Opening, TransactionWriter, WrittenSession};
use crate::column::{DeclaredColumn, Kind};
use crate::error::{malformed, value_malformed, Error, ErrorKind, Result};
use crate::event::tidb_commit::TidbCommit;
use crate::event::Change;

/// utf8mb4_bin, the collation without language rules.
const COLLATION_UTF8MB4_BIN: u16 = 46;

/// A row: each column's value as text, in the table's column order; None for NULL.
pub type Cells<'a> = [Option<&'a [u8]>];

/// Writes one transaction after another, each complete before it is returned.
#[derive(Debug)]
pub struct RowEventWriter {
    cluster_id: u64,
    server_id: u32,
    tables: Vec<WrittenTable>,
    open: Option<OpenTransaction>,
}

#[derive(Debug)]
struct OpenTransaction {
    writer: TransactionWriter,
    commit: TidbCommit,
    /// The table of the last rows.
    table: Option<usize>,
}

impl RowEventWriter {
    /// Creates a writer without tables. All events get `server_id`.
    pub fn new(cluster_id: u64, server_id: u32) -> RowEventWriter {
        RowEventWriter { cluster_id, server_id, tables: Vec::new(), open: None }
    }

    /// Adds a table, with its columns as MySQL declares them, and returns its index.
    ///
    /// Raises `SchemaInvalid` for an unknown type, or if a key column is missing from the table.
    pub fn define(
        &mut self,
        database: &str,
        table: &str,
        columns: &[DeclaredColumn],
        primary_key: &[String],
    ) -> Result<usize> {
        let column = |column: &DeclaredColumn| -> Result<WrittenColumn> {
            let kind = column.kind(false)?;
            let collation = match kind {
                Kind::Binary { .. } => COLLATION_BINARY,
                _ => COLLATION_UTF8MB4_BIN,
            };
            Ok(WrittenColumn { name: column.name.clone(), kind, nullable: column.nullable, collation })
        };
        let part = |name: &String| match columns.iter().position(|column| column.name == *name) {
            Some(column) => Ok(KeyPart { column, prefix: 0 }),
            None => Err(Error::new(ErrorKind::SchemaInvalid, format!("the key has `{name}`, which is no column"))),
        };
        let index = self.tables.len();
        self.tables.push(WrittenTable {
            id: index as u64 + 1,
            database: database.to_owned(),
            table: table.to_owned(),
            columns: columns.iter().map(column).collect::<Result<_>>()?,
            primary_key: primary_key.iter().map(part).collect::<Result<_>>()?,
        });
        Ok(index)
    }

    /// Begins the transaction with this commit timestamp, at `offset` of a file. An open transaction is dropped.
    pub fn begin(&mut self, commit_ts: u64, offset: u64) -> Result<()> {
        let (mut writer, commit) = self.opened(commit_ts, commit_ts, offset, true)?;
        writer.statement("", "BEGIN", &WrittenSession::default())?;
        self.open = Some(OpenTransaction { writer, commit, table: None });
        Ok(())
    }

    fn opened(
        &self,
        commit_ts: u64,
        start_ts: u64,
        offset: u64,
        rows: bool,
    ) -> Result<(TransactionWriter, TidbCommit)> {
        let commit = TidbCommit { commit_ts, start_ts, cluster_id: self.cluster_id, schema_version: 0 };
        let opening = Opening { offset, server_id: self.server_id, commit_us: commit.commit_us(), rows, length: 0 };
        let mut writer = TransactionWriter::open(&opening)?;
        writer.tidb_commit(&commit)?;
        Ok((writer, commit))
    }

    /// Adds a change of a table. `images` contains the new row of an insert, the old row of a delete, or the old and
    /// the new row of an update. `numbered` means that ENUM and SET values are given as numbers.
    ///
    /// Raises `ValueMalformed` for a row with the wrong number of columns, or a text that is not a value of its column.
    pub fn row(&mut self, table: usize, change: Change, images: &[&Cells<'_>], numbered: bool) -> Result<()> {
        let open = self.open.as_mut().ok_or_else(|| malformed("a row outside a transaction"))?;
        let written = self.tables.get(table).ok_or_else(|| malformed(format!("no table has index {table}")))?;
        if open.table != Some(table) {
            open.writer.end_table()?;
            open.writer.table(written)?;
            open.table = Some(table);
        }
        let pack = if numbered { pack_number_or_text } else { pack_text };
        open.writer.row(written, change, |out| {
            for cells in images {
                if cells.len() != written.columns.len() {
                    let message = format!("a row of {} values in a table of {}", cells.len(), written.columns.len());
                    return Err(value_malformed(message));
                }
                image(cells.len(), out, |index, out| {
                    let cell = cells.get(index).copied().flatten();
                    let (Some(text), Some(column)) = (cell, written.columns.get(index)) else { return Ok(true) };
                    pack(&column.kind, text, out).map(|()| false).map_err(|error| {
                        let name =
                            format!("table `{}`.`{}`, column `{}`", written.database, written.table, column.name);
                        error.within(&name)
                    })
                })?;
            }
            Ok(())
        })
    }

    /// Ends the transaction. Returns its bytes.
    pub fn commit(&mut self) -> Result<Vec<u8>> {
        let mut open = self.open.take().ok_or_else(|| malformed("a commit outside a transaction"))?;
        open.writer.end_table()?;
        open.writer.commit(open.commit.commit_ts)?;
        open.writer.set_length();
        Ok(open.writer.take())
    }

    /// Returns the bytes of a statement at `offset` of a file, with its commit and start timestamps.
    pub fn statement(
        &self,
        (commit_ts, start_ts): (u64, u64),
        offset: u64,
        database: &str,
        text: &str,
    ) -> Result<Vec<u8>> {
        let (mut writer, _) = self.opened(commit_ts, start_ts, offset, false)?;
        writer.statement(database, text, &WrittenSession::default())?;
        writer.set_length();
        Ok(writer.take())
    }
}
