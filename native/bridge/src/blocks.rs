//! Cuts the bytes of a source into blocks for a durable log, and writes and reads the heads of segments.

use std::ffi::c_int;
use std::sync::Arc;

use bytes::Bytes;
use penstock_kernel::blocks::{self, Counts, HeadParts, Settings, State};
use penstock_kernel::error::{Error, ErrorKind};
use penstock_kernel::gtid::{Gtid, GtidSet};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyAssertionError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::{session_of, slice_of, SessionTuple};
use crate::raise::{option_invalid, raise};
use crate::socket::Socket;

/// A read of a socket asks for this many bytes. They stay in the processor's cache until they are cut.
const DRAIN_READ_BYTES: usize = 256 << 10;

/// Event bytes from the cutter, exposed read-only through the buffer protocol without a copy.
#[pyclass(frozen, module = "penstock._native")]
pub struct Chunk {
    bytes: Bytes,
}

impl Chunk {
    /// Exposes the bytes of a vector.
    pub fn whole(bytes: Vec<u8>) -> Chunk {
        Chunk { bytes: bytes.into() }
    }
}

#[pymethods]
impl Chunk {
    fn __len__(&self) -> usize {
        self.bytes.len()
    }

    /// Exposes the bytes, read-only.
    ///
    /// # Safety
    ///
    /// Python calls this with a view for the function to fill in.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = &slf.get().bytes;
        let length = ffi::Py_ssize_t::try_from(bytes.len()).map_err(|_| PyAssertionError::new_err("a long chunk"))?;
        let first = bytes.as_ptr().cast_mut().cast();
        const READ_ONLY: c_int = 1;
        // SAFETY: `view` belongs to Python. `first` and `length` describe a single allocation that neither moves nor
        // changes: the class is frozen and hands out no `&mut`, `Bytes` are never written, and a request for write
        // access fails, so nothing writes through the cast pointer. The view owns a reference to the chunk, and only
        // its drop releases the memory.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), first, length, READ_ONLY, flags) };
        if status == 0 {
            Ok(())
        } else {
            Err(PyErr::take(slf.py()).unwrap_or_else(|| PyAssertionError::new_err("no buffer and no reason")))
        }
    }
}

/// A DDL statement for Python: text, database, source offsets of the start and end of its event, and session.
type StatementTuple = (String, String, u64, u64, SessionTuple);

/// Counters of what cutters have processed, for metrics. They outlive the cutters, and any thread may read them.
///
/// Each of the first `tables_max` tables is counted separately; all other tables share one set of counters. A
/// transaction is large if its events have more than `large_bytes` bytes.
#[pyclass(frozen, module = "penstock._native")]
pub struct CutCounts {
    counts: Arc<Counts>,
}

#[pymethods]
impl CutCounts {
    #[new]
    #[pyo3(signature = (tables_max=0, large_bytes=u64::MAX))]
    fn new(tables_max: usize, large_bytes: u64) -> CutCounts {
        CutCounts { counts: Arc::new(Counts::new(tables_max, large_bytes)) }
    }

    /// Number of complete transactions.
    #[getter]
    fn transactions(&self) -> u64 {
        self.counts.transactions()
    }

    /// Number of large transactions.
    #[getter]
    fn large_transactions(&self) -> u64 {
        self.counts.large_transactions()
    }

    /// Return the number of events by type. Types have the names that SHOW BINLOG EVENTS prints, so a name may occur
    /// more than once.
    fn events(&self) -> Vec<(&'static str, u64)> {
        self.counts.events()
    }

    /// Return the numbers of inserts, updates and deletes by table; the key "" has the totals of the tables that are
    /// not counted separately.
    fn rows(&self) -> Vec<(String, [u64; 3])> {
        let mut rows = self.counts.tables_rows();
        rows.push((String::new(), self.counts.other_rows()));
        rows
    }
}

/// Cuts the bytes of a log into blocks: event bytes to store, and index records.
///
/// After each `feed`, `state` tells the caller what to do next: "input" (feed more), "file" (a new source file begins:
/// take the output, then call `take_file`), "hole" (source bytes are missing: take the output, then call `take_hole`).
/// Output from before an error can still be taken. Not safe for concurrent use.
#[pyclass(module = "penstock._native")]
pub struct BlockCutter {
    inner: blocks::BlockCutter,
    /// Received packets that are not cut yet, and room for more.
    received: Vec<u8>,
}

/// Why a drain ended early.
enum DrainError {
    Cut(Error),
    Socket(std::io::Error),
}

/// Drains a socket into a cutter, as `BlockCutter.drain` describes. `received` is the memory to read into.
fn drain<'a>(
    cutter: &mut blocks::BlockCutter,
    socket: &mut Socket,
    received: &'a mut Vec<u8>,
    packets: &[u8],
    bytes_max: usize,
) -> Result<&'a [u8], DrainError> {
    let (mut filled, mut read) = (packets.len(), 0);
    received.resize(received.len().max(filled + DRAIN_READ_BYTES), 0);
    received[..filled].copy_from_slice(packets);
    loop {
        // A long packet is consumed in pieces, so the incomplete packet at the start has a bounded size.
        received.resize(received.len().max(filled + DRAIN_READ_BYTES), 0);
        let room = &mut received[filled..filled + DRAIN_READ_BYTES];
        match socket.read(room).map_err(DrainError::Socket)? {
            // The caller's next read reports the end of the connection.
            None | Some(0) => break,
            Some(size) => {
                filled += size;
                read += size;
            }
        }
        let consumed = cutter.feed_packets(&received[..filled]).map_err(DrainError::Cut)?;
        received.copy_within(consumed..filled, 0);
        filled -= consumed;
        let stopped = cutter.state() != State::Input || cutter.ended() || cutter.server_error().is_some();
        if stopped || read >= bytes_max {
            break;
        }
    }
    Ok(&received[..filled])
}

fn parse(py: Python<'_>, text: &str) -> PyResult<GtidSet> {
    GtidSet::parse(text).map_err(|error| raise(py, &error))
}

/// Whether the log comes from MariaDB.
fn is_mariadb(py: Python<'_>, flavor: &str) -> PyResult<bool> {
    match flavor {
        "mysql" => Ok(false),
        "mariadb" => Ok(true),
        other => Err(option_invalid(py, format!("`{other}` is no flavor: mysql or mariadb"))),
    }
}

fn gtid_text(gtid: &Gtid) -> String {
    let mut out = String::new();
    gtid.write(&mut out);
    out
}

#[pymethods]
impl BlockCutter {
    /// `file` and `offset` locate the first byte in the source, which must be the start of an event between
    /// transactions. A server's dump (`live`) includes the format description. For a file or segment, `head` supplies
    /// it: the magic and format description, unless `offset` is 0 or 4.
    #[new]
    #[pyo3(signature = (
        *, epoch, file, offset, flavor, live, gtid_set="", block_bytes=65_536, time_max_us=0, head=None,
        semi_sync=false, statements=true, counts=None,
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        epoch: u32,
        file: &str,
        offset: u64,
        flavor: &str,
        live: bool,
        gtid_set: &str,
        block_bytes: u64,
        time_max_us: i64,
        head: Option<PyBuffer<u8>>,
        semi_sync: bool,
        statements: bool,
        counts: Option<&CutCounts>,
    ) -> PyResult<BlockCutter> {
        is_mariadb(py, flavor)?;
        let settings = Settings {
            epoch,
            file: file.into(),
            offset,
            gtid_set: parse(py, gtid_set)?,
            block_bytes,
            time_max_us,
            live,
            semi_sync,
            statements,
        };
        let head = head.as_ref().map(slice_of).transpose()?;
        let mut inner = blocks::BlockCutter::new(settings, head).map_err(|error| raise(py, &error))?;
        if let Some(counts) = counts {
            inner = inner.with_counts(counts.counts.clone());
        }
        Ok(BlockCutter { inner, received: Vec::new() })
    }

    /// Consume complete events from the start of a buffer; return the number of consumed bytes.
    ///
    /// Exceptions from `penstock.errors` carry the position.
    fn feed(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed(bytes)).map_err(|error| raise(py, &error))
    }

    /// Consume packets of a dump from the start of a buffer, long packets in pieces; return the number of consumed
    /// bytes.
    ///
    /// Exceptions from `penstock.errors` carry the position; a missing packet raises `ConnectionLost`.
    fn feed_packets(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed_packets(bytes)).map_err(|error| raise(py, &error))
    }

    /// Consume `packets` and then the packets of a socket that does not block, until it has no more bytes, until about
    /// `bytes_max` were read, or until the cutter expects another action.
    ///
    /// Return the bytes of the last, incomplete packet. The exceptions are those of `feed_packets`, and OSError.
    fn drain<'py>(
        &mut self,
        py: Python<'py>,
        descriptor: i32,
        packets: PyBuffer<u8>,
        bytes_max: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut socket = Socket::duplicate(descriptor)?;
        let packets = slice_of(&packets)?;
        let (inner, received) = (&mut self.inner, &mut self.received);
        let drained = py.detach(|| drain(inner, &mut socket, received, packets, bytes_max));
        let rest = drained.map_err(|failure| match failure {
            DrainError::Cut(error) => raise(py, &error),
            DrainError::Socket(error) => error.into(),
        })?;
        Ok(PyBytes::new(py, rest))
    }

    /// The action that the cutter expects from the caller: "input", "file" or "hole".
    #[getter]
    fn state(&self) -> &'static str {
        match self.inner.state() {
            State::Input => "input",
            State::File => "file",
            State::Hole => "hole",
        }
    }

    /// The source file; in the state "file", the new file.
    #[getter]
    fn file(&self) -> &str {
        self.inner.file()
    }

    /// The source offset of the next event. In the state "file", the offset of the new file's first event after the
    /// format description. In the state "hole", the offset after the hole.
    #[getter]
    fn offset(&self) -> u64 {
        self.inner.offset()
    }

    /// The source file's format description event as the server sent it; b"" before the first one.
    #[getter]
    fn format_description<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.inner.format_description())
    }

    /// The server's version text, once the format description was read.
    #[getter]
    fn server_version(&self) -> Option<&str> {
        self.inner.format().map(|format| format.server_version.as_str())
    }

    /// Continue with the new file. Data and records of the previous file must have been taken.
    fn take_file(&mut self) -> PyResult<()> {
        if self.inner.take_file() {
            Ok(())
        } else {
            Err(PyAssertionError::new_err("no file begins, or what was gathered of the one before was not taken"))
        }
    }

    /// Continue after the hole. Data and records from before the hole must have been taken.
    ///
    /// The event that revealed the hole is kept. The next `feed` or `feed_packets`, even without bytes, starts with
    /// it.
    fn take_hole(&mut self) -> PyResult<()> {
        if self.inner.take_hole() {
            Ok(())
        } else {
            Err(PyAssertionError::new_err("there is no hole, or what was gathered before it was not taken"))
        }
    }

    /// Take the buffered event bytes, which are complete events from a single file; empty if nothing is buffered.
    fn take_data(&mut self) -> Chunk {
        Chunk { bytes: self.inner.take_data() }
    }

    /// The source file of the output; in the state "file" still the previous file.
    #[getter]
    fn data_file(&self) -> &str {
        self.inner.data_file()
    }

    /// Whether data or records are waiting to be taken.
    #[getter]
    fn untaken(&self) -> bool {
        self.inner.has_output()
    }

    /// Size of the buffered event bytes.
    #[getter]
    fn gathered(&self) -> usize {
        self.inner.buffered_bytes()
    }

    /// The source offset of the first buffered byte.
    #[getter]
    fn data_start(&self) -> u64 {
        self.inner.data_range().0
    }

    /// The source offset after the last buffered byte.
    #[getter]
    fn data_end(&self) -> u64 {
        self.inner.data_range().1
    }

    /// The source offset after the last complete transaction in the event bytes read so far.
    #[getter]
    fn boundary(&self) -> u64 {
        self.inner.boundary()
    }

    /// Whether a transaction is open.
    #[getter]
    fn in_transaction(&self) -> bool {
        self.inner.in_transaction()
    }

    /// Take the records, 128 bytes each, of the blocks closed since the last call.
    fn take_records<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.take_records())
    }

    /// Return the record of the current block; None if the block has no events.
    fn open_record<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.inner.open_record().map(|record| PyBytes::new(py, &record))
    }

    /// Close the current block now.
    fn close_block(&mut self) {
        self.inner.close_block();
    }

    /// Take the DDL statements since the last call: text, database, source offsets of start and end, and session.
    fn take_statements(&mut self) -> Vec<StatementTuple> {
        let statements = self.inner.take_statements().into_iter();
        statements
            .map(|statement| {
                (statement.text, statement.database, statement.start, statement.end, session_of(statement.session))
            })
            .collect()
    }

    /// All complete transactions up to `boundary`, as the text of a GTID set. The set includes the transactions before
    /// the start.
    #[getter]
    fn gtid_set(&self) -> String {
        self.inner.gtid_set().text()
    }

    /// The GTID of the last complete transaction; "" if it has none.
    #[getter]
    fn last_gtid(&self) -> String {
        gtid_text(self.inner.last_gtid())
    }

    /// Commit time of the last complete transaction in microseconds since 1970; 0 before the first.
    #[getter]
    fn last_time_us(&self) -> i64 {
        self.inner.last_time_us()
    }

    /// The largest commit time read so far, including that of the open transaction, in microseconds since 1970.
    #[getter]
    fn time_max_us(&self) -> i64 {
        self.inner.time_max_us()
    }

    /// Number of complete transactions.
    #[getter]
    fn transactions(&self) -> u64 {
        self.inner.counters().transactions
    }

    /// Number of row changes; an update counts as one.
    #[getter]
    fn changes(&self) -> u64 {
        self.inner.counters().changes
    }

    /// Number of events written to the output.
    #[getter]
    fn events(&self) -> u64 {
        self.inner.counters().events
    }

    /// Number of heartbeats.
    #[getter]
    fn heartbeats(&self) -> u64 {
        self.inner.counters().heartbeats
    }

    /// The file and offset of the last heartbeat, up to which the server has sent everything; None before the first.
    #[getter]
    fn last_heartbeat(&self) -> Option<(&str, u64)> {
        self.inner.last_heartbeat()
    }

    /// Whether the server ended the stream.
    #[getter]
    fn ended(&self) -> bool {
        self.inner.ended()
    }

    /// The error that the server sent, number and message; None if there is none.
    #[getter]
    fn server_error(&self) -> Option<(u16, &str)> {
        self.inner.server_error().map(|error| (error.number, error.message.as_str()))
    }

    /// The file and offset up to which the server waits for an acknowledgement, or None.
    #[getter]
    fn acknowledge(&self) -> Option<(&str, u64)> {
        self.inner.acknowledge()
    }

    /// Return the position that `acknowledge` reports, and clear it.
    fn take_acknowledge(&mut self) -> Option<(String, u64)> {
        self.inner.take_acknowledge().map(|(file, offset)| (file.to_string(), offset))
    }
}

/// Return the head of a segment: magic, format description, and two artificial events that hold the source file and
/// offset of the first event and the GTID set before it.
///
/// `time_s` is the creation time of the segment, in seconds since 1970. Raises `PositionInvalid` for a GTID set of
/// the other flavor, `EventMalformed` if the bytes are not a format description.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn segment_head<'py>(
    py: Python<'py>,
    format_description: PyBuffer<u8>,
    file: &str,
    offset: u64,
    gtid_set: &str,
    flavor: &str,
    server_id: u32,
    time_s: u32,
) -> PyResult<Bound<'py, PyBytes>> {
    let gtid_set = parse(py, gtid_set)?;
    let parts = HeadParts {
        format_description: slice_of(&format_description)?,
        file,
        offset,
        gtid_set: &gtid_set,
        mariadb: is_mariadb(py, flavor)?,
        server_id,
        time_s,
    };
    let head = blocks::segment_head(&parts).map_err(|error| raise(py, &error))?;
    Ok(PyBytes::new(py, &head))
}

/// Length of the head, source file, base offset, GTID set, format description.
type HeadTuple<'py> = (usize, String, u64, String, Bound<'py, PyBytes>);

/// Read the head at the start of a segment: its length in bytes, the source file, the source offset of the first
/// event, the GTID set before it, and the format description.
///
/// Raises `FileTruncated` if the bytes end inside the head, `EventMalformed` if the file is not a segment.
#[pyfunction]
pub fn read_segment_head<'py>(py: Python<'py>, bytes: PyBuffer<u8>) -> PyResult<HeadTuple<'py>> {
    let head = blocks::read_segment_head(slice_of(&bytes)?).map_err(|error| raise(py, &error))?;
    let format_description = PyBytes::new(py, &head.format_description);
    Ok((head.head_bytes, head.file, head.base, head.gtid_set.text(), format_description))
}

/// Encode a MySQL GTID set for COM_BINLOG_DUMP_GTID. Raises `PositionInvalid`.
#[pyfunction]
pub fn encode_gtid_set<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyBytes>> {
    let invalid = |error: Error| {
        let hint = "Write uuid:1-5:7, with a tag uuid:tag:1-5, several by commas";
        raise(py, &Error::new(ErrorKind::PositionInvalid, error.message()).hint(hint))
    };
    let encoded = GtidSet::parse(text).and_then(|set| set.encode_mysql()).map_err(invalid)?;
    Ok(PyBytes::new(py, &encoded))
}
