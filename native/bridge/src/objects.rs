//! Arrow rows as JSON objects, and as messages.

use arrow_array::ffi::to_ffi;
use arrow_array::{Array, ArrayRef};
use arrow_schema::ffi::FFI_ArrowSchema;
use penstock_kernel::column::json::Step;
use penstock_kernel::emit;
use penstock_kernel::emit::arrow_messages::{self, ArrowDialect};
use penstock_kernel::{objects, partition};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};
use std::sync::Arc;

use crate::batch::Batch;
use crate::convert::batch_from;
use crate::raise::{option_invalid, raise};
use crate::schema::{declared, ColumnTuple};

/// An array with a value for each row, on its way to the caller's Arrow library.
#[pyclass(frozen, module = "penstock._native")]
pub struct Texts {
    pub(crate) inner: ArrayRef,
}

#[pymethods]
impl Texts {
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        // The protocol allows a producer to ignore the wish for another schema.
        let _ = requested_schema;
        let error = |error: arrow_schema::ArrowError| PyValueError::new_err(error.to_string());
        let schema = FFI_ArrowSchema::try_from(self.inner.data_type()).map_err(error)?;
        let (array, _) = to_ffi(&self.inner.to_data()).map_err(error)?;
        let schema = PyCapsule::new_with_value(py, schema, c"arrow_schema")?;
        let array = PyCapsule::new_with_value(py, array, c"arrow_array")?;
        PyTuple::new(py, [schema.into_any(), array.into_any()])
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }
}

/// One JSON object for each row of an Arrow batch, as an array of strings for `pyarrow.array`.
///
/// `names` takes only some of the columns, in its own order. Values are as the server's client shows them: numbers as
/// numbers of any length, bytes as base64, geometries as well-known text, documents as documents. A value that its type
/// cannot hold is null; with `exact` it is its exact text. Raises `SchemaInvalid` where a column is not of its declared
/// type, `OptionInvalid` for a name that the rows lack.
#[pyfunction]
#[pyo3(signature = (batch, columns, *, mariadb=false, names=None, exact=false))]
pub fn json_objects(
    py: Python<'_>,
    batch: &Bound<'_, PyAny>,
    columns: Vec<ColumnTuple>,
    mariadb: bool,
    names: Option<Vec<String>>,
    exact: bool,
) -> PyResult<Texts> {
    let batch = batch_from(batch)?;
    let columns = declared(columns);
    let made = py.detach(|| objects::json_objects(&batch, &columns, mariadb, names.as_deref(), exact));
    Ok(Texts { inner: Arc::new(made.map_err(|error| raise(py, &error))?) })
}

/// The text of one column's value in each row of an Arrow batch, as an array of strings for `pyarrow.array`: null where
/// the value is null. `path`, of names and numbers, leads into a document; null where it leads nowhere.
///
/// Raises `SchemaInvalid` where the column is not of its declared type, `OptionInvalid` where the rows lack it,
/// `ValueMalformed` where a path is asked of what is no document.
#[pyfunction]
#[pyo3(signature = (batch, column, *, mariadb=false, path=None))]
pub fn column_texts(
    py: Python<'_>,
    batch: &Bound<'_, PyAny>,
    column: ColumnTuple,
    mariadb: bool,
    path: Option<Vec<PathStep>>,
) -> PyResult<Texts> {
    let batch = batch_from(batch)?;
    let step = |step| match step {
        PathStep::Element(at) => Step::Element(at),
        PathStep::Member(name) => Step::Member(name),
    };
    let path: Vec<Step> = path.unwrap_or_default().into_iter().map(step).collect();
    let columns = declared(vec![column]);
    let Some(column) = columns.first() else { return Err(option_invalid(py, "no column".to_owned())) };
    let made = py.detach(|| objects::column_texts(&batch, column, mariadb, &path));
    Ok(Texts { inner: Arc::new(made.map_err(|error| raise(py, &error))?) })
}

/// One step of a path into a document: a number or a name.
#[derive(FromPyObject)]
pub enum PathStep {
    Element(usize),
    Member(String),
}

/// Changes as messages of a dialect, one for each change, as an Arrow batch in the changes' order: `value`, `key` (null
/// without columns for it), `row` (which row of the batch the message ends at) and `kind` (0 insert, 1 update, 2 delete).
///
/// `batch` has the declared columns and the system columns behind them. `snapshot` says that its rows were read from the
/// table; `lines`, that each message ends its line. Raises `OptionInvalid`, `SchemaInvalid`, `ValueMalformed`,
/// `LimitExceeded`.
#[pyfunction]
#[pyo3(signature = (
    batch, columns, *, dialect, database, table, primary_key, key, mariadb=false, snapshot=false, zone_seconds=0,
    lines=false,
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
) -> PyResult<Batch> {
    let batch = batch_from(batch)?;
    let columns = declared(columns);
    let (primary_key, key) = (primary_key.as_slice(), key.as_slice());
    let name = dialect;
    let wanted = ArrowDialect { name, database, table, primary_key, key, mariadb, snapshot, zone_seconds, lines };
    let made = py.detach(|| arrow_messages::encode_changes(&batch, &columns, &wanted));
    let record = made.map_err(|error| raise(py, &error))?;
    let (database, table) = (database.into(), table.into());
    Ok(Batch::new(emit::Batch { database, table, schema_version: 0, record, position: ("".into(), 0) }))
}

/// The partition of a queue's topic that each key belongs to, of `count`, as Kafka's own producers find it; null for null.
///
/// `keys` is an Arrow batch whose first column holds texts or bytes. Raises `OptionInvalid`.
#[pyfunction]
pub fn partitions(py: Python<'_>, keys: &Bound<'_, PyAny>, count: u32) -> PyResult<Texts> {
    let batch = batch_from(keys)?;
    let made = py.detach(|| partition::partitions(batch.column(0), count));
    Ok(Texts { inner: Arc::new(made.map_err(|error| raise(py, &error))?) })
}
