//! Changes of all tables in one format: the system columns, the table's definition, and the raw images.
//!
//! An image is self-contained: a bitmap of its columns, then the bytes of the row image as logged (null bits and
//! values). The definition is JSON text that describes how to read it.

use std::sync::Arc;

use arrow_array::{ArrayRef, BinaryArray, RecordBatch, StringArray};
use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Schema};

use super::rows::{ChangeFilter, RowsView};
use super::system::{self, Images, SystemColumns, TableRef};
use crate::column::Kind;
use crate::cursor::Cursor;
use crate::emit::{Batch, TransactionView};
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::rows::{skip_image, PartialHead};
use crate::event::{Change, EventKind};

/// The concatenated images from before the changes, or from after them.
#[derive(Default)]
struct ImageColumn {
    offsets: Vec<i32>,
    bytes: Vec<u8>,
    present: Vec<bool>,
}

impl ImageColumn {
    fn push(&mut self, image: Option<(&[u8], &[u8])>) -> Result<()> {
        if let Some((present, image)) = image {
            self.bytes.extend_from_slice(present);
            self.bytes.extend_from_slice(image);
        }
        self.present.push(image.is_some());
        let end = i32::try_from(self.bytes.len())
            .map_err(|_| Error::new(ErrorKind::LimitExceeded, "row images of one batch over 2 GiB"))?;
        self.offsets.push(end);
        Ok(())
    }

    fn finish(&mut self, rows: usize) -> BinaryArray {
        let mut offsets = std::mem::take(&mut self.offsets);
        offsets.insert(0, 0);
        let nulls = NullBuffer::from(std::mem::take(&mut self.present));
        let bytes = Buffer::from_vec(std::mem::take(&mut self.bytes));
        BinaryArray::new(OffsetBuffer::new(ScalarBuffer::from(offsets)), bytes, Some(nulls)).slice(0, rows)
    }
}

/// A table that envelope rows refer to.
#[derive(Debug, Clone)]
pub struct EnvelopeTable {
    /// The identity of the table.
    pub table: TableRef,
    /// The definition as JSON text.
    pub definition: Arc<str>,
    /// How to skip the table's columns.
    pub kinds: Arc<[Kind]>,
}

/// Changes of all tables.
pub struct EnvelopeBatch {
    system: SystemColumns,
    definitions: Vec<(Arc<str>, u32)>,
    before: ImageColumn,
    after: ImageColumn,
    committed: usize,
}

impl EnvelopeBatch {
    /// Starts without rows.
    pub fn new(instance: &Arc<str>) -> EnvelopeBatch {
        EnvelopeBatch {
            system: SystemColumns::new(instance.clone()),
            definitions: Vec::new(),
            before: ImageColumn::default(),
            after: ImageColumn::default(),
            committed: 0,
        }
    }

    /// Number of rows so far.
    pub fn rows(&self) -> usize {
        self.system.rows()
    }

    /// Whether all rows belong to complete transactions.
    pub fn is_whole(&self) -> bool {
        self.committed == self.system.rows()
    }

    /// Marks all rows as belonging to complete transactions.
    pub fn commit(&mut self) {
        self.committed = self.system.rows();
    }

    /// Adds the images of an event and returns the number of changes in it.
    pub fn add(
        &mut self,
        transaction: &TransactionView,
        table: &EnvelopeTable,
        rows: &RowsView<'_>,
        filter: ChangeFilter,
    ) -> Result<u32> {
        let change = rows.kind.change().ok_or_else(|| malformed("no rows event"))?;
        if rows.head.width != table.kinds.len() {
            return Err(malformed("a rows event and its table map differ in width"));
        }
        let wanted = filter.images(change).is_some();
        if wanted {
            self.system.begin_run(transaction, &table.table, rows.event, Images::Each(change), rows.row_first, [0, 0]);
        }
        let json_columns = table.kinds.iter().filter(|kind| matches!(kind, Kind::Json { .. })).count();
        let partial = rows.kind == EventKind::PartialUpdateRows;
        let mut cursor = Cursor::new(rows.images);
        let mut changes = 0u32;
        let mut added = 0u32;
        while !cursor.is_empty() {
            let start = cursor.remaining();
            let first = image(&mut cursor, &table.kinds, rows.head.present)?;
            let second = match change {
                Change::Update if partial => {
                    let mut peek = cursor;
                    if !PartialHead::read(&mut peek, json_columns)?.partial.iter().all(|&bits| bits == 0) {
                        return Err(Error::new(ErrorKind::EventUnsupported, "a JSON difference in envelope rows")
                            .hint(
                            "name the table in `tables` to read it typed, or SET GLOBAL binlog_row_value_options = ''",
                        ));
                    }
                    let used = cursor.remaining() - peek.remaining();
                    cursor.skip(used)?;
                    Some(image(&mut cursor, &table.kinds, rows.head.present_after)?)
                }
                Change::Update => Some(image(&mut cursor, &table.kinds, rows.head.present_after)?),
                Change::Insert | Change::Delete => None,
            };
            if cursor.remaining() == start {
                return Err(malformed("row images without bytes"));
            }
            let is_skipped = !wanted || rows.row_first + changes < rows.resume_rows;
            changes += 1;
            if is_skipped {
                continue;
            }
            let first = (rows.head.present, first);
            let (before, after) = match (change, second) {
                (Change::Insert, _) => (None, Some(first)),
                (Change::Delete, _) => (Some(first), None),
                (Change::Update, second) => (Some(first), second.map(|image| (rows.head.present_after, image))),
            };
            self.before.push(before)?;
            self.after.push(after)?;
            self.system.add_row();
            added += 1;
        }
        if added > 0 {
            match self.definitions.last_mut() {
                Some((definition, rows)) if Arc::ptr_eq(definition, &table.definition) => *rows += added,
                _ => self.definitions.push((table.definition.clone(), added)),
            }
        }
        Ok(changes)
    }

    /// Closes the batch and starts an empty batch, like `TableBatch::finish`.
    pub fn finish(&mut self, all: bool, position: (Arc<str>, u64)) -> Result<Option<Batch>> {
        let rows = if all { self.system.rows() } else { self.committed };
        self.committed = 0;
        let definitions = std::mem::take(&mut self.definitions);
        let repeated = definitions.iter().flat_map(|(text, count)| (0..*count).map(move |_| Some(&**text)));
        let definitions: StringArray = repeated.take(rows).collect();
        let columns: Vec<ArrayRef> =
            vec![Arc::new(definitions), Arc::new(self.before.finish(rows)), Arc::new(self.after.finish(rows))];
        let (mut fields, mut arrays): (Vec<Field>, Vec<ArrayRef>) =
            self.system.finish(&system::ALL, rows).into_iter().unzip();
        fields.extend(own_fields());
        arrays.extend(columns);
        if rows == 0 {
            return Ok(None);
        }
        let record = RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays)
            .map_err(|error| malformed(format!("columns of one batch disagree: {error}")))?;
        Ok(Some(Batch { database: "".into(), table: "".into(), schema_version: 0, record, position }))
    }
}

fn image<'a>(cursor: &mut Cursor<'a>, kinds: &[Kind], present: &[u8]) -> Result<&'a [u8]> {
    let start = *cursor;
    skip_image(cursor, kinds, present, None)?;
    let mut whole = start;
    whole.take(start.remaining() - cursor.remaining())
}

fn own_fields() -> Vec<Field> {
    vec![
        Field::new("definition", DataType::Utf8, false),
        Field::new("before", DataType::Binary, true),
        Field::new("after", DataType::Binary, true),
    ]
}

/// Returns the schema of envelope rows.
pub fn schema() -> Schema {
    let mut fields = system::fields();
    fields.extend(own_fields());
    Schema::new(fields)
}
