//! Emits one row per transaction: boundaries, sizes and counts, without decoding values.

use std::sync::Arc;

use arrow_array::builder::{Int64Builder, StringBuilder, TimestampMicrosecondBuilder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, TimeUnit};

use crate::emit::{Batch, TransactionView};
use crate::error::{malformed, Result};

/// The counts of a transaction.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Number of events, including those inside a payload.
    pub events: u32,
    /// Number of changes; an update counts as one.
    pub rows: u64,
    /// The server that first committed the transaction.
    pub server_id: u32,
    /// The changed tables as `database.table`, without duplicates.
    pub tables: Vec<String>,
    /// The text of the statement, if the transaction is a single statement.
    pub statement: Option<String>,
}

/// The transactions so far.
#[derive(Default)]
pub struct TransactionsBatch {
    rows: usize,
    file: StringBuilder,
    offset: Int64Builder,
    end_offset: Int64Builder,
    commit_version: Int64Builder,
    commit_timestamp: TimestampMicrosecondBuilder,
    gtid: StringBuilder,
    server_id: Int64Builder,
    thread_id: Int64Builder,
    events: Int64Builder,
    changes: Int64Builder,
    tables: StringBuilder,
    statement: StringBuilder,
}

impl TransactionsBatch {
    /// Number of rows so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Adds a transaction that ends at `end_offset`.
    pub fn add(&mut self, transaction: &TransactionView, end_offset: u64, tally: &Tally) {
        self.rows += 1;
        self.file.append_value(&*transaction.file);
        self.offset.append_value(transaction.start as i64);
        self.end_offset.append_value(end_offset as i64);
        self.commit_version.append_value(transaction.commit_version);
        self.commit_timestamp.append_value(transaction.commit_us);
        let mut gtid = String::new();
        transaction.gtid.write(&mut gtid);
        self.gtid.append_option(Some(gtid).filter(|gtid| !gtid.is_empty()));
        self.server_id.append_value(i64::from(tally.server_id));
        self.thread_id.append_option(transaction.thread_id);
        self.events.append_value(i64::from(tally.events));
        self.changes.append_value(tally.rows as i64);
        self.tables.append_value(tally.tables.join(","));
        self.statement.append_option(tally.statement.as_deref());
    }

    /// Closes the batch and starts an empty batch.
    pub fn finish(&mut self, position: (Arc<str>, u64)) -> Result<Option<Batch>> {
        if std::mem::take(&mut self.rows) == 0 {
            return Ok(None);
        }
        let columns: Vec<ArrayRef> = vec![
            Arc::new(self.file.finish()),
            Arc::new(self.offset.finish()),
            Arc::new(self.end_offset.finish()),
            Arc::new(self.commit_version.finish()),
            Arc::new(self.commit_timestamp.finish().with_timezone("UTC")),
            Arc::new(self.gtid.finish()),
            Arc::new(self.server_id.finish()),
            Arc::new(self.thread_id.finish()),
            Arc::new(self.events.finish()),
            Arc::new(self.changes.finish()),
            Arc::new(self.tables.finish()),
            Arc::new(self.statement.finish()),
        ];
        let record = RecordBatch::try_new(Arc::new(schema()), columns)
            .map_err(|error| malformed(format!("columns of one batch disagree: {error}")))?;
        Ok(Some(Batch { database: "".into(), table: "".into(), schema_version: 0, record, position }))
    }
}

/// Returns the schema of transaction rows.
pub fn schema() -> Schema {
    Schema::new(vec![
        Field::new("file", DataType::Utf8, false),
        Field::new("offset", DataType::Int64, false),
        Field::new("end_offset", DataType::Int64, false),
        Field::new("commit_version", DataType::Int64, false),
        Field::new("commit_timestamp", DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())), false),
        Field::new("gtid", DataType::Utf8, true),
        Field::new("server_id", DataType::Int64, false),
        Field::new("thread_id", DataType::Int64, true),
        Field::new("events", DataType::Int64, false),
        Field::new("rows", DataType::Int64, false),
        Field::new("tables", DataType::Utf8, false),
        Field::new("statement", DataType::Utf8, true),
    ])
}
