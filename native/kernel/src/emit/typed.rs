//! The rows of each table in typed Arrow columns.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{Field, Schema};

use super::rows::{ChangeFilter, RowsView, SourceColumn};
use super::system::{self, SystemColumns, TableRef};
use crate::column::{json, ColumnBuilder, Kind, Value};
use crate::cursor::Cursor;
use crate::emit::{Batch, TransactionView};
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::rows::{self, bit, PartialHead};
use crate::event::{Change, EventKind};

/// A column of a batch.
#[derive(Debug, Clone, PartialEq)]
struct Target {
    name: Arc<str>,
    kind: Kind,
}

/// How the rows of a table map to the columns of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    sources: Vec<SourceColumn>,
    /// For each source column, the index of its batch column.
    target_of: Vec<Option<usize>>,
    targets: Vec<Target>,
    /// Batch columns that rows of this definition do not have.
    missing: Vec<usize>,
    /// Whether source and batch columns are the same, in the same order.
    straight: bool,
    system: Vec<&'static str>,
    json_columns: usize,
}

impl Plan {
    /// Plans the mapping for a definition of a table.
    ///
    /// `wanted` names the columns to decode, including system columns; `None` means all. `declared` fixes the columns
    /// of the batch: a declared column that is missing from the rows is null and reported as absent. A column with a
    /// different Arrow type raises `SchemaChanged`. So does a column that is not declared, unless `wanted` selects the
    /// columns.
    pub fn new(
        sources: Vec<SourceColumn>,
        wanted: Option<&[String]>,
        declared: Option<Vec<SourceColumn>>,
    ) -> Result<Plan> {
        let is_wanted = |name: &str| wanted.is_none_or(|wanted| wanted.iter().any(|column| column == name));
        let targets: Vec<Target> = declared
            .as_deref()
            .unwrap_or(&sources)
            .iter()
            .filter(|column| is_wanted(&column.name))
            .map(|column| Target { name: column.name.clone(), kind: column.kind.clone() })
            .collect();
        let mut target_of = Vec::with_capacity(sources.len());
        for source in &sources {
            let target = targets.iter().position(|target| target.name == source.name);
            if let Some(target) = target.and_then(|at| targets.get(at)) {
                if target.kind.arrow_type() != source.kind.arrow_type() {
                    return Err(changed(&format!(
                        "column `{}` was {} and is {}",
                        source.name,
                        target.kind.type_text(),
                        source.kind.type_text()
                    )));
                }
            } else if let Some(declared) = &declared {
                // A caller that names the columns does not need any others.
                let is_undeclared = wanted.is_none() && !declared.iter().any(|column| column.name == source.name);
                if is_undeclared {
                    return Err(changed(&format!("column `{}` was added", source.name)));
                }
            }
            target_of.push(target);
        }
        let missing = (0..targets.len()).filter(|at| !target_of.contains(&Some(*at))).collect();
        let in_place = target_of.iter().enumerate().all(|(at, target)| *target == Some(at));
        Ok(Plan {
            straight: in_place && targets.len() == sources.len(),
            json_columns: sources.iter().filter(|column| matches!(column.kind, Kind::Json { .. })).count(),
            system: system::ALL.iter().copied().filter(|name| is_wanted(name)).collect(),
            sources,
            target_of,
            targets,
            missing,
        })
    }

    /// Returns the fields of the batch.
    pub fn fields(&self) -> Vec<Field> {
        self.targets.iter().map(|target| Field::new(&*target.name, target.kind.arrow_type(), true)).collect()
    }

    fn absent(&self, present: &[u8]) -> Vec<Arc<str>> {
        let columns = self.sources.iter().zip(&self.target_of).enumerate();
        let lacking = columns.filter(|(index, (_, target))| target.is_some() && !bit(present, *index));
        let lacking = lacking.map(|(_, (source, _))| source.name.clone());
        let missing = self.missing.iter().filter_map(|&at| self.targets.get(at)).map(|target| target.name.clone());
        lacking.chain(missing).collect()
    }
}

fn changed(what: &str) -> Error {
    Error::new(ErrorKind::SchemaChanged, what).hint(
        "start the query again: it takes up the table's newest definition; for rows that are older than a dropped \
         column, name the columns to read with the option `columns`",
    )
}

/// The rows of a table with the same definition.
pub struct TableBatch {
    /// The table and its schema version.
    pub table: TableRef,
    plan: Plan,
    builders: Vec<ColumnBuilder>,
    system: SystemColumns,
    /// Whether the builders have reserved memory for this batch.
    begun: bool,
    /// Number of rows of complete transactions.
    committed: usize,
}

/// The columns in the images of an event.
#[derive(Debug, Clone, Copy)]
struct Present<'a> {
    bits: &'a [u8],
    count: usize,
    /// Whether all columns are present, and source and batch columns are the same.
    straight: bool,
}

impl<'a> Present<'a> {
    #[inline]
    fn new(bits: &'a [u8], plan: &Plan) -> Present<'a> {
        let count = rows::count(bits, plan.sources.len());
        Present { bits, count, straight: plan.straight && count == plan.sources.len() }
    }
}

impl TableBatch {
    /// Starts without rows.
    pub fn new(instance: &Arc<str>, table: TableRef, plan: Plan) -> TableBatch {
        TableBatch {
            builders: plan.targets.iter().map(|target| ColumnBuilder::new(&target.kind)).collect(),
            system: SystemColumns::new(instance.clone()),
            table,
            plan,
            begun: false,
            committed: 0,
        }
    }

    /// Whether rows of this definition fit into this batch.
    pub fn takes(&self, table: &TableRef, plan: &Plan) -> bool {
        self.table == *table && self.plan == *plan
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

    /// Adds the images of an event and returns how many changes it has.
    pub fn add(&mut self, transaction: &TransactionView, rows: &RowsView<'_>, filter: ChangeFilter) -> Result<u32> {
        let change = rows.kind.change().ok_or_else(|| malformed("no rows event"))?;
        let width = self.plan.sources.len();
        if rows.head.width != width {
            let message = format!("a rows event of {} columns for a table map of {width}", rows.head.width);
            return Err(malformed(message));
        }
        if !self.begun {
            self.builders.iter_mut().for_each(ColumnBuilder::begin);
            self.begun = true;
        }
        let present = Present::new(rows.head.present, &self.plan);
        let present_after = Present::new(rows.head.present_after, &self.plan);
        let images = filter.images(change);
        let absent = [self.absent_list(present), self.absent_list(present_after)];
        if let Some(images) = images {
            self.system.begin_run(transaction, &self.table, rows.event, images, rows.row_first, absent);
        }
        let skipping = images.is_none();
        let partial = (rows.kind == EventKind::PartialUpdateRows).then_some(self.plan.json_columns);
        let mut cursor = Cursor::new(rows.images);
        let mut changes = 0u32;
        while !cursor.is_empty() {
            let before = cursor.remaining();
            let passed = skipping || rows.row_first + changes < rows.resume_rows;
            match change {
                Change::Insert | Change::Delete => self.image(&mut cursor, present, !passed)?,
                Change::Update if partial.is_some() => {
                    self.partial_update(&mut cursor, rows, !passed && filter.before, !passed && filter.after)?;
                }
                Change::Update => {
                    self.image(&mut cursor, present, !passed && filter.before)?;
                    self.image(&mut cursor, present_after, !passed && filter.after)?;
                }
            }
            if cursor.remaining() == before {
                return Err(malformed("row images without bytes"));
            }
            changes += 1;
        }
        Ok(changes)
    }

    fn absent_list(&mut self, present: Present<'_>) -> u32 {
        if present.count == self.plan.sources.len() && self.plan.missing.is_empty() {
            return 0;
        }
        let absent = self.plan.absent(present.bits);
        self.system.absent_list(absent)
    }

    /// Reads an image into the columns, or skips it.
    #[inline]
    fn image(&mut self, cursor: &mut Cursor<'_>, present: Present<'_>, wanted: bool) -> Result<()> {
        let nulls = cursor.take(present.count.div_ceil(8))?;
        if wanted && present.straight {
            return self.straight_image(cursor, nulls);
        }
        let plan = &self.plan;
        let mut at = 0;
        for (index, (source, target)) in plan.sources.iter().zip(&plan.target_of).enumerate() {
            let builder = match target {
                Some(target) if wanted => self.builders.get_mut(*target),
                _ => None,
            };
            if !bit(present.bits, index) {
                if let Some(builder) = builder {
                    builder.append_null();
                }
                continue;
            }
            let null = bit(nulls, at);
            at += 1;
            match builder {
                Some(builder) if null => builder.append_null(),
                Some(builder) => match builder.append_from(&source.kind, cursor) {
                    Ok(None) => {}
                    Ok(Some(text)) => self.system.note_unrepresentable(&source.name, text),
                    Err(error) => return Err(in_column(error, &source.name)),
                },
                None if null => {}
                None => source.kind.skip(cursor)?,
            }
        }
        self.end_row(wanted);
        Ok(())
    }

    /// Reads the most common kind of image: all columns are present, and source and batch columns are the same.
    #[inline]
    fn straight_image(&mut self, cursor: &mut Cursor<'_>, nulls: &[u8]) -> Result<()> {
        // No other call refers to this copy, so it stays in registers.
        let mut images = *cursor;
        let (mut null_bytes, mut builders) = (nulls.iter(), self.builders.iter_mut());
        // The NULL bits of the next columns, below a bit that ends them.
        let mut null_bits = 1u32;
        for source in &self.plan.sources {
            let Some(builder) = builders.next() else { break };
            if null_bits == 1 {
                null_bits = 0x100 | u32::from(null_bytes.next().copied().unwrap_or(0));
            }
            let is_null = null_bits & 1 == 1;
            null_bits >>= 1;
            if is_null {
                builder.append_null();
                continue;
            }
            match builder.append_from(&source.kind, &mut images) {
                Ok(None) => {}
                Ok(Some(text)) => self.system.note_unrepresentable(&source.name, text),
                Err(error) => return Err(in_column(error, &source.name)),
            }
        }
        *cursor = images;
        self.system.add_row();
        Ok(())
    }

    #[inline]
    fn end_row(&mut self, wanted: bool) {
        if !wanted {
            return;
        }
        for &missing in &self.plan.missing {
            if let Some(builder) = self.builders.get_mut(missing) {
                builder.append_null();
            }
        }
        self.system.add_row();
    }

    /// Reads an update whose JSON columns may be partial. Partial values are applied to the before image's documents.
    fn partial_update(
        &mut self,
        cursor: &mut Cursor<'_>,
        rows: &RowsView<'_>,
        before: bool,
        after: bool,
    ) -> Result<()> {
        let mut peek = *cursor;
        let documents = self.json_documents(&mut peek, rows.head.present)?;
        self.image(cursor, Present::new(rows.head.present, &self.plan), before)?;
        let present = rows.head.present_after;
        let partial = PartialHead::read(cursor, self.plan.json_columns)?;
        let plan = &self.plan;
        let nulls = cursor.take(rows::count(present, plan.sources.len()).div_ceil(8))?;
        let mut at = 0;
        let mut json_index = 0;
        for (index, (source, target)) in plan.sources.iter().zip(&plan.target_of).enumerate() {
            let is_json = matches!(source.kind, Kind::Json { .. });
            let difference = is_json && bit(partial.partial, json_index);
            json_index += usize::from(is_json);
            let builder = match target {
                Some(target) if after => self.builders.get_mut(*target),
                _ => None,
            };
            let is_present = bit(present, index);
            let null = is_present && bit(nulls, at);
            at += usize::from(is_present);
            let appended = match builder {
                None if is_present && !null => source.kind.skip(cursor).map(|()| None),
                None => Ok(None),
                Some(builder) if !is_present || null => {
                    builder.append_null();
                    Ok(None)
                }
                Some(builder) if difference => {
                    let document = documents.get(index).copied().flatten().ok_or_else(|| {
                        Error::new(ErrorKind::EventUnsupported, "a JSON difference without the document before")
                            .hint("SET GLOBAL binlog_row_value_options = '' or binlog_row_image = FULL on the server")
                    });
                    let Kind::Json { prefix } = source.kind else { return Err(malformed("a difference")) };
                    let text = document.and_then(|document| json::apply_partial(document, cursor.prefixed(prefix)?));
                    text.and_then(|text| builder.append(&source.kind, Value::JsonText(text)))
                }
                Some(builder) => builder.append_from(&source.kind, cursor),
            };
            if let Some(text) = appended.map_err(|error| in_column(error, &source.name))? {
                self.system.note_unrepresentable(&source.name, text);
            }
        }
        self.end_row(after);
        Ok(())
    }

    /// Returns the JSON documents of an image, by column.
    fn json_documents<'a>(&self, cursor: &mut Cursor<'a>, present: &[u8]) -> Result<Vec<Option<&'a [u8]>>> {
        let mut documents = vec![None; self.plan.sources.len()];
        let nulls = cursor.take(rows::count(present, self.plan.sources.len()).div_ceil(8))?;
        let mut at = 0;
        for (index, (source, document)) in self.plan.sources.iter().zip(&mut documents).enumerate() {
            if !bit(present, index) {
                continue;
            }
            if !bit(nulls, at) {
                match source.kind.json_prefix() {
                    Some(prefix) => *document = Some(cursor.prefixed(prefix)?),
                    None => source.kind.skip(cursor)?,
                }
            }
            at += 1;
        }
        Ok(documents)
    }

    /// Closes the batch and starts an empty batch. With `all`, the closed batch includes the rows of the open
    /// transaction. Otherwise, these rows are dropped.
    pub fn finish(&mut self, all: bool, position: (Arc<str>, u64)) -> Result<Option<Batch>> {
        let rows = if all { self.system.rows() } else { self.committed };
        self.committed = 0;
        if self.system.rows() == 0 {
            // Free the memory: other tables may need it before this table receives rows again.
            self.builders.iter_mut().for_each(ColumnBuilder::rest);
            self.system.rest();
            self.begun = false;
            return Ok(None);
        }
        self.begun = false;
        let mut fields = self.plan.fields();
        let mut columns: Vec<ArrayRef> =
            self.builders.iter_mut().map(|builder| builder.finish().slice(0, rows)).collect();
        for (field, column) in self.system.finish(&self.plan.system, rows) {
            fields.push(field);
            columns.push(column);
        }
        if rows == 0 {
            return Ok(None);
        }
        let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(rows));
        let record = RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)
            .map_err(|error| malformed(format!("columns of one batch disagree: {error}")))?;
        Ok(Some(Batch {
            database: self.table.database.clone(),
            table: self.table.table.clone(),
            schema_version: self.table.schema_version,
            record,
            position,
        }))
    }
}

#[cold]
fn in_column(error: Error, name: &str) -> Error {
    error.within(&format!("column `{name}`"))
}
