//! Changes of all tables as messages of a dialect: a growing buffer of bytes, and for each message the information that
//! a server needs to deliver it without parsing it.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, DictionaryArray, Int16Array, Int32Array, Int64Array, Int8Array, LargeBinaryArray, RecordBatch,
    StringArray,
};
use arrow_buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Schema};

use crate::column::spare::Spares;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::Change;

/// The maximum length of a message: the limit of protobuf.
const MESSAGE_BYTES_MAX: usize = 1 << 31;

/// Maximum number of returned buffers that are kept for reuse.
const BUFFERS_KEPT_MAX: usize = 4;

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i8)]
#[allow(missing_docs)]
pub enum MessageKind {
    Insert = 0,
    Update = 1,
    Delete = 2,
    /// A statement, such as DDL.
    Statement = 3,
    /// A transaction begins.
    Begin = 4,
    /// A transaction ends.
    End = 5,
    Heartbeat = 6,
}

impl From<Change> for MessageKind {
    fn from(change: Change) -> MessageKind {
        match change {
            Change::Insert => MessageKind::Insert,
            Change::Update => MessageKind::Update,
            Change::Delete => MessageKind::Delete,
        }
    }
}

/// A transaction, and the number of its messages so far: for all tables, and for the current table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct TransactionCounts {
    pub commit_version: i64,
    pub total: u64,
    pub of_table: u64,
}

/// The messages of the current batch.
pub struct Messages {
    /// The buffer in which the current message is written.
    pub value: Vec<u8>,
    /// A scratch buffer for a part of a message that must be computed before the text that precedes it. The buffer is
    /// empty after use.
    pub scratch: Vec<u8>,
    /// A second scratch buffer, for the rows of a message.
    pub data: Vec<u8>,
    /// Counts messages by transaction, for dialects that number them; None if the dialect does not number them.
    pub counts: Option<TransactionCounts>,
    pub(super) ends: Vec<i64>,
    pub(super) table: Vec<i32>,
    pub(super) kind: Vec<i8>,
    pub(super) slot: Vec<i16>,
    pub(super) rows: Vec<i32>,
    pub(super) commit_version: Vec<i64>,
    pub(super) end_offset: Vec<i64>,
    pub(super) has_end: Vec<bool>,
    pub(super) tables: Vec<Arc<str>>,
    pub(super) current: (i32, i64),
    pub(super) spares: Spares<u8>,
    /// Number of messages of complete transactions.
    pub(super) committed: usize,
    /// Number of changes in messages of the open transaction, including those emitted before a reconnect.
    pub(super) changes: u32,
}

impl Messages {
    pub(super) fn new() -> Messages {
        Messages {
            value: Vec::new(),
            scratch: Vec::new(),
            data: Vec::new(),
            counts: None,
            ends: Vec::new(),
            table: Vec::new(),
            kind: Vec::new(),
            slot: Vec::new(),
            rows: Vec::new(),
            commit_version: Vec::new(),
            end_offset: Vec::new(),
            has_end: Vec::new(),
            tables: vec!["".into()],
            current: (0, 0),
            spares: Spares::new(BUFFERS_KEPT_MAX),
            committed: 0,
            changes: 0,
        }
    }

    /// Number of messages.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no messages.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// For each message from number `first` on, returns its kind, its range in `value`, and its number of changes.
    pub(super) fn from(&self, first: usize) -> impl Iterator<Item = (i8, std::ops::Range<usize>, i32)> + '_ {
        let offset = |end: i64| usize::try_from(end).unwrap_or(0);
        let start = first.checked_sub(1).and_then(|last| self.ends.get(last)).map_or(0, |end| offset(*end));
        let messages = self.ends.iter().zip(&self.kind).zip(&self.rows).skip(first);
        messages.scan(start, move |start, ((end, kind), rows)| {
            let from = std::mem::replace(start, offset(*end));
            Some((*kind, from..offset(*end), *rows))
        })
    }

    /// Removes all messages.
    pub(super) fn clear(&mut self) {
        self.truncate(0);
    }

    /// Number of changes in messages of the open transaction. Statements and heartbeats are not changes.
    pub fn changes(&self) -> u32 {
        self.changes
    }

    /// Closes the message whose bytes have been written to `value` since the previous message. `slot` is `SLOT_ALL` for
    /// a message that every shard must see. `rows` is the message's number of changes.
    #[inline]
    pub fn close(&mut self, kind: MessageKind, slot: i16, rows: u32) -> Result<()> {
        self.ends.push(self.value.len() as i64);
        self.table.push(self.current.0);
        self.kind.push(kind as i8);
        self.slot.push(slot);
        self.rows.push(rows as i32);
        self.commit_version.push(self.current.1);
        self.end_offset.push(0);
        self.has_end.push(false);
        if matches!(kind, MessageKind::Insert | MessageKind::Update | MessageKind::Delete) {
            self.changes = self.changes.saturating_add(rows);
        }
        Ok(())
    }

    /// Counts the next message of a transaction. Returns the counts including this message; None if messages are not
    /// counted.
    pub fn count(&mut self, commit_version: i64) -> Option<TransactionCounts> {
        let counts = self.counts.as_mut()?;
        if counts.commit_version != commit_version {
            *counts = TransactionCounts { commit_version, ..TransactionCounts::default() };
        }
        counts.total += 1;
        counts.of_table += 1;
        Some(*counts)
    }

    /// Sets the table of the messages that follow, `database.table`; "" if they have no table.
    pub fn set_table(&mut self, name: &Arc<str>) {
        let same = usize::try_from(self.current.0).ok().and_then(|at| self.tables.get(at));
        if same.is_some_and(|same| Arc::ptr_eq(same, name)) {
            return;
        }
        let at = match self.tables.iter().position(|known| **known == **name) {
            Some(at) => at,
            None => {
                self.tables.push(name.clone());
                self.tables.len() - 1
            }
        };
        self.current.0 = i32::try_from(at).unwrap_or(0);
    }

    /// Number of the open transaction's changes in batches that were already returned.
    pub fn changes_handed_out(&self) -> u32 {
        let open_changes: i32 = self.rows.iter().skip(self.committed).sum();
        self.changes.saturating_sub(open_changes.unsigned_abs())
    }

    /// Rewrites the messages of the open transaction that have not been taken yet. `write` receives each message, its
    /// kind, and whether it is the last message with rows. Its output replaces the message.
    pub fn rewrite_open(&mut self, mut write: impl FnMut(&[u8], i8, bool, &mut Vec<u8>)) {
        let first = self.committed.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        let Some(mut start) = usize::try_from(first).ok().filter(|first| *first <= self.value.len()) else { return };
        let mut old = std::mem::take(&mut self.scratch);
        old.clear();
        old.extend_from_slice(self.value.get(start..).unwrap_or_default());
        self.value.truncate(start);
        let last = self.rows.iter().rposition(|rows| *rows > 0);
        let mut rest = old.as_slice();
        let messages = self.ends.iter_mut().zip(&self.kind).enumerate().skip(self.committed);
        for (at, (end, kind)) in messages {
            let length = usize::try_from(*end).unwrap_or(start).saturating_sub(start);
            start += length;
            let (message, after) = rest.split_at_checked(length).unwrap_or((rest, &[]));
            rest = after;
            write(message, *kind, last == Some(at), &mut self.value);
            *end = self.value.len() as i64;
        }
        old.clear();
        self.scratch = old;
    }

    /// Marks the last message as the end of its transaction.
    pub(super) fn mark_end(&mut self, offset: u64) {
        if let (Some(end), Some(has_end)) = (self.end_offset.last_mut(), self.has_end.last_mut()) {
            (*end, *has_end) = (offset as i64, true);
        }
    }

    pub(super) fn check(&self, start: usize) -> Result<()> {
        if self.value.len().saturating_sub(start) < MESSAGE_BYTES_MAX {
            return Ok(());
        }
        Err(Error::new(ErrorKind::LimitExceeded, "one rows event comes to a message of 2 GiB or more")
            .hint("SET GLOBAL binlog_row_event_max_size on the server to less, or read the table typed"))
    }

    /// Takes the first `count` messages; the remaining messages stay.
    pub(super) fn take(&mut self, count: usize) -> Result<Option<RecordBatch>> {
        if count == 0 {
            return Ok(None);
        }
        let bytes = count.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        let left = self.value.get(usize::try_from(bytes).unwrap_or(0)..).unwrap_or_default();
        let mut next = self.spares.take();
        next.extend_from_slice(left);
        let mut value = std::mem::replace(&mut self.value, next);
        value.truncate(usize::try_from(bytes).unwrap_or(0));
        let ends_left: Vec<i64> = self.ends.iter().skip(count).map(|end| end - bytes).collect();
        let mut offsets = Vec::with_capacity(count + 1);
        offsets.push(0);
        offsets.extend(self.ends.iter().take(count));
        self.ends = ends_left;
        let value =
            LargeBinaryArray::new(OffsetBuffer::new(ScalarBuffer::from(offsets)), self.spares.lend(value), None);
        let has_end = NullBuffer::from(first(&mut self.has_end, count));
        let end_offset = Int64Array::new(ScalarBuffer::from(first(&mut self.end_offset, count)), Some(has_end));
        let names: StringArray = self.tables.iter().map(|name| Some(&**name)).collect();
        let table = DictionaryArray::try_new(Int32Array::from(first(&mut self.table, count)), Arc::new(names))
            .map_err(|error| malformed(format!("tables of one batch: {error}")))?;
        let columns: Vec<ArrayRef> = vec![
            Arc::new(value),
            Arc::new(table),
            Arc::new(Int8Array::from(first(&mut self.kind, count))),
            Arc::new(Int16Array::from(first(&mut self.slot, count))),
            Arc::new(Int32Array::from(first(&mut self.rows, count))),
            Arc::new(Int64Array::from(first(&mut self.commit_version, count))),
            Arc::new(end_offset),
        ];
        if self.ends.is_empty() {
            self.tables.truncate(1);
            self.current.0 = 0;
        }
        let record = RecordBatch::try_new(Arc::new(schema()), columns)
            .map_err(|error| malformed(format!("columns of one batch disagree: {error}")))?;
        Ok(Some(record))
    }

    pub(super) fn truncate(&mut self, count: usize) {
        let bytes = count.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        self.value.truncate(usize::try_from(bytes).unwrap_or(0));
        self.ends.truncate(count);
        self.table.truncate(count);
        self.kind.truncate(count);
        self.slot.truncate(count);
        self.rows.truncate(count);
        self.commit_version.truncate(count);
        self.end_offset.truncate(count);
        self.has_end.truncate(count);
    }
}

/// Splits off the first values.
fn first<T>(values: &mut Vec<T>, count: usize) -> Vec<T> {
    let rest = values.split_off(count.min(values.len()));
    std::mem::replace(values, rest)
}

/// Returns the schema of messages.
pub fn schema() -> Schema {
    let table = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    Schema::new(vec![
        Field::new("value", DataType::LargeBinary, false),
        Field::new("table", table, false),
        Field::new("kind", DataType::Int8, false),
        Field::new("slot", DataType::Int16, false),
        Field::new("rows", DataType::Int32, false),
        Field::new("commit_version", DataType::Int64, false),
        Field::new("end_offset", DataType::Int64, true),
    ])
}
