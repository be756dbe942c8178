//! Decodes binlog events for Python: the decoder, and its requests for tables.

use penstock_kernel::emit::dialect::DialectOptions;
use penstock_kernel::emit::rows::ChangeFilter;
use penstock_kernel::event::rotate;
use penstock_kernel::gtid::GtidSet;
use penstock_kernel::stream::{self, Answer, Emit, Options, Resume, State};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::batch::Batch;
use crate::convert::slice_of;
use crate::raise::{option_invalid, raise};
use crate::schema::{declared, ColumnTuple};
use crate::statement::Statement;

/// Decodes the events of a byte range.
///
/// After each buffer, `state` tells the caller what to do next: "input" (feed more), "batch" (`take_batch`), "table"
/// (`table_request`, then `answer_table`), "statement" (`take_statement`), "prepared" (`prepared_request`, then
/// `answer_prepared` and `feed_prepared`), or "done". Not safe for concurrent use.
#[pyclass(module = "penstock._native")]
pub struct Decoder {
    inner: stream::Decoder,
}

/// Id, commit (file, offset), location (file, start, end).
type PreparedRequest = (String, (String, u64), Option<(String, u64, u64)>);

fn parse_emit(py: Python<'_>, text: &str) -> PyResult<Emit> {
    match text {
        "typed" => Ok(Emit::Typed),
        "envelope" => Ok(Emit::Envelope),
        "events" => Ok(Emit::Events),
        "transactions" => Ok(Emit::Transactions),
        "messages" => Ok(Emit::Messages),
        other => {
            Err(option_invalid(py, format!("`{other}` is no shape: typed, envelope, events, transactions or messages")))
        }
    }
}

fn parse_changes(py: Python<'_>, changes: Option<Vec<String>>) -> PyResult<ChangeFilter> {
    let Some(changes) = changes else { return Ok(ChangeFilter::default()) };
    let mut filter = ChangeFilter { insert: false, before: false, after: false, delete: false };
    for change in changes {
        match change.as_str() {
            "insert" => filter.insert = true,
            "update_preimage" => filter.before = true,
            "update_postimage" => filter.after = true,
            "update" => (filter.before, filter.after) = (true, true),
            "delete" => filter.delete = true,
            other => return Err(option_invalid(py, format!("`{other}` is no kind of change"))),
        }
    }
    Ok(filter)
}

fn parse_set(py: Python<'_>, text: Option<&str>) -> PyResult<Option<GtidSet>> {
    text.map(GtidSet::parse).transpose().map_err(|error| raise(py, &error))
}

fn dialect_options(
    name: &str,
    message_per_row: bool,
    server_zone_seconds: i32,
    gtid_set: Option<GtidSet>,
) -> DialectOptions {
    DialectOptions { message_per_row, server_zone_seconds, gtid_set, ..DialectOptions::of_name(name) }
}

#[pymethods]
impl Decoder {
    /// `offset` is the start of an event. `joint` is where the next range begins, also the start of an event. With
    /// `passing`, transactions are not decoded: prepared transactions are recorded, and incidents and unknown events
    /// are ignored. `statements` says whether to return statements; None means yes if rows are decoded. `dialect`
    /// applies to `emit="messages"`. `executed` is the GTID set executed before the range; if it is given, messages in
    /// dialects with a field for the executed set include it.
    #[new]
    #[pyo3(signature = (
        *, instance, file, offset=0, epoch=0, file_number=None, head=None, aligned=true, live=false, start=None,
        stop=None, joint=None, passing=false, gtid_before="", gtid_after=None, gtid_repeated=None, gtid_until=None, time_from_us=None, time_until_us=None, emit="typed",
        statements=None, changes=None, batch_rows_max=65_536, batch_bytes_max=8_388_608, held_bytes_max=67_108_864,
        prepared_bytes_max=16_777_216, verify_checksum=true, resume_rows=0, resume_start=None, dialect=None, message_per_row=false, server_zone_seconds=0, executed=None,
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        instance: &str,
        file: &str,
        offset: u64,
        epoch: u32,
        file_number: Option<u32>,
        head: Option<PyBuffer<u8>>,
        aligned: bool,
        live: bool,
        start: Option<(u32, u64)>,
        stop: Option<(u32, u64)>,
        joint: Option<u64>,
        passing: bool,
        gtid_before: &str,
        gtid_after: Option<&str>,
        gtid_repeated: Option<&str>,
        gtid_until: Option<&str>,
        time_from_us: Option<i64>,
        time_until_us: Option<i64>,
        emit: &str,
        statements: Option<bool>,
        changes: Option<Vec<String>>,
        batch_rows_max: usize,
        batch_bytes_max: usize,
        held_bytes_max: usize,
        prepared_bytes_max: usize,
        verify_checksum: bool,
        resume_rows: u32,
        resume_start: Option<(u32, u64)>,
        dialect: Option<&str>,
        message_per_row: bool,
        server_zone_seconds: i32,
        executed: Option<&str>,
    ) -> PyResult<Decoder> {
        let number = file_number.map_or_else(|| rotate::file_number(file), Ok).map_err(|error| raise(py, &error))?;
        let emit = parse_emit(py, emit)?;
        let executed = parse_set(py, executed)?;
        let dialect = dialect.map(|name| dialect_options(name, message_per_row, server_zone_seconds, executed));
        let options = Options {
            epoch,
            offset,
            aligned,
            live,
            start,
            stop,
            joint,
            passing,
            gtid_before: parse_set(py, Some(gtid_before))?.unwrap_or_default(),
            gtid_after: parse_set(py, gtid_after)?,
            gtid_repeated: parse_set(py, gtid_repeated)?,
            gtid_until: parse_set(py, gtid_until)?,
            time_from_us,
            time_until_us,
            emit,
            dialect,
            statements: statements.unwrap_or(matches!(emit, Emit::Typed | Emit::Envelope | Emit::Messages)),
            changes: parse_changes(py, changes)?,
            batch_rows_max,
            batch_bytes_max,
            held_bytes_max,
            prepared_bytes_max,
            verify_checksum,
            resume: (resume_rows > 0).then_some(Resume { start: resume_start, rows: resume_rows }),
            ..Options::of_file(instance, file, number)
        };
        let head = head.as_ref().map(slice_of).transpose()?;
        stream::Decoder::new(options, head).map(|inner| Decoder { inner }).map_err(|error| raise(py, &error))
    }

    /// Consume complete events from the start of a buffer; return the number of consumed bytes.
    ///
    /// Raises an exception from `penstock.errors` only after all complete transactions before the error were returned.
    fn feed(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed(bytes)).map_err(|error| raise(py, &error))
    }

    /// End the input. `left` is the number of offered bytes that the decoder did not consume.
    ///
    /// Raises `FileTruncated` if a transaction is incomplete, unless `drop_open` drops it.
    #[pyo3(signature = (left=0, *, drop_open=false))]
    fn finish(&mut self, py: Python<'_>, left: usize, drop_open: bool) -> PyResult<()> {
        let inner = &mut self.inner;
        py.detach(|| inner.finish(left, drop_open)).map_err(|error| raise(py, &error))
    }

    /// The action that the decoder expects from the caller, such as "input" or "batch".
    #[getter]
    fn state(&self) -> &'static str {
        match self.inner.state() {
            State::Input => "input",
            State::Batch => "batch",
            State::Table => "table",
            State::Statement => "statement",
            State::Prepared => "prepared",
            State::Done => "done",
        }
    }

    /// Take the next batch, or None.
    fn take_batch(&mut self) -> Option<Batch> {
        self.inner.take_batch().map(Batch::new)
    }

    /// Take the next statement, or None.
    fn take_statement(&mut self) -> Option<Statement> {
        self.inner.take_statement().map(Statement::new)
    }

    /// Return the table whose definition the decoder asks for, or None.
    fn table_request(&self) -> Option<TableRequest> {
        self.inner.table_request().map(|inner| TableRequest { inner: inner.clone() })
    }

    /// Tell the decoder whether the last returned statement becomes a message. Without an answer, it does.
    fn answer_statement(&mut self, wanted: bool) {
        self.inner.answer_statement(wanted);
    }

    /// Say how to read the requested table.
    ///
    /// Without `columns` and `from_log`, its rows are skipped. `from_log` takes the columns from the log; then
    /// `columns` only supplies MariaDB's types that are logged as plain strings (UUID, INET4, INET6, VECTOR).
    /// `wanted` names the columns to decode; None means all. `declared` fixes the columns of the batch: a column that
    /// is missing from the rows is null and reported as absent, and any other difference raises `SchemaChanged` at
    /// the next `feed`. In messages, the types of `columns` replace the log's own, `primary_key` supplies a key that
    /// is not logged, and `shard_columns` determine the slot of a row; None means the key. With `judged`, messages
    /// have only the rows that `judge` allows.
    #[pyo3(signature = (
        columns=None, *, from_log=false, schema_version=0, wanted=None, declared=None, primary_key=None,
        shard_columns=None, judged=false,
    ))]
    #[allow(clippy::too_many_arguments)]
    fn answer_table(
        &mut self,
        columns: Option<Vec<ColumnTuple>>,
        from_log: bool,
        schema_version: i32,
        wanted: Option<Vec<String>>,
        declared: Option<Vec<ColumnTuple>>,
        primary_key: Option<Vec<String>>,
        shard_columns: Option<Vec<String>>,
        judged: bool,
    ) {
        let answer = match (columns, from_log) {
            (None, false) => Answer::Skip,
            (columns, from_log) => Answer::Read {
                columns: columns.map(crate::schema::declared),
                from_log,
                schema_version,
                wanted,
                declared: declared.map(self::declared),
                primary_key: primary_key.unwrap_or_default(),
                shard_columns,
                judged,
            },
        };
        self.inner.answer_table(answer);
    }

    /// Add the visible images of rows of a `judged` table, in log order and before the rows are fed. For each change:
    /// the commit version, the event's offset, and 1 for the image before it plus 2 for the image after it.
    fn judge(
        &mut self,
        py: Python<'_>,
        table: (String, String),
        versions: PyBuffer<i64>,
        offsets: PyBuffer<i64>,
        codes: PyBuffer<u8>,
    ) -> PyResult<()> {
        let (versions, offsets, codes) = (versions.to_vec(py)?, offsets.to_vec(py)?, codes.to_vec(py)?);
        let name = (table.0.as_str(), table.1.as_str());
        self.inner.judge(name, &versions, &offsets, &codes).map_err(|error| raise(py, &error))
    }

    /// Close the batches of complete transactions. The decoder can be fed more bytes afterwards.
    ///
    /// A batch with rows of the open transaction stays open until the transaction ends. A batch of messages is split
    /// instead.
    fn close_batches(&mut self, py: Python<'_>) -> PyResult<()> {
        self.inner.close_batches().map_err(|error| raise(py, &error))
    }

    /// Drop all answers about tables, so that the decoder asks again.
    fn forget_tables(&mut self, py: Python<'_>) -> PyResult<()> {
        self.inner.forget_tables().map_err(|error| raise(py, &error))
    }

    /// Drop the open transaction and stop. Batches of complete transactions become available.
    fn abandon(&mut self, py: Python<'_>) -> PyResult<()> {
        self.inner.abandon().map_err(|error| raise(py, &error))
    }

    /// Copy the prepared XA transactions that another decoder of the same log recorded.
    fn adopt_prepared(&mut self, before: &mut Decoder) {
        self.inner.adopt_prepared(&mut before.inner);
    }

    /// Return the prepared XA transaction whose bytes are needed; None while `feed_prepared` still needs bytes of the
    /// current transaction.
    ///
    /// The tuple consists of the transaction's id, the position of its commit (file, offset), and its location if known
    /// (file, start, end).
    fn prepared_request(&self) -> Option<PreparedRequest> {
        self.inner.prepared_request().map(|request| {
            let location = request.location.map(|location| (location.file.to_string(), location.start, location.end));
            (request.id, (request.commit.0.to_string(), request.commit.1), location)
        })
    }

    /// Set the location of the bytes for `feed_prepared`, which start with the transaction's first event.
    ///
    /// `head` is the magic and format description of the file; a live server sends them itself. A second call starts
    /// again at the first event.
    #[pyo3(signature = (file, start, end, head=None))]
    fn answer_prepared(
        &mut self,
        py: Python<'_>,
        file: &str,
        start: u64,
        end: u64,
        head: Option<PyBuffer<u8>>,
    ) -> PyResult<()> {
        let head = head.as_ref().map(slice_of).transpose()?;
        self.inner.answer_prepared(file, start, end, head).map_err(|error| raise(py, &error))
    }

    /// Whether the decoder waits for `feed_prepared`, or for an answer about the bytes fed to it.
    #[getter]
    fn reads_prepared(&self) -> bool {
        self.inner.reads_prepared()
    }

    /// Return the location of a prepared XA transaction that was read: file, start and end; None if it is unknown.
    fn prepared_place(&self, py: Python<'_>, id: &str) -> PyResult<Option<(String, u64, u64)>> {
        let location = self.inner.prepared_location(id).map_err(|error| raise(py, &error))?;
        Ok(location.map(|location| (location.file.to_string(), location.start, location.end)))
    }

    /// For an XA transaction that was prepared before the range, return whether its commit or rollback was read.
    fn has_outcome(&self, py: Python<'_>, id: &str) -> PyResult<bool> {
        self.inner.has_outcome(id).map_err(|error| raise(py, &error))
    }

    /// Return all prepared XA transactions without an outcome: id, file, start and end, in any order.
    fn prepared_places(&self) -> Vec<(String, String, u64, u64)> {
        self.inner
            .prepared_locations()
            .map(|(id, location)| (id, location.file.to_string(), location.start, location.end))
            .collect()
    }

    /// Record an XA transaction that was prepared before the range.
    fn note_prepared(&mut self, py: Python<'_>, id: &str, file: &str, start: u64, end: u64) -> PyResult<()> {
        self.inner.note_prepared(id, file, start, end).map_err(|error| raise(py, &error))
    }

    /// Consume events of a prepared transaction from the start of a buffer; return the number of consumed bytes.
    ///
    /// After the last event, the decoder continues with the range and leaves the state "prepared".
    fn feed_prepared(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed_prepared(bytes)).map_err(|error| raise(py, &error))
    }

    /// The end of the last complete transaction: file and offset.
    #[getter]
    fn position(&self) -> (&str, u64) {
        self.inner.position()
    }

    /// The offset of the next event, in bytes.
    #[getter]
    fn next_offset(&self) -> u64 {
        self.inner.next_offset()
    }

    /// Whether `position` is known to be the start of an event with no open transaction before it.
    #[getter]
    fn aligned(&self) -> bool {
        self.inner.is_aligned()
    }

    /// Return the offset where the open transaction starts, or None.
    fn open_transaction(&self) -> Option<u64> {
        self.inner.open_transaction()
    }

    /// Return how many changes after `position` were already emitted, and the start (file number and offset) of their
    /// transaction: these are the arguments `resume_rows` and `resume_start` of the decoder that continues there.
    fn handed_out(&self) -> (u32, Option<(u32, u64)>) {
        self.inner.handed_out().map_or((0, None), |resume| (resume.rows, resume.start))
    }

    /// The GTID set of all transactions read, as text. The set includes the transactions of earlier files if the log
    /// lists them.
    #[getter]
    fn gtid_set(&self) -> String {
        self.inner.gtid_set().text()
    }

    /// Commit time of the last complete transaction in the range, in microseconds since 1970; 0 before the first.
    #[getter]
    fn commit_time_us(&self) -> i64 {
        self.inner.commit_us()
    }

    /// The server's version text, once the format description was read.
    #[getter]
    fn server_version(&self) -> Option<&str> {
        self.inner.format().map(|format| format.server_version.as_str())
    }

    /// Whether the log is from MariaDB.
    #[getter]
    fn mariadb(&self) -> bool {
        self.inner.format().is_some_and(|format| format.mariadb)
    }

    /// The name of the next file, once the log contains it.
    #[getter]
    fn next_file(&self) -> Option<&str> {
        self.inner.next_file()
    }

    /// Whether the server closed the file properly, by a rotation or a shutdown.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Numbers of bytes, events, transactions and changes read so far.
    #[getter]
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.inner.counters();
        let out = PyDict::new(py);
        out.set_item("bytes", counters.bytes)?;
        out.set_item("events", counters.events)?;
        out.set_item("transactions", counters.transactions)?;
        out.set_item("changes", counters.changes)?;
        Ok(out)
    }
}

/// A question to the caller: how to read a table that is new to the decoder.
#[pyclass(frozen, module = "penstock._native")]
pub struct TableRequest {
    inner: stream::TableRequest,
}

#[pymethods]
impl TableRequest {
    /// The database.
    #[getter]
    fn database(&self) -> &str {
        &self.inner.database
    }

    /// The table.
    #[getter]
    fn table(&self) -> &str {
        &self.inner.table
    }

    /// The number of columns in the table's rows.
    #[getter]
    fn column_count(&self) -> usize {
        self.inner.column_count
    }

    /// Name, SQL type, character set and nullability of each column; None if the log does not describe them all.
    #[getter]
    fn columns(&self) -> Option<Vec<ColumnTuple>> {
        let columns = self.inner.columns.clone()?;
        Some(columns.into_iter().map(|c| (c.name, c.type_text, c.charset, c.nullable)).collect())
    }

    /// Names of the primary key's columns, if they are logged.
    #[getter]
    fn primary_key(&self) -> Vec<&str> {
        self.inner.primary_key.iter().map(|name| &**name).collect()
    }

    /// Whether the log alone describes all columns.
    #[getter]
    fn complete(&self) -> bool {
        self.inner.columns.is_some()
    }

    /// Check a definition against everything that the table map logs about the table.
    ///
    /// Raises `SchemaMismatch` if they contradict each other, `SchemaInvalid` for a type that cannot be parsed.
    fn prove(
        &self,
        py: Python<'_>,
        columns: Vec<ColumnTuple>,
        primary_key: Vec<String>,
        visible: Vec<Option<bool>>,
    ) -> PyResult<()> {
        self.inner.prove(&declared(columns), &primary_key, &visible).map_err(|error| raise(py, &error))
    }

    /// The position of the table map: `file:offset`.
    #[getter]
    fn position(&self) -> String {
        format!("{}:{}", self.inner.file, self.inner.offset)
    }
}
