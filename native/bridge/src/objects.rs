//! Writes Arrow rows as JSON objects and as messages.

use penstock_kernel::column::json::Step;
use penstock_kernel::emit;
use penstock_kernel::emit::arrow_messages::{self, ArrowDialect};
use penstock_kernel::emit::dialect::debezium::handling::DebeziumOptions;
use penstock_kernel::emit::drainer::{self, DrainerForm};
use penstock_kernel::{checksum, objects, partition};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use std::sync::Arc;

use crate::array::ArrowArray;
use crate::batch::Batch;
use crate::convert::batch_from;
use crate::raise::{option_invalid, raise};
use crate::schema::{declared, ColumnTuple};

/// Return a JSON object for each row of an Arrow batch, as an array of strings for `pyarrow.array`.
///
/// `names` selects and orders the columns. Values are written as the server's client shows them: numbers of any length
/// as numbers, bytes as base64, geometries as well-known text, JSON documents as nested JSON. A value that its type
/// cannot represent is null, or with `exact` its exact text. Raises `SchemaInvalid` for a column that does not have its
/// declared type, `OptionInvalid` for a name that is missing from the rows.
#[pyfunction]
#[pyo3(signature = (batch, columns, *, mariadb=false, names=None, exact=false))]
pub fn json_objects(
    py: Python<'_>,
    batch: &Bound<'_, PyAny>,
    columns: Vec<ColumnTuple>,
    mariadb: bool,
    names: Option<Vec<String>>,
    exact: bool,
) -> PyResult<ArrowArray> {
    let batch = batch_from(batch)?;
    let columns = declared(columns);
    let texts = py.detach(|| objects::json_objects(&batch, &columns, mariadb, names.as_deref(), exact));
    Ok(ArrowArray { inner: Arc::new(texts.map_err(|error| raise(py, &error))?) })
}

/// Return the text of a column's value in each row of an Arrow batch, as an array of strings for `pyarrow.array`, null
/// if the value is null. `path`, a list of names and numbers, selects a value in a document; the text is null if the
/// document has no value there.
///
/// Raises `SchemaInvalid` if the column does not have its declared type, `OptionInvalid` if it is missing from the
/// rows, `ValueMalformed` if a path is given for a value that is not a document.
#[pyfunction]
#[pyo3(signature = (batch, column, *, mariadb=false, path=None))]
pub fn column_texts(
    py: Python<'_>,
    batch: &Bound<'_, PyAny>,
    column: ColumnTuple,
    mariadb: bool,
    path: Option<Vec<PathStep>>,
) -> PyResult<ArrowArray> {
    let batch = batch_from(batch)?;
    let step = |step| match step {
        PathStep::Element(index) => Step::Element(index),
        PathStep::Member(name) => Step::Member(name),
    };
    let path: Vec<Step> = path.unwrap_or_default().into_iter().map(step).collect();
    let columns = declared(vec![column]);
    let Some(column) = columns.first() else { return Err(option_invalid(py, "no column".to_owned())) };
    let texts = py.detach(|| objects::column_texts(&batch, column, mariadb, &path));
    Ok(ArrowArray { inner: Arc::new(texts.map_err(|error| raise(py, &error))?) })
}

/// A step of a path into a document: a number or a name.
#[derive(FromPyObject)]
pub enum PathStep {
    Element(usize),
    Member(String),
}

/// Encode changes as messages of a dialect, one for each change, as an Arrow batch in the order of the changes:
/// `value`, `key` (null if there are no key columns), `row` (the row of the batch at which the change ends) and
/// `kind` (0 insert, 1 update, 2 delete).
///
/// `batch` has the declared columns followed by the system columns. `snapshot` says that its rows were read from the
/// table; `lines` terminates each message by a newline; `debezium` holds pairs of names and values that select variants
/// of Debezium's messages. Raises `OptionInvalid`, `SchemaInvalid`, `ValueMalformed`, `LimitExceeded`.
#[pyfunction]
#[pyo3(signature = (
    batch, columns, *, dialect, database, table, primary_key, key, mariadb=false, snapshot=false, zone_seconds=0,
    lines=false, debezium=None,
))]
#[allow(clippy::too_many_arguments)]
pub fn encode_changes(
    py: Python<'_>,
    batch: &Bound<'_, PyAny>,
    columns: Vec<ColumnTuple>,
    dialect: &str,
    database: &str,
    table: &str,
    primary_key: Vec<String>,
    key: Vec<String>,
    mariadb: bool,
    snapshot: bool,
    zone_seconds: i32,
    lines: bool,
    debezium: Option<Vec<(String, String)>>,
) -> PyResult<Batch> {
    let batch = batch_from(batch)?;
    let columns = declared(columns);
    let (primary_key, key) = (primary_key.as_slice(), key.as_slice());
    let name = dialect;
    let debezium = DebeziumOptions::parse(&debezium.unwrap_or_default()).map_err(|error| raise(py, &error))?;
    let debezium = &debezium;
    let dialect_options =
        ArrowDialect { name, database, table, primary_key, key, mariadb, snapshot, zone_seconds, lines, debezium };
    let messages = py.detach(|| arrow_messages::encode_changes(&batch, &columns, &dialect_options));
    let record = messages.map_err(|error| raise(py, &error))?;
    let (database, table) = (database.into(), table.into());
    Ok(Batch::new(emit::Batch { database, table, schema_version: 0, record, position: ("".into(), 0) }))
}

/// Encode changes as parts of Drainer's messages, one for each change, as an Arrow batch in the order of the changes:
/// `value` and `version`, the commit version.
///
/// `batch` has the declared columns followed by the system columns. Without `heads`, the parts are mutations for Kafka.
/// With `heads`, which holds each column's name and type as protobuf fields, the parts are events for files. Raises
/// `EventUnsupported`, `SchemaInvalid`, `ValueMalformed`.
#[pyfunction]
#[pyo3(signature = (batch, columns, *, database, table, mariadb=false, heads=None))]
pub fn encode_drainer(
    py: Python<'_>,
    batch: &Bound<'_, PyAny>,
    columns: Vec<ColumnTuple>,
    database: &str,
    table: &str,
    mariadb: bool,
    heads: Option<Vec<Vec<u8>>>,
) -> PyResult<Batch> {
    let batch = batch_from(batch)?;
    let columns = declared(columns);
    let form = match &heads {
        None => DrainerForm::Kafka,
        Some(heads) => DrainerForm::File { database, table, heads },
    };
    let parts = py.detach(|| drainer::encode_drainer(&batch, &columns, mariadb, form));
    let record = parts.map_err(|error| raise(py, &error))?;
    let (database, table) = (database.into(), table.into());
    Ok(Batch::new(emit::Batch { database, table, schema_version: 0, record, position: ("".into(), 0) }))
}

/// Return the CRC-32C (Castagnoli) of bytes.
#[pyfunction]
pub fn crc32c(data: PyBackedBytes) -> u32 {
    checksum::crc32c(&data)
}

/// Return the Kafka Connect schemas of a table's Debezium messages and of their keys, as JSON. The key schema is None
/// for messages without keys. `instance` is the name of the cluster, which becomes the prefix of schema names.
///
/// Raises `OptionInvalid`, `SchemaInvalid`.
#[pyfunction]
#[pyo3(signature = (columns, *, instance, database, table, key, mariadb=false, debezium=None))]
#[allow(clippy::too_many_arguments)]
pub fn debezium_schemas(
    py: Python<'_>,
    columns: Vec<ColumnTuple>,
    instance: &str,
    database: &str,
    table: &str,
    key: Vec<String>,
    mariadb: bool,
    debezium: Option<Vec<(String, String)>>,
) -> PyResult<(String, Option<String>)> {
    let debezium = DebeziumOptions::parse(&debezium.unwrap_or_default()).map_err(|error| raise(py, &error))?;
    let dialect = ArrowDialect {
        name: "debezium",
        database,
        table,
        primary_key: &key,
        key: &key,
        mariadb,
        snapshot: false,
        zone_seconds: 0,
        lines: false,
        debezium: &debezium,
    };
    arrow_messages::debezium_schemas(&declared(columns), instance, &dialect).map_err(|error| raise(py, &error))
}

/// Return the Kafka partition of each key among `count` partitions, the same as Kafka's own producers choose; null for
/// a null key.
///
/// `keys` is an Arrow batch whose first column has texts or bytes. Raises `OptionInvalid`.
#[pyfunction]
pub fn partitions(py: Python<'_>, keys: &Bound<'_, PyAny>, count: u32) -> PyResult<ArrowArray> {
    let batch = batch_from(keys)?;
    let partitions = py.detach(|| partition::partitions(batch.column(0), count));
    Ok(ArrowArray { inner: Arc::new(partitions.map_err(|error| raise(py, &error))?) })
}

/// Return the slot of each key in a Redis Cluster; null for a null key.
///
/// `keys` is an Arrow batch whose first column has texts or bytes. Raises `OptionInvalid`.
#[pyfunction]
pub fn cluster_slots(py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<ArrowArray> {
    let batch = batch_from(keys)?;
    let slots = py.detach(|| partition::slots(batch.column(0)));
    Ok(ArrowArray { inner: Arc::new(slots.map_err(|error| raise(py, &error))?) })
}
