//! Encodes changes in Arrow form as messages of a dialect, one for each change.
//!
//! The messages are equal to those created directly from row images, except for information that only the log's events
//! contain: the start of the statement, which is replaced by the commit time; the lengths and table ids of events; and
//! the transaction's logical clock. `row` in Debezium's source counts changes within the transaction instead of the
//! event, so that the number does not depend on how changes are split into batches.

use std::ops::Range;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Int32Type, Int64Type, TimestampMicrosecondType};
use arrow_array::{
    Array, ArrayRef, Int32Array, Int64Array, Int8Array, LargeBinaryArray, PrimitiveArray, RecordBatch, StringArray,
    StructArray, TimestampMicrosecondArray,
};
use arrow_buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Schema};

use crate::column::{DeclaredColumn, Kind};
use crate::emit::arrow_rows::{ArrowRows, Pair};
use crate::emit::dialect::debezium::handling::DebeziumOptions;
use crate::emit::dialect::TableWriter;
use crate::emit::dialect::{
    debezium, keys, protobuf, At, Dialect, DialectOptions, Images, MessageColumn, Named, TableView,
};
use crate::emit::messages::{MessageKind, Messages};
use crate::emit::system::{self, EventView};
use crate::emit::TransactionView;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::Change;
use crate::gtid::Gtid;

/// `PacketType.MESSAGES` of Canal, the frame of entries in Canal's own queues.
const PACKET_MESSAGES: u64 = 7;

/// The dialect of the messages, and the table and source that they describe.
#[derive(Debug, Clone)]
pub struct ArrowDialect<'a> {
    /// The name of the dialect.
    pub name: &'a str,
    /// The database in the messages.
    pub database: &'a str,
    /// The table in the messages.
    pub table: &'a str,
    /// The table's primary key.
    pub primary_key: &'a [String],
    /// The columns of the message keys; empty for messages without keys.
    pub key: &'a [String],
    /// Whether the types are MariaDB's.
    pub mariadb: bool,
    /// Whether the rows were read from the table instead of the log.
    pub snapshot: bool,
    /// Seconds to add to UTC if a dialect shows TIMESTAMP in the server's time zone.
    pub zone_seconds: i32,
    /// Whether each message ends with a newline.
    pub lines: bool,
    /// The forms of Debezium's messages.
    pub debezium: &'a DebeziumOptions,
}

/// Encodes the changes of a batch in order: `value`, `key` (null if there is none), `row` (the last row of the change
/// in the batch: the after image, or the deleted row) and `kind` (0 insert, 1 update, 2 delete).
///
/// Raises `OptionInvalid` for an unknown dialect or column, `SchemaInvalid` if the batch does not have the declared
/// columns followed by the system columns, `LimitExceeded` for a message of 2 GiB.
pub fn encode_changes(
    batch: &RecordBatch,
    declared: &[DeclaredColumn],
    arrow_dialect: &ArrowDialect<'_>,
) -> Result<RecordBatch> {
    let system = System::of(batch)?;
    let instance: Arc<str> = match batch.num_rows() {
        0 => "".into(),
        _ => system.instance.value(0).into(),
    };
    let options = DialectOptions {
        message_per_row: true,
        server_zone_seconds: arrow_dialect.zone_seconds,
        debezium: arrow_dialect.debezium.clone(),
        ..DialectOptions::of_name(arrow_dialect.name)
    };
    let dialect = Named::of_options(&options, &instance)?;
    let rows = ArrowRows::new(batch, declared, arrow_dialect.mariadb, dialect.json_style())?;
    let kinds = rows.columns().iter().map(|cells| cells.kind().clone());
    let table = Arc::new(table_view(declared, kinds, arrow_dialect));
    let writer = dialect.table(table.clone())?;
    let keys = keys::Keys::new(&table, arrow_dialect.key, &options, &instance)?;
    let pairs = system.pairs()?;
    let mut out = EncodedMessages::new(Frame::of(arrow_dialect), pairs.len());
    let mut messages = Messages::new();
    messages.counts = arrow_dialect.debezium.transactions;
    for run in system.runs(&pairs) {
        let Some((first, change)) = run.first().map(|pair| (pair.main(), pair.change())) else { continue };
        let transaction = system.transaction(first);
        let seconds = u32::try_from(transaction.commit_us.div_euclid(1_000_000)).unwrap_or(0);
        let offset = system.offset.value(first).unsigned_abs();
        let at = At {
            instance: system.instance.value(first),
            gtid: if system.gtid.is_null(first) { "" } else { system.gtid.value(first) },
            gtid_set: "",
            event: EventView {
                offset,
                end_offset: offset,
                timestamp: seconds,
                server_id: u32::try_from(system.server_id.value(first)).unwrap_or(0),
                shared: false,
            },
            xa_id: None,
            row_first: 0,
            snapshot: arrow_dialect.snapshot,
            transaction: &transaction,
        };
        writer.rows(&at, &mut Images::of_arrow(&table, &rows, run, change), &mut messages)?;
        out.add_run(&messages, run, &rows, &keys, transaction.commit_version)?;
        messages.clear();
    }
    out.finish()
}

/// Returns the Kafka Connect schemas of Debezium's messages and of their keys, as JSON; `None` for messages without
/// keys.
///
/// Raises `SchemaInvalid` for a type that is unknown, `OptionInvalid` for a key column that the table does not have.
pub fn debezium_schemas(
    declared: &[DeclaredColumn],
    instance: &str,
    arrow_dialect: &ArrowDialect<'_>,
) -> Result<(String, Option<String>)> {
    let kinds = declared.iter().map(|column| column.kind(arrow_dialect.mariadb)).collect::<Result<Vec<Kind>>>()?;
    let table = table_view(declared, kinds.into_iter(), arrow_dialect);
    let key_columns = keys::columns_of(&table, arrow_dialect.key)?;
    let options = arrow_dialect.debezium;
    let text = |schema: Vec<u8>| String::from_utf8(schema).map_err(|_| malformed("a schema that is not UTF-8"));
    let key = (!key_columns.is_empty()).then(|| {
        let columns: Vec<&MessageColumn> = key_columns.iter().map(|(_, column)| *column).collect();
        text(debezium::schema::key(instance, &table, &columns, options.handling))
    });
    Ok((text(debezium::schema::value(instance, &table, options))?, key.transpose()?))
}

impl Pair {
    fn change(&self) -> Change {
        match (self.before, self.after) {
            (Some(_), Some(_)) => Change::Update,
            (Some(_), None) => Change::Delete,
            (None, _) => Change::Insert,
        }
    }

    /// Returns the row that stands for the change: the row after it, or the deleted row.
    fn main(&self) -> usize {
        self.after.or(self.before).unwrap_or(0)
    }
}

fn table_view(
    declared: &[DeclaredColumn],
    kinds: impl Iterator<Item = Kind>,
    arrow_dialect: &ArrowDialect<'_>,
) -> TableView {
    let column = |(column, kind): (&DeclaredColumn, Kind)| MessageColumn {
        name: column.name.as_str().into(),
        kind,
        type_text: column.type_text.as_str().into(),
        nullable: column.nullable,
        is_key: arrow_dialect.primary_key.contains(&column.name),
        wanted: true,
    };
    TableView {
        database: arrow_dialect.database.into(),
        table: arrow_dialect.table.into(),
        name: format!("{}.{}", arrow_dialect.database, arrow_dialect.table).into(),
        schema_version: 0,
        columns: declared.iter().zip(kinds).map(column).collect(),
        shard_columns: Vec::new(),
        json_columns: 0,
        mariadb: arrow_dialect.mariadb,
        judged: false,
    }
}

/// The system columns of a batch.
pub(super) struct System<'a> {
    change: &'a StringArray,
    version: &'a Int64Array,
    time: &'a TimestampMicrosecondArray,
    instance: &'a StringArray,
    gtid: &'a StringArray,
    file: &'a StringArray,
    offset: &'a Int64Array,
    row: &'a Int32Array,
    server_id: &'a Int64Array,
    thread_id: &'a Int64Array,
}

#[cold]
fn no_system(name: &str) -> Error {
    Error::new(ErrorKind::SchemaInvalid, format!("changes without their column `{name}`"))
        .hint("a step has to leave the columns whose names begin with _ as they are")
}

fn text<'a>(array: Option<&'a ArrayRef>, name: &str) -> Result<&'a StringArray> {
    array.and_then(|array| array.as_string_opt()).ok_or_else(|| no_system(name))
}

fn number<'a, T: arrow_array::ArrowPrimitiveType>(
    array: Option<&'a ArrayRef>,
    name: &str,
) -> Result<&'a PrimitiveArray<T>> {
    array.and_then(|array| array.as_primitive_opt()).ok_or_else(|| no_system(name))
}

impl<'a> System<'a> {
    pub(super) fn of(batch: &'a RecordBatch) -> Result<System<'a>> {
        let metadata: &'a StructArray = batch
            .column_by_name(system::METADATA)
            .and_then(|array| array.as_struct_opt())
            .ok_or_else(|| no_system(system::METADATA))?;
        let part = |name: &str| metadata.column_by_name(name);
        Ok(System {
            change: text(batch.column_by_name(system::CHANGE_TYPE), system::CHANGE_TYPE)?,
            version: number::<Int64Type>(batch.column_by_name(system::COMMIT_VERSION), system::COMMIT_VERSION)?,
            time: number::<TimestampMicrosecondType>(
                batch.column_by_name(system::COMMIT_TIMESTAMP),
                system::COMMIT_TIMESTAMP,
            )?,
            instance: text(part("instance"), "_metadata.instance")?,
            gtid: text(part("gtid"), "_metadata.gtid")?,
            file: text(part("file"), "_metadata.file")?,
            offset: number::<Int64Type>(part("offset"), "_metadata.offset")?,
            row: number::<Int32Type>(part("row"), "_metadata.row")?,
            server_id: number::<Int64Type>(part("server_id"), "_metadata.server_id")?,
            thread_id: number::<Int64Type>(part("thread_id"), "_metadata.thread_id")?,
        })
    }

    /// Returns the changes of the batch. The two rows of an update have the same number in `_metadata.row`.
    pub(super) fn pairs(&self) -> Result<Vec<Pair>> {
        let mut pairs: Vec<Pair> = Vec::with_capacity(self.row.len());
        let mut open: Option<usize> = None;
        for row in 0..self.row.len() {
            let index = self.row.value(row).unsigned_abs();
            let (before, after) = match self.change.value(row) {
                "insert" => (None, Some(row)),
                "delete" => (Some(row), None),
                "update_preimage" => (Some(row), None),
                "update_postimage" => {
                    let before = open.filter(|open| self.same_change(*open, row));
                    if let (Some(_), Some(pair)) = (before, pairs.last_mut()) {
                        pair.after = Some(row);
                        open = None;
                        continue;
                    }
                    (None, Some(row))
                }
                change_type => {
                    return Err(Error::new(ErrorKind::SchemaInvalid, format!("`{change_type}` is no kind of change")))
                }
            };
            open = (self.change.value(row) == "update_preimage").then_some(row);
            pairs.push(Pair { before, after, index });
        }
        Ok(pairs)
    }

    /// Returns the commit version of a change.
    pub(super) fn version_of(&self, pair: &Pair) -> i64 {
        self.version.value(pair.main())
    }

    fn same_change(&self, left: usize, right: usize) -> bool {
        self.version.value(left) == self.version.value(right) && self.row.value(left) == self.row.value(right)
    }

    /// Returns the runs of consecutive changes that have the same kind and event.
    fn runs<'p>(&'p self, pairs: &'p [Pair]) -> impl Iterator<Item = &'p [Pair]> + 'p {
        pairs.chunk_by(|left, right| {
            let (first, second) = (left.main(), right.main());
            left.change() == right.change()
                && self.version.value(first) == self.version.value(second)
                && self.offset.value(first) == self.offset.value(second)
                && self.time.value(first) == self.time.value(second)
                && self.server_id.value(first) == self.server_id.value(second)
                && self.instance.value(first) == self.instance.value(second)
                && self.file.value(first) == self.file.value(second)
        })
    }

    fn transaction(&self, row: usize) -> TransactionView {
        TransactionView {
            file: self.file.value(row).into(),
            start: 0,
            commit_version: self.version.value(row),
            commit_us: self.time.value(row),
            gtid: Gtid::Anonymous,
            thread_id: (!self.thread_id.is_null(row)).then(|| self.thread_id.value(row)),
            clock: None,
        }
    }
}

/// The form in which a message is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Frame {
    /// A packet of Canal that contains the message.
    Packet,
    /// The text of a message, which ends with a newline.
    Line,
    /// The text of a message without its newline.
    Text,
    /// The unchanged bytes of a message.
    Bytes,
}

impl Frame {
    fn of(arrow_dialect: &ArrowDialect<'_>) -> Frame {
        match arrow_dialect.name {
            "canal" => Frame::Packet,
            _ if arrow_dialect.debezium.registered.is_some() => Frame::Bytes,
            _ if arrow_dialect.lines => Frame::Line,
            _ => Frame::Text,
        }
    }
}

/// The encoded messages, as columns.
struct EncodedMessages {
    frame: Frame,
    value: Vec<u8>,
    ends: Vec<i64>,
    key: Vec<u8>,
    key_ends: Vec<i64>,
    has_key: Vec<bool>,
    row: Vec<i32>,
    kind: Vec<i8>,
}

impl EncodedMessages {
    fn new(frame: Frame, count: usize) -> EncodedMessages {
        EncodedMessages {
            frame,
            value: Vec::new(),
            ends: vec![0],
            key: Vec::new(),
            key_ends: vec![0],
            has_key: Vec::with_capacity(count),
            row: Vec::with_capacity(count),
            kind: Vec::with_capacity(count),
        }
    }

    /// Adds the messages of a run of changes.
    fn add_run(
        &mut self,
        messages: &Messages,
        run: &[Pair],
        rows: &ArrowRows<'_>,
        keys: &keys::Keys,
        version: i64,
    ) -> Result<()> {
        let mut pairs = run.iter();
        let mut pair = pairs.next();
        for (kind, range, count) in messages.from(0) {
            let Some(change) = pair else { return Err(malformed("more messages than changes")) };
            let is_delete = kind == MessageKind::Delete as i8;
            // A column that is missing from an update's after image is unchanged, so take it from the before image. A
            // column that is missing from the before image may have changed, so do not take it from the after image.
            let (own, fallback) = match is_delete {
                true => (change.before, None),
                false => (change.after, change.before),
            };
            let row = own.unwrap_or_else(|| change.main());
            self.value(messages, range, version)?;
            if keys.is_some() {
                let cell = |at| match (rows.cell(row, at)?, fallback) {
                    (None, Some(fallback)) => rows.cell(fallback, at),
                    (value, _) => Ok(value),
                };
                keys.write(cell, &mut self.key)?;
            }
            self.key_ends.push(self.key.len() as i64);
            self.has_key.push(keys.is_some());
            self.row.push(i32::try_from(row).map_err(|_| malformed("a batch of 2^31 rows"))?);
            self.kind.push(kind);
            // A message with a count of 0 is the first half of a change.
            if count > 0 {
                pair = pairs.next();
            }
        }
        Ok(())
    }

    fn value(&mut self, messages: &Messages, range: Range<usize>, version: i64) -> Result<()> {
        let bytes = messages.value.get(range).unwrap_or_default();
        if i32::try_from(bytes.len()).is_err() {
            return Err(Error::new(ErrorKind::LimitExceeded, "a message of 2 GiB or more"));
        }
        match self.frame {
            Frame::Packet => {
                protobuf::number(3, PACKET_MESSAGES, &mut self.value);
                let body = protobuf::open(5, &mut self.value);
                protobuf::signed(1, version, &mut self.value);
                self.value.extend_from_slice(bytes);
                protobuf::close(body, &mut self.value);
            }
            Frame::Line | Frame::Bytes => self.value.extend_from_slice(bytes),
            Frame::Text => self.value.extend_from_slice(bytes.strip_suffix(b"\n").unwrap_or(bytes)),
        }
        self.ends.push(self.value.len() as i64);
        Ok(())
    }

    fn finish(self) -> Result<RecordBatch> {
        let bytes = |ends: Vec<i64>, values: Vec<u8>, nulls: Option<NullBuffer>| {
            LargeBinaryArray::new(OffsetBuffer::new(ScalarBuffer::from(ends)), values.into(), nulls)
        };
        let columns: Vec<ArrayRef> = vec![
            Arc::new(bytes(self.ends, self.value, None)),
            Arc::new(bytes(self.key_ends, self.key, Some(NullBuffer::from(self.has_key)))),
            Arc::new(Int32Array::from(self.row)),
            Arc::new(Int8Array::from(self.kind)),
        ];
        RecordBatch::try_new(Arc::new(schema()), columns)
            .map_err(|error| malformed(format!("columns of one batch disagree: {error}")))
    }
}

/// Returns the schema of messages encoded from Arrow.
pub fn schema() -> Schema {
    Schema::new(vec![
        Field::new("value", DataType::LargeBinary, false),
        Field::new("key", DataType::LargeBinary, true),
        Field::new("row", DataType::Int32, false),
        Field::new("kind", DataType::Int8, false),
    ])
}
