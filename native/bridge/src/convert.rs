//! Converts bytes and Arrow data between Python and the kernel.

use arrow_array::ffi::{from_ffi, to_ffi, FFI_ArrowArray};
use arrow_array::{Array, RecordBatch, StructArray};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::Schema;
use penstock_kernel::charset::Charset;
use penstock_kernel::error::{Error, ErrorKind};
use penstock_kernel::event::session::Session;
use penstock_kernel::event::EventKind;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::raise::{option_invalid, raise};

/// A statement's session: the databases that the statement changes (if the log lists them), the server's character set,
/// and the SQL modes that affect the parsing of DDL.
pub type SessionTuple = (Option<Vec<String>>, Option<&'static str>, Vec<&'static str>);

/// Convert a session for Python.
pub fn session_of(session: Session) -> SessionTuple {
    let server_charset = session.server_charset;
    let sql_modes = session.reading_modes().collect();
    (session.listed_databases(), server_charset, sql_modes)
}

/// Borrow a Python buffer as a slice for the duration of a call.
pub fn slice_of(buffer: &PyBuffer<u8>) -> PyResult<&[u8]> {
    if !buffer.is_c_contiguous() {
        return Err(PyBufferError::new_err("the buffer is not contiguous"));
    }
    if buffer.len_bytes() == 0 {
        return Ok(&[]);
    }
    // SAFETY: the buffer is contiguous, has `len_bytes` bytes, and stays pinned while `buffer` lives. Nothing writes
    // to it during the call: its owner is the caller, which waits.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) })
}

/// Return an error of Arrow as a Python exception.
pub fn arrow_error(error: arrow_schema::ArrowError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Export a schema as the capsule of the Arrow PyCapsule protocol.
pub fn schema_capsule<'py>(py: Python<'py>, schema: &Schema) -> PyResult<Bound<'py, PyCapsule>> {
    let exported = FFI_ArrowSchema::try_from(schema).map_err(arrow_error)?;
    PyCapsule::new_with_value(py, exported, c"arrow_schema")
}

/// Export a batch as the schema and array capsules of the Arrow PyCapsule protocol.
pub fn batch_capsules<'py>(py: Python<'py>, batch: &RecordBatch) -> PyResult<Bound<'py, PyTuple>> {
    let schema = schema_capsule(py, batch.schema().as_ref())?;
    let (array, _) = to_ffi(&StructArray::from(batch.clone()).to_data()).map_err(arrow_error)?;
    let array = PyCapsule::new_with_value(py, array, c"arrow_array")?;
    PyTuple::new(py, [schema.into_any(), array.into_any()])
}

/// Import a batch from any object that supports the Arrow PyCapsule protocol.
pub fn batch_from(object: &Bound<'_, PyAny>) -> PyResult<RecordBatch> {
    let capsules = object.call_method0("__arrow_c_array__")?.cast_into::<PyTuple>()?;
    let schema = capsules.get_item(0)?.cast_into::<PyCapsule>()?;
    let array = capsules.get_item(1)?.cast_into::<PyCapsule>()?;
    let schema = schema.pointer_checked(Some(c"arrow_schema"))?.cast::<FFI_ArrowSchema>();
    let array = array.pointer_checked(Some(c"arrow_array"))?.cast::<FFI_ArrowArray>();
    // SAFETY: the capsules have the names that the protocol assigns to exactly these structs, and live until the end
    // of this function. `from_raw` moves the array out and marks the capsule's struct as released.
    let (schema, array) = unsafe { (schema.as_ref(), FFI_ArrowArray::from_raw(array.as_ptr())) };
    // SAFETY: both structs come from the same export, so the array has the layout that the schema describes.
    let data = unsafe { from_ffi(array, schema) }.map_err(arrow_error)?;
    Ok(RecordBatch::from(StructArray::from(data)))
}

/// Decode text from a MySQL character set.
///
/// Raises `ValueMalformed` if the character set does not allow the bytes, `OptionInvalid` for an unknown character set.
#[pyfunction]
pub fn decode_text(py: Python<'_>, charset: &str, bytes: &[u8]) -> PyResult<String> {
    let Some(character_set) = Charset::from_name(charset) else {
        return Err(option_invalid(py, format!("character set `{charset}` is not known")));
    };
    let mut out = Vec::with_capacity(bytes.len());
    let decoded = character_set.decode_into(bytes, &mut out).ok().and_then(|()| String::from_utf8(out).ok());
    decoded.ok_or_else(|| {
        raise(py, &Error::new(ErrorKind::ValueMalformed, format!("the bytes are not valid in {charset}")))
    })
}

/// Return the names of all errors that the kernel raises.
#[pyfunction]
pub fn error_kinds() -> Vec<&'static str> {
    ErrorKind::ALL.iter().map(|kind| kind.name()).collect()
}

/// Return the names of all event types that the kernel supports.
#[pyfunction]
pub fn event_kinds() -> Vec<&'static str> {
    EventKind::ALL.iter().map(|kind| kind.name()).collect()
}

/// Return the names of all character sets.
#[pyfunction]
pub fn charsets() -> Vec<&'static str> {
    Charset::ALL.iter().map(|charset| charset.name()).collect()
}
