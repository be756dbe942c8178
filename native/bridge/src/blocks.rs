//! Blocks for a durable log: the cutter, the bytes it hands out, and the heads of segments.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, Weak};

use penstock_kernel::blocks::{self, HeadParts, Settings, State};
use penstock_kernel::error::{Error, ErrorKind};
use penstock_kernel::gtid::{Gtid, GtidSet};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyAssertionError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::{session_of, slice_of, SessionTuple};
use crate::raise::{option_invalid, raise};

/// Memory of a chunk that was dropped, for the cutter to fill again; one thread drops where another cuts.
type Spare = Mutex<Vec<u8>>;

/// Less is left to the allocator.
const SPARE_BYTES_MIN: usize = 128 << 10;

/// Event bytes that left the cutter. Offers them through the buffer protocol, without a copy; nobody can change them.
#[pyclass(frozen, module = "penstock._native")]
pub struct Chunk {
    bytes: Vec<u8>,
    /// Where its memory goes when it is dropped.
    spare: Weak<Spare>,
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Some(spare) = self.spare.upgrade().filter(|_| self.bytes.capacity() >= SPARE_BYTES_MIN) {
            // A lock that a panic left behind only means that the memory is freed.
            if let Ok(mut spare) = spare.lock() {
                *spare = std::mem::take(&mut self.bytes);
            }
        }
    }
}

#[pymethods]
impl Chunk {
    fn __len__(&self) -> usize {
        self.bytes.len()
    }

    /// Lends the bytes out, read only.
    ///
    /// # Safety
    ///
    /// Python calls this with a view of its own to fill in.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = &slf.get().bytes;
        let length = ffi::Py_ssize_t::try_from(bytes.len()).map_err(|_| PyAssertionError::new_err("a long chunk"))?;
        let first = bytes.as_ptr().cast_mut().cast();
        const READ_ONLY: c_int = 1;
        // SAFETY: `view` is Python's own. `first` and `length` are those of one allocation, which neither moves nor
        // changes: the class is frozen and hands out no `&mut`, and who asks to write is refused, so the cast gives
        // no right that is used. The view owns a reference to the chunk, and only its drop lets go of the memory.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), first, length, READ_ONLY, flags) };
        if filled == 0 {
            Ok(())
        } else {
            Err(PyErr::take(slf.py()).unwrap_or_else(|| PyAssertionError::new_err("no buffer and no reason")))
        }
    }
}

/// A definition as Python sees it: text, database, and the source offsets of its event's start and end.
type StatementTuple = (String, String, u64, u64, SessionTuple);

/// Cuts the bytes of a log into blocks: event bytes to store, and records to find them by.
///
/// Feed it; `state` says what it waits for: "input" (feed more), "file" (a new source file begins: take what was
/// gathered, then `take_file`), "hole" (source bytes are left out: take what was gathered, then `take_hole`). Bytes
/// gathered before an error can still be taken. Not for use by two threads at once.
#[pyclass(module = "penstock._native")]
pub struct BlockCutter {
    inner: blocks::BlockCutter,
    spare: Arc<Spare>,
}

fn parse(py: Python<'_>, text: &str) -> PyResult<GtidSet> {
    GtidSet::parse(text).map_err(|error| raise(py, &error))
}

/// Whether the flavor is MariaDB's.
fn is_mariadb(py: Python<'_>, flavor: &str) -> PyResult<bool> {
    match flavor {
        "mysql" => Ok(false),
        "mariadb" => Ok(true),
        other => Err(option_invalid(py, format!("`{other}` is no flavor: mysql or mariadb"))),
    }
}

fn text_of(gtid: &Gtid) -> String {
    let mut out = String::new();
    gtid.write(&mut out);
    out
}

#[pymethods]
impl BlockCutter {
    /// `file` and `offset` say where the first byte lies in the source, at the start of an event and between
    /// transactions. Of a server's dump (`live`) the stream tells the rest; of a file or segment `head` does, its
    /// magic and format description, unless `offset` is 0 or 4.
    #[new]
    #[pyo3(signature = (
        *, epoch, file, offset, flavor, live, gtid_set="", block_bytes=65_536, time_max_us=0, head=None,
        semi_sync=false, statements=true,
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
        let inner = blocks::BlockCutter::new(settings, head).map_err(|error| raise(py, &error))?;
        Ok(BlockCutter { inner, spare: Arc::default() })
    }

    /// Take whole events from the front of a buffer; return how many bytes that were.
    ///
    /// Raises the errors of `penstock.errors` with the position.
    fn feed(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed(bytes)).map_err(|error| raise(py, &error))
    }

    /// Take packets of a dump from the front of a buffer, long ones in pieces; return how many bytes that were.
    ///
    /// Raises the errors of `penstock.errors` with the position, `ConnectionLost` where a packet is missing.
    fn feed_packets(&mut self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let bytes = slice_of(&buffer)?;
        let inner = &mut self.inner;
        py.detach(|| inner.feed_packets(bytes)).map_err(|error| raise(py, &error))
    }

    /// What the cutter waits for.
    #[getter]
    fn state(&self) -> &'static str {
        match self.inner.state() {
            State::Input => "input",
            State::File => "file",
            State::Hole => "hole",
        }
    }

    /// The source file; in the state "file" the one that begins.
    #[getter]
    fn file(&self) -> &str {
        self.inner.file()
    }

    /// Where the next event is due in the source file; in the state "file" where the new file's first stands behind
    /// the format description, in the state "hole" where the bytes go on.
    #[getter]
    fn offset(&self) -> u64 {
        self.inner.offset()
    }

    /// The source file's format description event as it was sent; b"" before the first.
    #[getter]
    fn format_description<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.inner.format_description())
    }

    /// The server's version text, once the format description was read.
    #[getter]
    fn server_version(&self) -> Option<&str> {
        self.inner.format().map(|format| format.server_version.as_str())
    }

    /// Go on with the file that begins. Data and records of the one before must have been taken.
    fn take_file(&mut self) -> PyResult<()> {
        if self.inner.take_file() {
            Ok(())
        } else {
            Err(PyAssertionError::new_err("no file begins, or what was gathered of the one before was not taken"))
        }
    }

    /// Go on behind the bytes that are left out. Data and records before them must have been taken.
    ///
    /// The event that showed the hole is kept; the next `feed` or `feed_packets`, of no bytes perhaps, begins with it.
    fn take_hole(&mut self) -> PyResult<()> {
        if self.inner.take_hole() {
            Ok(())
        } else {
            Err(PyAssertionError::new_err("there is no hole, or what was gathered before it was not taken"))
        }
    }

    /// Take the event bytes gathered, whole events of one file; empty where there are none.
    fn take_data(&mut self) -> Chunk {
        if let Ok(mut spare) = self.spare.lock() {
            self.inner.recycle(std::mem::take(&mut *spare));
        }
        Chunk { bytes: self.inner.take_data(), spare: Arc::downgrade(&self.spare) }
    }

    /// The source file of what waits to be taken; in the state "file" still the one before.
    #[getter]
    fn data_file(&self) -> &str {
        self.inner.data_file()
    }

    /// Whether data or records wait to be taken.
    #[getter]
    fn untaken(&self) -> bool {
        self.inner.has_output()
    }

    /// How many event bytes wait to be taken.
    #[getter]
    fn gathered(&self) -> usize {
        self.inner.buffered_bytes()
    }

    /// The source offset of the first byte that waits to be taken.
    #[getter]
    fn data_start(&self) -> u64 {
        self.inner.data_range().0
    }

    /// The source offset behind the last byte that waits to be taken.
    #[getter]
    fn data_end(&self) -> u64 {
        self.inner.data_range().1
    }

    /// The source offset behind the last whole transaction, of the bytes gathered or taken.
    #[getter]
    fn boundary(&self) -> u64 {
        self.inner.boundary()
    }

    /// Whether a transaction is open.
    #[getter]
    fn in_transaction(&self) -> bool {
        self.inner.in_transaction()
    }

    /// Take the records, of 128 bytes each, of the blocks closed since the last call.
    fn take_records<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.take_records())
    }

    /// The record of the block in the making; None where no event lies in it.
    fn open_record<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.inner.open_record().map(|record| PyBytes::new(py, &record))
    }

    /// Close the block in the making now.
    fn close_block(&mut self) {
        self.inner.close_block();
    }

    /// Take the definitions (DDL) since the last call: text, database, the source offsets of start
    /// and end, and what its event says of the session.
    fn take_statements(&mut self) -> Vec<StatementTuple> {
        let statements = self.inner.take_statements().into_iter();
        statements.map(|one| (one.text, one.database, one.start, one.end, session_of(one.session))).collect()
    }

    /// Every whole transaction up to `boundary`, those before the start included, as text.
    #[getter]
    fn gtid_set(&self) -> String {
        self.inner.gtid_set().text()
    }

    /// The GTID of the last whole transaction; "" where it has none.
    #[getter]
    fn last_gtid(&self) -> String {
        text_of(self.inner.last_gtid())
    }

    /// The commit time of the last whole transaction, in microseconds since 1970; 0 before the first.
    #[getter]
    fn last_time_us(&self) -> i64 {
        self.inner.last_time_us()
    }

    /// The largest commit time so far, that of the open transaction included, in microseconds since 1970.
    #[getter]
    fn time_max_us(&self) -> i64 {
        self.inner.time_max_us()
    }

    /// How many transactions are whole.
    #[getter]
    fn transactions(&self) -> u64 {
        self.inner.counters().transactions
    }

    /// How many changes (rows) there were; an update counts once.
    #[getter]
    fn changes(&self) -> u64 {
        self.inner.counters().changes
    }

    /// How many events were kept.
    #[getter]
    fn events(&self) -> u64 {
        self.inner.counters().events
    }

    /// How many heartbeats there were.
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

    /// The error the server sent instead of an event: number and message, or None.
    #[getter]
    fn server_error(&self) -> Option<(u16, &str)> {
        self.inner.server_error().map(|error| (error.number, error.message.as_str()))
    }

    /// The file and offset up to which the server waits for an acknowledgement, or None; `take_acknowledge` clears it.
    #[getter]
    fn acknowledge(&self) -> Option<(&str, u64)> {
        self.inner.acknowledge()
    }

    /// The same as `acknowledge`, and clear it.
    fn take_acknowledge(&mut self) -> Option<(String, u64)> {
        self.inner.take_acknowledge().map(|(file, offset)| (file.to_string(), offset))
    }
}

/// Return what stands before the events of a segment: magic, format description, and two made-up events that say
/// which source file and offset follow, and which transactions came before.
///
/// `time_s` is when the segment was begun, in seconds since 1970. Raises `PositionInvalid` for a GTID set of the
/// other flavor, `EventMalformed` for bytes that are no format description.
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

/// Head's length, source file, base offset, GTID set, format description.
type HeadTuple<'py> = (usize, String, u64, String, Bound<'py, PyBytes>);

/// Read the head at a segment's front: its length in bytes, the source file, the source offset of the first event,
/// the GTID set before it, and the format description.
///
/// Raises `FileTruncated` where the bytes end inside the head, `EventMalformed` where the file is no segment.
#[pyfunction]
pub fn read_segment_head<'py>(py: Python<'py>, bytes: PyBuffer<u8>) -> PyResult<HeadTuple<'py>> {
    let head = blocks::read_segment_head(slice_of(&bytes)?).map_err(|error| raise(py, &error))?;
    let format_description = PyBytes::new(py, &head.format_description);
    Ok((head.head_bytes, head.file, head.base, head.gtid_set.text(), format_description))
}

/// Return the bytes of a GTID set of MySQL, as COM_BINLOG_DUMP_GTID carries it. Raises `PositionInvalid`.
#[pyfunction]
pub fn encode_gtid_set<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyBytes>> {
    let invalid = |error: Error| {
        let hint = "Write uuid:1-5:7, with a tag uuid:tag:1-5, several by commas";
        raise(py, &Error::new(ErrorKind::PositionInvalid, error.message()).hint(hint))
    };
    let encoded = GtidSet::parse(text).and_then(|set| set.encode_mysql()).map_err(invalid)?;
    Ok(PyBytes::new(py, &encoded))
}
