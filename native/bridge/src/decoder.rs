//! The decoder, and what it asks.

use penstock_kernel::emit::dialect::{ddl, DialectOptions};
use penstock_kernel::emit::rows::ChangeFilter;
use penstock_kernel::event::rotate;
use penstock_kernel::gtid::GtidSet;
use penstock_kernel::stream::{self, Answer, Emit, Options, Resume, State};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::batch::Batch;
use crate::convert::{session_of, slice_of, SessionTuple};
use crate::raise::{option_invalid, raise};
use crate::schema::{declared, ColumnTuple};

/// Decodes the event bytes of one byte range.
///
/// Feed it buffers; `state` says what it waits for: "input" (feed more), "batch" (`take_batch`), "table"
/// (`table_request`, then `answer_table`), "statement" (`take_statement`), "prepared" (`prepared_request`, then
/// `answer_prepared` and `feed_prepared`), or "done". Not for use by two threads at once.
#[pyclass(module = "penstock._native")]
pub struct Decoder {
    inner: stream::Decoder,
}

/// Id, commit (file, offset), place (file, start, end).
type PreparedRequest = (String, (String, u64), Option<(String, u64, u64)>);

fn emit_of(py: Python<'_>, text: &str) -> PyResult<Emit> {
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

fn filter_of(py: Python<'_>, changes: Option<Vec<String>>) -> PyResult<ChangeFilter> {
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

fn set_of(py: Python<'_>, text: Option<&str>) -> PyResult<Option<GtidSet>> {
    text.map(GtidSet::parse).transpose().map_err(|error| raise(py, &error))
}

fn dialect_of(
    name: &str,
    message_per_row: bool,
    server_zone_seconds: i32,
    gtid_set: Option<GtidSet>,
) -> DialectOptions {
    DialectOptions { message_per_row, server_zone_seconds, gtid_set, ..DialectOptions::of_name(name) }
}

#[pymethods]
impl Decoder {
    /// `offset` is that of an event; `joint`, where another range goes on, must be as well. With `passing` no transaction is
    /// decoded: what is prepared is noted, and incidents and unknown events pass. `statements` tells whether statements are
    /// handed out; None means where rows are decoded. `dialect` is that of `emit="messages"`; `executed`,
    /// a GTID set, is what was executed before the range, and asks for the executed set in messages that can carry one.
    #[new]
    #[pyo3(signature = (
        *, instance, file, offset=0, epoch=0, file_number=None, head=None, aligned=true, live=false, start=None,
        stop=None, joint=None, passing=false, gtid_after=None, gtid_until=None, time_from_us=None, time_until_us=None, emit="typed",
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
        gtid_after: Option<&str>,
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
        let emit = emit_of(py, emit)?;
        let executed = set_of(py, executed)?;
        let dialect = dialect.map(|name| dialect_of(name, message_per_row, server_zone_seconds, executed));
        let options = Options {
            epoch,
            offset,
            aligned,
            live,
            start,
            stop,
            joint,
            passing,
            gtid_after: set_of(py, gtid_after)?,
            gtid_until: set_of(py, gtid_until)?,
            time_from_us,
            time_until_us,
            emit,
            dialect,
            statements: statements.unwrap_or(matches!(emit, Emit::Typed | Emit::Envelope | Emit::Messages)),
            changes: filter_of(py, changes)?,
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

    /// Take whole events from the front of a buffer; return how many bytes that were.
    ///
    /// Raises the errors of `penstock.errors` only after every whole transaction before them was handed out.
    fn feed(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed(bytes)).map_err(|error| raise(py, &error))
    }

    /// End the input, of which `left` bytes were offered and not taken.
    ///
    /// Raises `FileTruncated` where a transaction is not whole, unless `drop_open` drops it.
    #[pyo3(signature = (left=0, *, drop_open=false))]
    fn finish(&mut self, py: Python<'_>, left: usize, drop_open: bool) -> PyResult<()> {
        let inner = &mut self.inner;
        py.detach(|| inner.finish(left, drop_open)).map_err(|error| raise(py, &error))
    }

    /// What the decoder waits for.
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

    /// Take the batch that is due, or None.
    fn take_batch(&mut self) -> Option<Batch> {
        self.inner.take_batch().map(Batch::new)
    }

    /// Take the statement that is due, or None.
    fn take_statement(&mut self) -> Option<Statement> {
        self.inner.take_statement().map(|inner| Statement { inner })
    }

    /// The table that the decoder asks about, or None.
    fn table_request(&self) -> Option<TableRequest> {
        self.inner.table_request().map(|inner| TableRequest { inner: inner.clone() })
    }

    /// Say whether the statement taken last is told of in messages; without an answer it is.
    fn answer_statement(&mut self, wanted: bool) {
        self.inner.answer_statement(wanted);
    }

    /// Say how the table asked about is to be read.
    ///
    /// Without `columns` and without `from_log` its rows are passed over. `from_log` takes the columns from the log; `columns`
    /// beside it only tell MariaDB's types that a table map shows as plain strings (UUID, INET4, INET6, VECTOR).
    /// `wanted` names the columns to decode, None means all. `declared` fixes the columns of the batch: a column that
    /// rows lack is null and told absent, any other difference raises `SchemaChanged` at the next `feed`. In messages,
    /// types of `columns` stand for the log's own, `primary_key` tells the key where the log does not, and
    /// `shard_columns` decide a row's slot; None means the key.
    #[pyo3(signature = (
        columns=None, *, from_log=false, schema_version=0, wanted=None, declared=None, primary_key=None,
        shard_columns=None,
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
            },
        };
        self.inner.answer_table(answer);
    }

    /// Close the batches of whole transactions, and go on: what follows may be fed.
    ///
    /// A batch that holds rows of an open transaction waits for its end; one of messages is divided.
    fn close_batches(&mut self, py: Python<'_>) -> PyResult<()> {
        self.inner.close_batches().map_err(|error| raise(py, &error))
    }

    /// Forget what was said of tables, so that each is asked about again.
    fn forget_tables(&mut self, py: Python<'_>) -> PyResult<()> {
        self.inner.forget_tables().map_err(|error| raise(py, &error))
    }

    /// Give the open transaction up: batches of whole transactions become available, and nothing more is read.
    fn abandon(&mut self, py: Python<'_>) -> PyResult<()> {
        self.inner.abandon().map_err(|error| raise(py, &error))
    }

    /// Take over the prepared XA transactions that another decoder of the same log remembers.
    fn adopt_prepared(&mut self, before: &mut Decoder) {
        self.inner.adopt_prepared(&mut before.inner);
    }

    /// The prepared XA transaction whose bytes are due, or None where `feed_prepared` waits for more of them.
    ///
    /// Its id, where it is committed (file, offset), and where it lies if that is known (file, start, end).
    fn prepared_request(&self) -> Option<PreparedRequest> {
        self.inner.prepared_request().map(|request| {
            let location = request.location.map(|location| (location.file.to_string(), location.start, location.end));
            (request.id, (request.commit.0.to_string(), request.commit.1), location)
        })
    }

    /// Say where the bytes lie that `feed_prepared` gets, which begin with the transaction's first event.
    ///
    /// `head` is that file's magic and format description; a live server sends its own. Said again, the bytes begin again.
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

    /// Whether `feed_prepared` waits for bytes, or for what it found in them to be answered.
    #[getter]
    fn reads_prepared(&self) -> bool {
        self.inner.reads_prepared()
    }

    /// Where a prepared XA transaction lies that was passed: file, start and end; None for one that is not known.
    fn prepared_place(&self, py: Python<'_>, id: &str) -> PyResult<Option<(String, u64, u64)>> {
        let place = self.inner.prepared_location(id).map_err(|error| raise(py, &error))?;
        Ok(place.map(|place| (place.file.to_string(), place.start, place.end)))
    }

    /// Whether the outcome was passed of an XA transaction of this id that was prepared before all that was passed.
    fn has_outcome(&self, py: Python<'_>, id: &str) -> PyResult<bool> {
        self.inner.has_outcome(id).map_err(|error| raise(py, &error))
    }

    /// All prepared XA transactions that were passed and have no outcome yet: id, file, start and end; in no order.
    fn prepared_places(&self) -> Vec<(String, String, u64, u64)> {
        self.inner
            .prepared_locations()
            .map(|(id, place)| (id, place.file.to_string(), place.start, place.end))
            .collect()
    }

    /// Note an XA transaction that was prepared before what is read.
    fn note_prepared(&mut self, py: Python<'_>, id: &str, file: &str, start: u64, end: u64) -> PyResult<()> {
        self.inner.note_prepared(id, file, start, end).map_err(|error| raise(py, &error))
    }

    /// Take events of a prepared transaction from the front of a buffer; return how many bytes that were.
    ///
    /// Once the last one is taken, the decoder goes on with the range and no longer waits for "prepared".
    fn feed_prepared(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed_prepared(bytes)).map_err(|error| raise(py, &error))
    }

    /// The end of the last whole transaction: file and offset.
    #[getter]
    fn position(&self) -> (&str, u64) {
        self.inner.position()
    }

    /// Where the next event starts, in bytes.
    #[getter]
    fn next_offset(&self) -> u64 {
        self.inner.next_offset()
    }

    /// Whether `position` is known to be the first byte of an event, with no transaction open before it.
    #[getter]
    fn aligned(&self) -> bool {
        self.inner.is_aligned()
    }

    /// Where the open transaction starts, or None.
    fn open_transaction(&self) -> Option<u64> {
        self.inner.open_transaction()
    }

    /// How many changes were handed out of the transaction after `position`, and its start (file number and offset):
    /// `resume_rows` and `resume_start` of the decoder that continues there.
    fn handed_out(&self) -> (u32, Option<(u32, u64)>) {
        self.inner.handed_out().map_or((0, None), |resume| (resume.rows, resume.start))
    }

    /// All transactions seen, those of earlier files included where the log tells, as text.
    #[getter]
    fn gtid_set(&self) -> String {
        self.inner.gtid_set().text()
    }

    /// When the last whole transaction in range was committed, in microseconds since 1970; 0 before the first.
    #[getter]
    fn commit_time_us(&self) -> i64 {
        self.inner.commit_us()
    }

    /// The server's version text, once the format description was read.
    #[getter]
    fn server_version(&self) -> Option<&str> {
        self.inner.format().map(|format| format.server_version.as_str())
    }

    /// Whether the log is MariaDB's.
    #[getter]
    fn mariadb(&self) -> bool {
        self.inner.format().is_some_and(|format| format.mariadb)
    }

    /// The file that follows, once the log said so.
    #[getter]
    fn next_file(&self) -> Option<&str> {
        self.inner.next_file()
    }

    /// Whether the file ended with a word of the server.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Bytes, events, transactions and changes so far.
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

/// A table that was not seen before.
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

    /// How many columns its rows have.
    #[getter]
    fn column_count(&self) -> usize {
        self.inner.column_count
    }

    /// Name, SQL type, character set and nullability of each column, or None where the log does not tell.
    #[getter]
    fn columns(&self) -> Option<Vec<ColumnTuple>> {
        let columns = self.inner.columns.clone()?;
        Some(columns.into_iter().map(|c| (c.name, c.type_text, c.charset, c.nullable)).collect())
    }

    /// Names of the primary key's columns, where the log tells.
    #[getter]
    fn primary_key(&self) -> Vec<&str> {
        self.inner.primary_key.iter().map(|name| &**name).collect()
    }

    /// Whether the log alone tells all columns.
    #[getter]
    fn complete(&self) -> bool {
        self.inner.columns.is_some()
    }

    /// Prove a definition against everything that the table map tells of the table.
    ///
    /// Raises `SchemaMismatch` where they contradict each other, `SchemaInvalid` for a type that cannot be read.
    fn prove(&self, py: Python<'_>, columns: Vec<ColumnTuple>, primary_key: Vec<String>) -> PyResult<()> {
        self.inner.prove(&declared(columns), &primary_key).map_err(|error| raise(py, &error))
    }

    /// Where the table map stands: `file:offset`.
    #[getter]
    fn position(&self) -> String {
        format!("{}:{}", self.inner.file, self.inner.offset)
    }
}

/// A definition (DDL), or a change that was logged as text.
#[pyclass(frozen, module = "penstock._native")]
pub struct Statement {
    inner: stream::Statement,
}

#[pymethods]
impl Statement {
    /// The default database when it ran; may be empty.
    #[getter]
    fn database(&self) -> &str {
        &self.inner.database
    }

    /// What its event says of the session: the databases that it changes, or None where they are not listed, the
    /// character set that a database gets where the statement names none, and the SQL modes that change how text is read.
    #[getter]
    fn session(&self) -> SessionTuple {
        session_of(self.inner.session.clone())
    }

    /// The text.
    #[getter]
    fn text(&self) -> &str {
        &self.inner.text
    }

    /// The database and the table that a definition names first, by its first words alone; None where there is none.
    #[getter]
    fn table(&self) -> Option<(String, String)> {
        let definition = ddl::classify(&self.inner.text, &self.inner.database, self.inner.session.backslash());
        let (database, table) = definition.name_before();
        (!table.is_empty()).then(|| (database.to_owned(), table.to_owned()))
    }

    /// Whether it changes rows that are therefore not in the log.
    #[getter]
    fn is_change(&self) -> bool {
        self.inner.is_change
    }

    /// The databases that it accessed, those behind views, triggers and functions included: [] for any database, None
    /// where the log does not say.
    #[getter]
    fn accessed(&self) -> Option<Vec<String>> {
        self.inner.session.accessed.clone()
    }

    /// Whether its transaction is out of range.
    #[getter]
    fn is_skipped(&self) -> bool {
        self.inner.is_skipped
    }

    /// Where its event starts: `file:offset`.
    #[getter]
    fn position(&self) -> String {
        format!("{}:{}", self.inner.file, self.inner.offset)
    }

    /// Where its event ends: `file:offset`.
    #[getter]
    fn end_position(&self) -> String {
        format!("{}:{}", self.inner.file, self.inner.end_offset)
    }

    /// Where its transaction ends: `file:offset`; None where the transaction's GTID event does not say.
    #[getter]
    fn transaction_end(&self) -> Option<String> {
        self.inner.transaction_end.map(|offset| format!("{}:{offset}", self.inner.file))
    }

    /// When it began, in microseconds since 1970.
    #[getter]
    fn timestamp_us(&self) -> i64 {
        self.inner.timestamp_us
    }

    /// The GTID of its transaction; may be empty.
    #[getter]
    fn gtid(&self) -> &str {
        &self.inner.gtid
    }
}
