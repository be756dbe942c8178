//! The system columns of every change.
//!
//! Their values rarely differ from row to row. While rows arrive, only one record is kept for each rows event, and the
//! columns are built when the batch closes.

use std::sync::Arc;

use arrow_array::builder::{ListBuilder, MapBuilder, MapFieldNames, StringBuilder};
use arrow_array::{Array, ArrayRef, Int32Array, Int64Array, StringArray, StructArray, TimestampMicrosecondArray};
use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Fields, TimeUnit};

use crate::column::spare::Spares;
use crate::emit::constants::Constants;
use crate::emit::TransactionView;
use crate::event::Change;

/// Names of the system columns, in their order.
pub const CHANGE_TYPE: &str = "_change_type";
/// See [`CHANGE_TYPE`].
pub const COMMIT_VERSION: &str = "_commit_version";
/// See [`CHANGE_TYPE`].
pub const COMMIT_TIMESTAMP: &str = "_commit_timestamp";
/// See [`CHANGE_TYPE`].
pub const METADATA: &str = "_metadata";

/// All system columns.
pub const ALL: [&str; 4] = [CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP, METADATA];

/// The identity of a table, repeated on each of its rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRef {
    /// The database.
    pub database: Arc<str>,
    /// The table.
    pub table: Arc<str>,
    /// A number that increases with every change of the table's definition.
    pub schema_version: i32,
}

/// The images in a run of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Images {
    /// A row for each change. The row's operation is the kind of change.
    Each(Change),
    /// Two rows for each update, before and after.
    Pairs,
    /// Only the rows before an update.
    Before,
    /// Only the rows after an update.
    After,
}

impl Images {
    /// Returns the names of rows with an even and with an odd index in their run.
    fn names(self) -> [&'static str; 2] {
        match self {
            Images::Each(Change::Insert) => ["insert"; 2],
            Images::Each(Change::Update) => ["update"; 2],
            Images::Each(Change::Delete) => ["delete"; 2],
            Images::Before => ["update_preimage"; 2],
            Images::After => ["update_postimage"; 2],
            Images::Pairs => ["update_preimage", "update_postimage"],
        }
    }
}

/// The rows of an event.
#[derive(Debug, Clone)]
struct Run {
    rows: u32,
    images: Images,
    transaction: u32,
    table: u32,
    offset: i64,
    row_first: i32,
    server_id: i64,
    /// For the first and the second image, a reference to the list of columns that are missing from the image: the
    /// index of the list plus one, or 0 if no column is missing.
    absent: [u32; 2],
}

struct Commit {
    version: i64,
    timestamp_us: i64,
    thread_id: Option<i64>,
    gtid: std::ops::Range<usize>,
    file: u32,
}

/// Collects the values of runs, as the module's description explains.
pub struct SystemColumns {
    instance: Arc<str>,
    runs: Vec<Run>,
    rows: usize,
    commits: Vec<Commit>,
    gtids: String,
    files: Vec<Arc<str>>,
    tables: Vec<TableRef>,
    absent: Vec<Vec<Arc<str>>>,
    unrepresentable: Vec<Unrepresentable>,
    open: Option<i64>,
    constants: Constants,
    spares: SystemSpares,
}

/// The reusable memory of the columns.
struct SystemSpares {
    longs: Spares<i64>,
    ints: Spares<i32>,
    bytes: Spares<u8>,
}

impl SystemSpares {
    /// Keeps vectors for two batches. Each batch needs six vectors of eight-byte values, up to four of four-byte
    /// values, and two of text bytes.
    fn new() -> SystemSpares {
        SystemSpares { longs: Spares::new(12), ints: Spares::new(8), bytes: Spares::new(4) }
    }
}

/// The event of the next rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct EventView {
    /// Offset of the event in its file; for events inside a payload, the offset of the payload.
    pub offset: u64,
    /// Offset after the event; for events inside a payload, the offset after the payload.
    pub end_offset: u64,
    /// When the statement began, in seconds since 1970.
    pub timestamp: u32,
    /// The server that first made the change.
    pub server_id: u32,
    /// Whether several rows events of the transaction have this event's offset. That offset is the offset of the
    /// statement that commits the events.
    pub shared: bool,
}

impl SystemColumns {
    /// Starts without rows.
    pub fn new(instance: Arc<str>) -> SystemColumns {
        SystemColumns {
            instance,
            runs: Vec::new(),
            rows: 0,
            commits: Vec::new(),
            gtids: String::new(),
            files: Vec::new(),
            tables: Vec::new(),
            absent: Vec::new(),
            unrepresentable: Vec::new(),
            open: None,
            constants: Constants::default(),
            spares: SystemSpares::new(),
        }
    }

    /// Frees all memory, if no row arrived between two batches.
    pub fn rest(&mut self) {
        self.constants = Constants::default();
        self.spares = SystemSpares::new();
    }

    /// Opens a run of rows; `row_first` is the number of changes of the transaction before it.
    pub fn begin_run(
        &mut self,
        transaction: &TransactionView,
        table: &TableRef,
        event: EventView,
        images: Images,
        row_first: u32,
        absent: [u32; 2],
    ) {
        if self.open != Some(transaction.commit_version) {
            self.begin_transaction(transaction);
        }
        let table = match self.tables.iter().rposition(|known| known == table) {
            Some(at) => at,
            None => {
                self.tables.push(table.clone());
                self.tables.len() - 1
            }
        };
        self.runs.push(Run {
            rows: 0,
            images,
            transaction: self.commits.len().saturating_sub(1) as u32,
            table: table as u32,
            offset: event.offset as i64,
            row_first: row_first as i32,
            server_id: i64::from(event.server_id),
            absent,
        });
    }

    fn begin_transaction(&mut self, transaction: &TransactionView) {
        let start = self.gtids.len();
        transaction.gtid.write(&mut self.gtids);
        if self.files.last() != Some(&transaction.file) {
            self.files.push(transaction.file.clone());
        }
        self.commits.push(Commit {
            version: transaction.commit_version,
            timestamp_us: transaction.commit_us,
            thread_id: transaction.thread_id,
            gtid: start..self.gtids.len(),
            file: self.files.len().saturating_sub(1) as u32,
        });
        self.open = Some(transaction.commit_version);
    }

    /// Adds a row to the open run.
    #[inline]
    pub fn add_row(&mut self) {
        if let Some(run) = self.runs.last_mut() {
            run.rows += 1;
        }
        self.rows += 1;
    }

    /// Records the exact text of a value that its column cannot represent. It is in the open run's next row.
    pub fn note_unrepresentable(&mut self, column: &Arc<str>, text: String) {
        self.unrepresentable.push((self.rows, column.clone(), text));
    }

    /// Returns the number by which runs refer to a list of absent columns; 0 if no column is absent.
    pub fn absent_list(&mut self, columns: Vec<Arc<str>>) -> u32 {
        if columns.is_empty() {
            return 0;
        }
        let at = match self.absent.iter().rposition(|known| *known == columns) {
            Some(at) => at,
            None => {
                self.absent.push(columns);
                self.absent.len() - 1
            }
        };
        at as u32 + 1
    }

    /// Number of rows so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Builds the wanted columns for the first `rows` rows, and clears all rows.
    pub fn finish(&mut self, wanted: &[&str], rows: usize) -> Vec<(Field, ArrayRef)> {
        self.cut(rows);
        let mut columns = Vec::new();
        for name in ALL.into_iter().filter(|name| wanted.contains(name)) {
            let array: ArrayRef = match name {
                CHANGE_TYPE => self.change_types(),
                COMMIT_VERSION => Arc::new(Int64Array::new(self.each_commit(|commit| commit.version), None)),
                COMMIT_TIMESTAMP => {
                    let values = self.each_commit(|commit| commit.timestamp_us);
                    Arc::new(TimestampMicrosecondArray::new(values, None).with_timezone("UTC"))
                }
                _ => Arc::new(self.metadata()),
            };
            columns.push((Field::new(name, array.data_type().clone(), false), array));
        }
        self.start_again();
        columns
    }

    fn start_again(&mut self) {
        self.runs.clear();
        self.rows = 0;
        self.commits.clear();
        self.gtids.clear();
        self.files.clear();
        self.tables.clear();
        self.absent.clear();
        self.unrepresentable.clear();
        self.open = None;
    }

    fn cut(&mut self, rows: usize) {
        let mut left = rows;
        for run in &mut self.runs {
            run.rows = run.rows.min(left as u32);
            left -= run.rows as usize;
        }
        self.rows = rows - left;
        self.unrepresentable.retain(|(row, _, _)| *row < rows);
    }

    /// Returns a buffer with one number per row, which `value` returns for the row's run.
    fn each_run(&mut self, value: impl Fn(&Run) -> i64) -> ScalarBuffer<i64> {
        let mut out = self.spares.longs.take();
        out.reserve(self.rows);
        for run in &self.runs {
            out.extend(std::iter::repeat_n(value(run), run.rows as usize));
        }
        self.spares.longs.lend(out).into()
    }

    /// Returns a buffer with one number per row, which `value` returns for the row's transaction.
    fn each_commit(&mut self, value: impl Fn(&Commit) -> i64) -> ScalarBuffer<i64> {
        let mut out = self.spares.longs.take();
        out.reserve(self.rows);
        for run in &self.runs {
            let value = self.commits.get(run.transaction as usize).map_or(0, &value);
            out.extend(std::iter::repeat_n(value, run.rows as usize));
        }
        self.spares.longs.lend(out).into()
    }

    /// Whether a value is the same for all runs, so that the column is constant.
    fn is_same<T: PartialEq>(&self, value: impl Fn(&Run) -> T) -> bool {
        let mut runs = self.runs.iter().filter(|run| run.rows > 0).map(value);
        let first = runs.next();
        runs.all(|next| Some(next) == first)
    }

    /// Returns the run of the batch's first row, which represents all runs if a value is constant.
    fn first_run(&self) -> Option<Run> {
        self.runs.iter().find(|run| run.rows > 0).cloned()
    }

    /// Returns a text for each row; `texts` returns those of a run's rows with an even and with an odd index.
    fn each_text<'a>(&self, spares: (Vec<i32>, Vec<u8>), texts: impl Fn(&Run) -> [&'a str; 2]) -> (Vec<i32>, Vec<u8>) {
        let (mut offsets, mut bytes) = spares;
        offsets.reserve(self.rows + 1);
        offsets.push(0);
        for run in &self.runs {
            let [even, odd] = texts(run).map(str::as_bytes);
            for row in 0..run.rows {
                bytes.extend_from_slice(if row % 2 == 0 { even } else { odd });
                offsets.push(bytes.len() as i32);
            }
        }
        (offsets, bytes)
    }

    fn text_spares(&self) -> (Vec<i32>, Vec<u8>) {
        (self.spares.ints.take(), self.spares.bytes.take())
    }

    fn text_column(&mut self, (offsets, bytes): (Vec<i32>, Vec<u8>), nulls: Option<NullBuffer>) -> ArrayRef {
        Arc::new(strings(self.spares.ints.lend(offsets), self.spares.bytes.lend(bytes), nulls))
    }

    fn change_types(&mut self) -> ArrayRef {
        if let Some(first) = self.first_run().filter(|run| run.images != Images::Pairs) {
            if self.is_same(|run| run.images) {
                return self.constants.text(0, first.images.names()[0], self.rows);
            }
        }
        let texts = self.each_text(self.text_spares(), |run| run.images.names());
        self.text_column(texts, None)
    }

    fn gtid_column(&mut self) -> ArrayRef {
        let text = |run: &Run| {
            let range = self.commits.get(run.transaction as usize).map(|commit| commit.gtid.clone());
            range.and_then(|range| self.gtids.get(range)).unwrap_or_default()
        };
        let texts = self.each_text(self.text_spares(), |run| [text(run); 2]);
        let lacking = self.commits.iter().any(|commit| commit.gtid.is_empty());
        let nulls = lacking.then(|| {
            let present = self.runs.iter().map(|run| (run.rows as usize, !text(run).is_empty()));
            present.flat_map(|(rows, is)| std::iter::repeat_n(is, rows)).collect::<NullBuffer>()
        });
        self.text_column(texts, nulls.filter(|nulls| nulls.null_count() > 0))
    }

    /// Builds a column of texts that runs refer to by number. The text is usually the same for the whole batch.
    fn named_column<'a>(
        &mut self,
        slot: usize,
        number: impl Fn(&Run) -> u32,
        name: impl Fn(u32) -> &'a str,
    ) -> ArrayRef {
        match self.first_run() {
            Some(first) if self.is_same(&number) => self.constants.text(slot, name(number(&first)), self.rows),
            _ => {
                let texts = self.each_text(self.text_spares(), |run| [name(number(run)); 2]);
                self.text_column(texts, None)
            }
        }
    }

    fn thread_column(&mut self) -> ArrayRef {
        let values = self.each_commit(|commit| commit.thread_id.unwrap_or(0));
        let nulls = self.commits.iter().any(|commit| commit.thread_id.is_none()).then(|| {
            let known = |run: &Run| self.commits.get(run.transaction as usize).is_some_and(|c| c.thread_id.is_some());
            let present = self.runs.iter().map(|run| (run.rows as usize, known(run)));
            present.flat_map(|(rows, is)| std::iter::repeat_n(is, rows)).collect::<NullBuffer>()
        });
        Arc::new(Int64Array::new(values, nulls.filter(|nulls| nulls.null_count() > 0)))
    }

    fn row_column(&mut self) -> ArrayRef {
        let mut rows = self.spares.ints.take();
        rows.reserve(self.rows);
        for run in &self.runs {
            let shift = u32::from(run.images == Images::Pairs);
            rows.extend((0..run.rows).map(|row| run.row_first.wrapping_add((row >> shift) as i32)));
        }
        Arc::new(Int32Array::new(self.spares.ints.lend(rows).into(), None))
    }

    fn schema_version_column(&mut self) -> ArrayRef {
        let mut versions = self.spares.ints.take();
        versions.reserve(self.rows);
        for run in &self.runs {
            let version = self.tables.get(run.table as usize).map_or(0, |table| table.schema_version);
            versions.extend(std::iter::repeat_n(version, run.rows as usize));
        }
        Arc::new(Int32Array::new(self.spares.ints.lend(versions).into(), None))
    }

    fn metadata(&mut self) -> StructArray {
        let tables = std::mem::take(&mut self.tables);
        let files = std::mem::take(&mut self.files);
        let commits = std::mem::take(&mut self.commits);
        let table = |at: u32| tables.get(at as usize);
        let file_of = |run: &Run| commits.get(run.transaction as usize).map_or(u32::MAX, |commit| commit.file);
        let database = self.named_column(2, |run| run.table, |at| table(at).map_or("", |table| &*table.database));
        let name = self.named_column(3, |run| run.table, |at| table(at).map_or("", |table| &*table.table));
        let file = self.named_column(4, file_of, |at| files.get(at as usize).map_or("", |file| &**file));
        (self.tables, self.files, self.commits) = (tables, files, commits);
        let columns: Vec<ArrayRef> = vec![
            self.constants.text(1, &self.instance, self.rows),
            database,
            name,
            self.gtid_column(),
            file,
            Arc::new(Int64Array::new(self.each_run(|run| run.offset), None)),
            self.row_column(),
            Arc::new(Int64Array::new(self.each_run(|run| run.server_id), None)),
            self.thread_column(),
            self.schema_version_column(),
            self.absent_column(),
            self.unrepresentable_column(),
        ];
        StructArray::new(metadata_fields(), columns, None)
    }

    fn absent_column(&mut self) -> ArrayRef {
        if self.absent.is_empty() {
            return self.constants.nulls(0, &absent_type(), self.rows);
        }
        let mut builder = ListBuilder::new(StringBuilder::new()).with_field(element_field());
        for run in &self.runs {
            let pairs = run.images == Images::Pairs;
            for row in 0..run.rows {
                let [first, second] = run.absent;
                let list = if pairs && row % 2 == 1 || run.images == Images::After { second } else { first };
                let list = list.checked_sub(1).and_then(|at| self.absent.get(at as usize));
                for name in list.into_iter().flatten() {
                    builder.values().append_value(&**name);
                }
                builder.append(list.is_some());
            }
        }
        Arc::new(builder.finish())
    }

    fn unrepresentable_column(&mut self) -> ArrayRef {
        if self.unrepresentable.is_empty() {
            return self.constants.nulls(1, &unrepresentable_type(), self.rows);
        }
        unrepresentable_array(self.rows, &self.unrepresentable)
    }
}

/// A value that its Arrow type cannot represent: its row, its column, its exact text.
pub type Unrepresentable = (usize, Arc<str>, String);

/// Builds `_metadata.unrepresentable` for `rows` rows from values in row order.
pub fn unrepresentable_array(rows: usize, noted: &[Unrepresentable]) -> ArrayRef {
    if noted.is_empty() {
        return arrow_array::new_null_array(&unrepresentable_type(), rows);
    }
    let names = MapFieldNames { entry: "entries".into(), key: "key".into(), value: "value".into() };
    let mut builder = MapBuilder::new(Some(names), StringBuilder::new(), StringBuilder::new())
        .with_values_field(Field::new("value", DataType::Utf8, true));
    let mut noted = noted.iter().peekable();
    for row in 0..rows {
        let mut some = false;
        while let Some((_, column, text)) = noted.next_if(|(at, _, _)| *at == row) {
            builder.keys().append_value(&**column);
            builder.values().append_value(text);
            some = true;
        }
        // Keys and values are appended in pairs above, so their counts cannot differ.
        let _ = builder.append(some);
    }
    Arc::new(builder.finish())
}

/// Builds `_metadata.absent`: for each row, the columns that its image lacks; null if it lacks none.
pub fn absent_array(rows: &[Vec<Arc<str>>]) -> ArrayRef {
    let mut builder = ListBuilder::new(StringBuilder::new()).with_field(element_field());
    for names in rows {
        for name in names {
            builder.values().append_value(&**name);
        }
        builder.append(!names.is_empty());
    }
    Arc::new(builder.finish())
}

/// Builds a text array from concatenated `str`s and the offset at the end of each.
#[allow(unsafe_code)]
fn strings(offsets: Buffer, bytes: Buffer, nulls: Option<NullBuffer>) -> StringArray {
    let offsets = OffsetBuffer::new(ScalarBuffer::from(offsets));
    // SAFETY: all callers are in this file and pass the output of `each_text` as both arguments. `each_text` starts
    // with empty vectors, appends only whole `str`s to `bytes`, and pushes an offset after each of them, so every value
    // is valid UTF-8. Validating the values again would add 5% to the time for narrow rows.
    unsafe { StringArray::new_unchecked(offsets, bytes, nulls) }
}

fn element_field() -> Field {
    Field::new("element", DataType::Utf8, true)
}

fn absent_type() -> DataType {
    DataType::List(Arc::new(element_field()))
}

fn unrepresentable_type() -> DataType {
    let entry = Fields::from(vec![Field::new("key", DataType::Utf8, false), Field::new("value", DataType::Utf8, true)]);
    DataType::Map(Arc::new(Field::new("entries", DataType::Struct(entry), false)), false)
}

/// Returns the fields of `_metadata`.
pub fn metadata_fields() -> Fields {
    Fields::from(vec![
        Field::new("instance", DataType::Utf8, false),
        Field::new("database", DataType::Utf8, false),
        Field::new("table", DataType::Utf8, false),
        Field::new("gtid", DataType::Utf8, true),
        Field::new("file", DataType::Utf8, false),
        Field::new("offset", DataType::Int64, false),
        Field::new("row", DataType::Int32, false),
        Field::new("server_id", DataType::Int64, false),
        Field::new("thread_id", DataType::Int64, true),
        Field::new("schema_version", DataType::Int32, false),
        Field::new("absent", absent_type(), true),
        Field::new("unrepresentable", unrepresentable_type(), true),
    ])
}

/// Returns the fields of the system columns, in their order.
pub fn fields() -> Vec<Field> {
    let timestamp = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    vec![
        Field::new(CHANGE_TYPE, DataType::Utf8, false),
        Field::new(COMMIT_VERSION, DataType::Int64, false),
        Field::new(COMMIT_TIMESTAMP, timestamp, false),
        Field::new(METADATA, DataType::Struct(metadata_fields()), false),
    ]
}

#[cfg(test)]
mod tests;
