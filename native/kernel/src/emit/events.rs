//! Emits one row per event, for users who inspect a log.

use std::sync::Arc;

use arrow_array::builder::{Int64Builder, StringBuilder, TimestampMicrosecondBuilder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, TimeUnit};

use crate::emit::Batch;
use crate::error::{malformed, Result};
use crate::event::Header;

/// The fields of an event that are shown to users.
#[derive(Debug, Clone, Default)]
pub struct EventRow<'a> {
    /// The file.
    pub file: &'a str,
    /// The start of the event; for events inside a payload, the start of the payload.
    pub offset: u64,
    /// The start of the next event.
    pub end_offset: u64,
    /// The name of the event type.
    pub kind: &'a str,
    /// The GTID of the transaction.
    pub gtid: &'a str,
    /// The database, for table maps, rows and statements.
    pub database: Option<&'a str>,
    /// The table, for table maps and rows.
    pub table: Option<&'a str>,
    /// Number of changes, for rows events.
    pub rows: Option<u32>,
    /// The statement, the next file, or another short description.
    pub text: Option<String>,
}

/// The events so far.
#[derive(Default)]
pub struct EventsBatch {
    rows: usize,
    file: StringBuilder,
    offset: Int64Builder,
    end_offset: Int64Builder,
    kind: StringBuilder,
    timestamp: TimestampMicrosecondBuilder,
    server_id: Int64Builder,
    size: Int64Builder,
    flags: Int64Builder,
    gtid: StringBuilder,
    database: StringBuilder,
    table: StringBuilder,
    changes: Int64Builder,
    text: StringBuilder,
}

impl EventsBatch {
    /// Number of rows so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Adds an event.
    pub fn add(&mut self, header: &Header, row: EventRow<'_>) {
        self.rows += 1;
        self.file.append_value(row.file);
        self.offset.append_value(row.offset as i64);
        self.end_offset.append_value(row.end_offset as i64);
        self.kind.append_value(row.kind);
        self.timestamp.append_value(i64::from(header.timestamp) * 1_000_000);
        self.server_id.append_value(i64::from(header.server_id));
        self.size.append_value(i64::from(header.size));
        self.flags.append_value(i64::from(header.flags));
        self.gtid.append_option(Some(row.gtid).filter(|gtid| !gtid.is_empty()));
        self.database.append_option(row.database);
        self.table.append_option(row.table);
        self.changes.append_option(row.rows.map(i64::from));
        self.text.append_option(row.text);
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
            Arc::new(self.kind.finish()),
            Arc::new(self.timestamp.finish().with_timezone("UTC")),
            Arc::new(self.server_id.finish()),
            Arc::new(self.size.finish()),
            Arc::new(self.flags.finish()),
            Arc::new(self.gtid.finish()),
            Arc::new(self.database.finish()),
            Arc::new(self.table.finish()),
            Arc::new(self.changes.finish()),
            Arc::new(self.text.finish()),
        ];
        let record = RecordBatch::try_new(Arc::new(schema()), columns)
            .map_err(|error| malformed(format!("columns of one batch disagree: {error}")))?;
        Ok(Some(Batch { database: "".into(), table: "".into(), schema_version: 0, record, position }))
    }
}

/// Returns the schema of event rows.
pub fn schema() -> Schema {
    Schema::new(vec![
        Field::new("file", DataType::Utf8, false),
        Field::new("offset", DataType::Int64, false),
        Field::new("end_offset", DataType::Int64, false),
        Field::new("type", DataType::Utf8, false),
        Field::new("timestamp", DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())), false),
        Field::new("server_id", DataType::Int64, false),
        Field::new("size", DataType::Int64, false),
        Field::new("flags", DataType::Int64, false),
        Field::new("gtid", DataType::Utf8, true),
        Field::new("database", DataType::Utf8, true),
        Field::new("table", DataType::Utf8, true),
        Field::new("rows", DataType::Int64, true),
        Field::new("text", DataType::Utf8, true),
    ])
}
