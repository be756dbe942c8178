//! Sets of GTIDs.

use penstock_kernel::gtid;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::raise::raise;

/// A set of MySQL or MariaDB GTIDs.
#[pyclass(frozen, eq, module = "penstock._native")]
#[derive(Clone, PartialEq)]
pub struct GtidSet {
    inner: gtid::GtidSet,
}

fn parse(py: Python<'_>, text: &str) -> PyResult<gtid::GtidSet> {
    gtid::GtidSet::parse(text).map_err(|error| raise(py, &error))
}

#[pymethods]
impl GtidSet {
    /// Parse `uuid:1-5:8` (MySQL) or `domain-server-sequence` (MariaDB), separated by commas.
    #[new]
    #[pyo3(signature = (text=""))]
    fn new(py: Python<'_>, text: &str) -> PyResult<GtidSet> {
        Ok(GtidSet { inner: parse(py, text)? })
    }

    /// Parse a text like the constructor.
    #[staticmethod]
    fn parse(py: Python<'_>, text: &str) -> PyResult<GtidSet> {
        GtidSet::new(py, text)
    }

    /// Return whether this set contains all transactions of the other set.
    fn contains(&self, other: &GtidSet) -> bool {
        self.inner.contains_set(&other.inner)
    }

    /// Return the transactions of both sets. For MariaDB, transactions that only the other set contains count as later.
    fn union(&self, other: &GtidSet) -> GtidSet {
        let mut inner = self.inner.clone();
        inner.union(&other.inner);
        GtidSet { inner }
    }

    /// Return the transactions of this set that are not in the other set.
    fn subtract(&self, other: &GtidSet) -> GtidSet {
        let mut inner = self.inner.clone();
        inner.subtract(&other.inner);
        GtidSet { inner }
    }

    /// Return the set in the form that a server accepts as a replica's start: in MariaDB, the newest transaction of
    /// each domain.
    fn position(&self) -> GtidSet {
        GtidSet { inner: self.inner.position() }
    }

    /// Return whether the set contains a transaction of a log, given the transactions `before` it in the log.
    ///
    /// Raises `PositionInvalid` if this cannot be determined.
    fn contains_in_log(&self, py: Python<'_>, gtid: &str, before: &GtidSet) -> PyResult<bool> {
        let gtid = gtid::Gtid::parse(gtid).map_err(|error| raise(py, &error))?;
        self.inner.contains_in_log(&gtid, &before.inner).map_err(|error| raise(py, &error))
    }

    /// Encode the set for COM_BINLOG_DUMP_GTID. Raises `PositionInvalid` for a MariaDB set.
    fn encode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = self.inner.encode_mysql().map_err(|error| raise(py, &error))?;
        Ok(PyBytes::new(py, &encoded))
    }

    fn __bool__(&self) -> bool {
        !self.inner.is_empty()
    }

    fn __str__(&self) -> String {
        self.inner.text()
    }

    fn __repr__(&self) -> String {
        format!("GtidSet({:?})", self.inner.text())
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.inner.text().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<(Py<PyAny>, (String,))> {
        Ok((py.get_type::<GtidSet>().into_any().unbind(), (self.inner.text(),)))
    }
}
