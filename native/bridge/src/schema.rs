//! Returns the Arrow schemas of tables and of the fixed row formats.

use std::sync::Arc;

use ::arrow_schema::Field;
use penstock_kernel::column::DeclaredColumn;
use penstock_kernel::emit::{envelope, events, messages, system, transactions};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::convert::schema_capsule;
use crate::raise::raise;

/// A column as declared in Python: name, SQL type, character set or None, whether it may be null.
pub type ColumnTuple = (String, String, Option<String>, bool);

/// Convert declared columns for the kernel.
pub fn declared(columns: Vec<ColumnTuple>) -> Vec<DeclaredColumn> {
    let column = |(name, type_text, charset, nullable)| DeclaredColumn { name, type_text, charset, nullable };
    columns.into_iter().map(column).collect()
}

/// An Arrow schema, exported through the Arrow PyCapsule protocol.
#[pyclass(frozen, module = "penstock._native")]
pub struct Schema {
    inner: Arc<::arrow_schema::Schema>,
}

#[pymethods]
impl Schema {
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_capsule(py, &self.inner)
    }
}

fn schema(fields: Vec<Field>) -> Schema {
    Schema { inner: Arc::new(::arrow_schema::Schema::new(fields)) }
}

/// Return the schema of typed rows of a table with these columns.
///
/// `wanted` names the columns to keep, including system columns; None keeps all. Raises `SchemaInvalid` for an
/// unknown type or character set.
#[pyfunction]
#[pyo3(signature = (columns, *, mariadb=false, wanted=None))]
pub fn arrow_schema(
    py: Python<'_>,
    columns: Vec<ColumnTuple>,
    mariadb: bool,
    wanted: Option<Vec<String>>,
) -> PyResult<Schema> {
    let is_wanted = |name: &str| wanted.as_ref().is_none_or(|wanted| wanted.iter().any(|column| column == name));
    let mut fields = Vec::new();
    for column in declared(columns) {
        let kind = column.kind(mariadb).map_err(|error| raise(py, &error))?;
        if is_wanted(&column.name) {
            fields.push(Field::new(column.name, kind.arrow_type(), true));
        }
    }
    fields.extend(system::fields().into_iter().filter(|field| is_wanted(field.name())));
    Ok(schema(fields))
}

/// Return the schema of envelope rows.
#[pyfunction]
pub fn envelope_schema() -> Schema {
    Schema { inner: Arc::new(envelope::schema()) }
}

/// Return the schema of event rows.
#[pyfunction]
pub fn events_schema() -> Schema {
    Schema { inner: Arc::new(events::schema()) }
}

/// Return the schema of transaction rows.
#[pyfunction]
pub fn transactions_schema() -> Schema {
    Schema { inner: Arc::new(transactions::schema()) }
}

/// Return the schema of messages, which is the same for all dialects.
#[pyfunction]
pub fn messages_schema() -> Schema {
    Schema { inner: Arc::new(messages::schema()) }
}
