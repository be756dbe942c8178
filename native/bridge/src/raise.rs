//! Raises kernel errors as the classes of `penstock.errors`.

use penstock_kernel::error::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Convert a kernel error to a Python error. Classes are looked up by the kind's name; a test compares the two lists.
pub fn raise(py: Python<'_>, error: &Error) -> PyErr {
    match build(py, error) {
        Ok(exception) => exception,
        Err(lookup_error) => lookup_error,
    }
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = py.import("penstock.errors")?.getattr(error.kind().name())?;
    let keywords = PyDict::new(py);
    keywords.set_item("position", error.position().map(|(file, offset)| format!("{file}:{offset}")))?;
    keywords.set_item("hint", error.hint_text())?;
    Ok(PyErr::from_value(class.call((error.message(),), Some(&keywords))?))
}

/// Return an `OptionInvalid` for an argument that the bridge itself rejects.
pub fn option_invalid(py: Python<'_>, message: String) -> PyErr {
    raise(py, &Error::new(ErrorKind::OptionInvalid, message))
}
