//! Reads TiDB's payloads: their heads, the events that store them, and the transactions in them.

use penstock_kernel::error::{Error, Result};
use penstock_kernel::tidb::binlog::{self, Binlog};
use penstock_kernel::tidb::payload_events;
use penstock_kernel::tidb::transcoder::{DdlStatement, Pieces, Transcoder};
use penstock_kernel::write::file as log_file;
use penstock_kernel::write::transaction::WrittenSession;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::slice_of;
use crate::raise::raise;

/// The head of a payload: kind (0 Prewrite, 1 Commit, 2 Rollback, 3 PreDDL, 4 PostDDL), start timestamp, commit
/// timestamp, DDL job.
type Head = (u8, i64, i64, i64);

fn slices(payloads: &[PyBuffer<u8>]) -> PyResult<Vec<&[u8]>> {
    payloads.iter().map(slice_of).collect()
}

/// Return the head of each payload: its kind (0 Prewrite, 1 Commit, 2 Rollback, 3 PreDDL, 4 PostDDL), start timestamp,
/// commit timestamp and DDL job; a missing field is 0.
///
/// Raises `EventMalformed`, with the index, for a payload that is not a `Binlog` message.
#[pyfunction]
pub fn tidb_heads(py: Python<'_>, payloads: Vec<PyBuffer<u8>>) -> PyResult<Vec<Head>> {
    let slices = slices(&payloads)?;
    let read = |(index, payload): (usize, &&[u8])| -> Result<Head> {
        let head = Binlog::read(payload).map_err(|error| error.within(&format!("TiDB payload {index}")))?;
        Ok((head.kind as u8, head.start_ts, head.commit_ts, head.ddl_job_id))
    };
    py.detach(|| slices.iter().enumerate().map(read).collect::<Result<_>>()).map_err(|error| raise(py, &error))
}

fn view<'a>(py: Python<'_>, payload: &'a PyBuffer<u8>) -> PyResult<Binlog<'a>> {
    Binlog::read(slice_of(payload)?).map_err(|error: Error| raise(py, &error))
}

/// Return the cluster that a `WriteBinlogReq` names, and the offsets at which its payload starts and ends.
///
/// Raises `EventMalformed`.
#[pyfunction]
pub fn tidb_write_request(py: Python<'_>, request: PyBuffer<u8>) -> PyResult<(u64, usize, usize)> {
    let (cluster_id, payload) = binlog::write_request(slice_of(&request)?).map_err(|error| raise(py, &error))?;
    Ok((cluster_id, payload.start, payload.end))
}

/// Return the key under which TiKV stores the outcome of a payload's transaction; empty if the payload has none.
///
/// Raises `EventMalformed`.
#[pyfunction]
pub fn tidb_prewrite_key<'py>(py: Python<'py>, payload: PyBuffer<u8>) -> PyResult<Bound<'py, PyBytes>> {
    Ok(PyBytes::new(py, view(py, &payload)?.prewrite_key))
}

/// Return the statement, the job and the schema state of a DDL; an empty text and zeros for a payload of rows.
///
/// Raises `EventMalformed`.
#[pyfunction]
pub fn tidb_ddl(py: Python<'_>, payload: PyBuffer<u8>) -> PyResult<(String, i64, i32)> {
    let head = view(py, &payload)?;
    Ok((head.query(), head.ddl_job_id, head.ddl_schema_state))
}

/// Return the Commit with the content of its Prewrite, as a Pump sends it to Drainers.
///
/// Raises `EventMalformed` if the payloads are not a Prewrite and a Commit with the same start timestamp.
#[pyfunction]
pub fn tidb_matched<'py>(
    py: Python<'py>,
    prewrite: PyBuffer<u8>,
    commit: PyBuffer<u8>,
) -> PyResult<Bound<'py, PyBytes>> {
    let (prewrite, commit) = (slice_of(&prewrite)?, slice_of(&commit)?);
    let matched = py.detach(|| binlog::matched(prewrite, commit)).map_err(|error| raise(py, &error))?;
    Ok(PyBytes::new(py, &matched))
}

/// Return the events that hold the unchanged payloads. The first event starts at `offset` of a file.
///
/// A payload of over 512 MiB takes several consecutive events. `time_s` is the time of the events, in seconds since
/// 1970.
#[pyfunction]
#[pyo3(signature = (payloads, offset, *, server_id, time_s))]
pub fn tidb_payload_events<'py>(
    py: Python<'py>,
    payloads: Vec<PyBuffer<u8>>,
    offset: u64,
    server_id: u32,
    time_s: u32,
) -> PyResult<Bound<'py, PyBytes>> {
    let slices = slices(&payloads)?;
    let events = py.detach(|| payload_events::events(&slices, offset, server_id, time_s));
    Ok(PyBytes::new(py, &events.map_err(|error| raise(py, &error))?))
}

/// Return the payloads in a buffer of whole events; events of other types are skipped.
///
/// Raises `ChecksumMismatch`, and `EventMalformed` for bytes that end inside an event or a payload.
#[pyfunction]
pub fn tidb_payloads<'py>(py: Python<'py>, events: PyBuffer<u8>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let events = slice_of(&events)?;
    let payloads = py.detach(|| payload_events::payloads(events)).map_err(|error| raise(py, &error))?;
    Ok(payloads.iter().map(|payload| PyBytes::new(py, payload)).collect())
}

/// Return the first bytes of a log file: the magic, FORMAT_DESCRIPTION and an empty PREVIOUS_GTIDS.
#[pyfunction]
#[pyo3(signature = (*, server_id, time_s))]
pub fn tidb_file_head(py: Python<'_>, server_id: u32, time_s: u32) -> PyResult<Bound<'_, PyBytes>> {
    let head = log_file::head(server_id, time_s).map_err(|error| raise(py, &error))?;
    Ok(PyBytes::new(py, &head))
}

/// Return the ROTATE event that ends a log file at `offset` and names the next file, `file`.
#[pyfunction]
#[pyo3(signature = (file, offset, *, server_id, time_s))]
pub fn tidb_rotation<'py>(
    py: Python<'py>,
    file: &str,
    offset: u64,
    server_id: u32,
    time_s: u32,
) -> PyResult<Bound<'py, PyBytes>> {
    let rotation = log_file::rotation(file, offset, server_id, time_s).map_err(|error| raise(py, &error))?;
    Ok(PyBytes::new(py, &rotation))
}

/// Transcodes transactions of a TiDB cluster into transactions of a MySQL binlog.
///
/// The bytes depend only on payloads, definitions and position, so transcoding again after a crash gives the same
/// bytes.
#[pyclass(module = "penstock._native")]
pub struct TidbTranscoder {
    inner: Transcoder,
}

#[pymethods]
impl TidbTranscoder {
    #[new]
    #[pyo3(signature = (*, cluster_id, server_id))]
    fn new(cluster_id: u64, server_id: u32) -> TidbTranscoder {
        TidbTranscoder { inner: Transcoder::new(cluster_id, server_id) }
    }

    /// Set the definition of a table (TiDB's `TableInfo` as JSON) that applies from a schema version on.
    ///
    /// Return the table's number. Rows that commit at or after `commit_ts` are written with this definition whatever
    /// their schema version, because the statement that changed the table precedes them in the log. Rows of the table's
    /// partitions count as rows of the table. The last eight definitions of a table are kept. A table with a column
    /// type that MySQL lacks is refused when its rows arrive. Raises `SchemaInvalid` for text that is not a definition.
    fn define(
        &mut self,
        py: Python<'_>,
        database: &str,
        table_info: PyBuffer<u8>,
        schema_version: i64,
        commit_ts: i64,
    ) -> PyResult<i64> {
        let definition = slice_of(&table_info)?;
        self.inner.define(database, definition, schema_version, commit_ts).map_err(|error| raise(py, &error))
    }

    /// Forget a table and its partitions. The table's rows are refused from now on.
    fn forget(&mut self, table_id: i64) {
        self.inner.forget(table_id);
    }

    /// Return the schema version under which a payload's rows were written, and the numbers of the tables that they
    /// belong to, in the order of the payload.
    ///
    /// Raises `EventMalformed`.
    #[staticmethod]
    fn tables_of(py: Python<'_>, payload: PyBuffer<u8>) -> PyResult<(i64, Vec<i64>)> {
        let payload = slice_of(&payload)?;
        py.detach(|| Transcoder::tables_of(payload)).map_err(|error| raise(py, &error))
    }

    /// Return the event bytes of a committed DDL at `offset` of a file.
    ///
    /// `query`, if given, replaces the payload's statement. `sql_mode` uses MySQL's bits, and `time_zone` is empty if
    /// the statement does not depend on it. Raises `EventMalformed` for a payload that is not a committed DDL.
    #[pyo3(signature = (payload, database, offset, query=None, *, sql_mode=0, time_zone=""))]
    #[allow(clippy::too_many_arguments)]
    fn ddl<'py>(
        &self,
        py: Python<'py>,
        payload: PyBuffer<u8>,
        database: &str,
        offset: u64,
        query: Option<&str>,
        sql_mode: u64,
        time_zone: &str,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let statement = DdlStatement { database, text: query, session: WrittenSession { sql_mode, time_zone } };
        let events = self.inner.ddl(slice_of(&payload)?, offset, &statement);
        Ok(PyBytes::new(py, &events.map_err(|error| raise(py, &error))?))
    }

    /// Combine payloads, which all have the same commit timestamp, into one transaction at `offset` of a file. Return
    /// an iterator over its pieces, each of which consists of whole events.
    ///
    /// A transaction of up to 4 MiB is one piece; a larger one has pieces of about 1 MiB or one row, so memory is
    /// bounded. The whole transaction is checked before the first piece. Raises `EventMalformed` for payloads that are
    /// not committed rows with the same commit timestamp, or that are inconsistent; `SchemaUnknown` for rows of a table
    /// without a definition for their schema version; `EventUnsupported` for a column type that MySQL lacks;
    /// `SchemaMismatch` and `ValueMalformed` for rows that do not fit the definition.
    fn transaction(&self, py: Python<'_>, payloads: Vec<PyBuffer<u8>>, offset: u64) -> PyResult<TidbPieces> {
        let slices = slices(&payloads)?;
        let inner = py.detach(|| self.inner.transaction(&slices, offset)).map_err(|error| raise(py, &error))?;
        Ok(TidbPieces { payloads, inner })
    }
}

/// The pieces of a transaction that is being transcoded.
#[pyclass(module = "penstock._native")]
pub struct TidbPieces {
    payloads: Vec<PyBuffer<u8>>,
    inner: Pieces,
}

#[pymethods]
impl TidbPieces {
    fn __iter__(pieces: PyRef<'_, Self>) -> PyRef<'_, Self> {
        pieces
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let slices = slices(&self.payloads)?;
        let inner = &mut self.inner;
        let piece = py.detach(|| inner.next(&slices)).map_err(|error| raise(py, &error))?;
        Ok(piece.map(|piece| PyBytes::new(py, &piece)))
    }
}
