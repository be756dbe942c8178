//! Decodes envelope rows of a table into typed rows.

use std::sync::Arc;

use penstock_kernel::column::Wire;
use penstock_kernel::emit;
use penstock_kernel::emit::images::ImageDecoder;
use penstock_kernel::emit::rows::SourceColumn;
use penstock_kernel::error::Result;
use pyo3::prelude::*;

use crate::batch::Batch;
use crate::convert::batch_from;
use crate::raise::raise;
use crate::schema::{declared, ColumnTuple};

fn sources(columns: Vec<ColumnTuple>, wires: &[(u8, u16)], mariadb: bool) -> Result<Vec<SourceColumn>> {
    let wire = |(code, metadata): (u8, u16)| Wire { code, metadata };
    declared(columns)
        .into_iter()
        .zip(wires.iter().copied().map(wire))
        .map(|(column, wire)| {
            let kind = column.kind(mariadb)?.fit(wire)?;
            Ok(SourceColumn { name: column.name.into(), kind })
        })
        .collect()
}

fn targets(columns: Vec<ColumnTuple>, mariadb: bool) -> Result<Vec<SourceColumn>> {
    let columns = declared(columns).into_iter();
    columns.map(|column| Ok(SourceColumn { kind: column.kind(mariadb)?, name: column.name.into() })).collect()
}

/// Decode envelope rows that share a definition into typed rows; an update becomes two rows.
///
/// `columns` and `wires` (type code and metadata) come from the definition. `declared` fixes the columns of the typed
/// rows; any other column raises `SchemaChanged`. `batch` is any object that supports the Arrow PyCapsule protocol.
#[pyfunction]
#[pyo3(signature = (batch, columns, wires, *, mariadb=false, declared=None))]
pub fn decode_envelope(
    py: Python<'_>,
    batch: &Bound<'_, PyAny>,
    columns: Vec<ColumnTuple>,
    wires: Vec<(u8, u16)>,
    mariadb: bool,
    declared: Option<Vec<ColumnTuple>>,
) -> PyResult<Batch> {
    let envelope = batch_from(batch)?;
    let decoded = py.detach(|| {
        let sources = sources(columns, &wires, mariadb)?;
        let targets = declared.map(|columns| targets(columns, mariadb)).transpose()?;
        ImageDecoder::new(sources, targets)?.decode(&envelope)
    });
    let record = decoded.map_err(|error| raise(py, &error))?;
    let empty: Arc<str> = "".into();
    let position = (empty.clone(), 0);
    Ok(Batch::new(emit::Batch { database: empty.clone(), table: empty, schema_version: 0, record, position }))
}
