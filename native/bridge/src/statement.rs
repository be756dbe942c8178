//! The statements that a decoder returns to Python.

use penstock_kernel::emit::dialect::ddl;
use penstock_kernel::stream;
use pyo3::prelude::*;

use crate::convert::{session_of, SessionTuple};

/// A DDL statement, or a change logged in statement format.
#[pyclass(frozen, module = "penstock._native")]
pub struct Statement {
    inner: stream::Statement,
}

impl Statement {
    pub fn new(inner: stream::Statement) -> Statement {
        Statement { inner }
    }
}

#[pymethods]
impl Statement {
    /// The default database of the session; "" if it has none.
    #[getter]
    fn database(&self) -> &str {
        &self.inner.database
    }

    /// The session that the event records: the databases that the statement changes (None if the event does not list
    /// them), the default character set of a new database, and the SQL modes that affect the parsing of DDL.
    #[getter]
    fn session(&self) -> SessionTuple {
        session_of(self.inner.session.clone())
    }

    /// The text.
    #[getter]
    fn text(&self) -> &str {
        &self.inner.text
    }

    /// The first database and table that a DDL statement names, judged by its first words; None if there is none.
    #[getter]
    fn table(&self) -> Option<(String, String)> {
        let definition = ddl::classify(&self.inner.text, &self.inner.database, self.inner.session.backslash());
        let (database, table) = definition.name_before();
        (!table.is_empty()).then(|| (database.to_owned(), table.to_owned()))
    }

    /// Whether the statement changes rows whose images are not in the log.
    #[getter]
    fn is_change(&self) -> bool {
        self.inner.is_change
    }

    /// The databases that the statement accessed, including those used by views, triggers and functions. [] means any
    /// database; None means that the log does not list them.
    #[getter]
    fn accessed(&self) -> Option<Vec<String>> {
        self.inner.session.accessed.clone()
    }

    /// Whether the statement's transaction lies outside the range.
    #[getter]
    fn is_skipped(&self) -> bool {
        self.inner.is_skipped
    }

    /// The start of the statement's event: `file:offset`.
    #[getter]
    fn position(&self) -> String {
        format!("{}:{}", self.inner.file, self.inner.offset)
    }

    /// The end of the statement's event: `file:offset`.
    #[getter]
    fn end_position(&self) -> String {
        format!("{}:{}", self.inner.file, self.inner.end_offset)
    }

    /// The end of the statement's transaction: `file:offset`; None if the transaction's GTID event does not contain it.
    #[getter]
    fn transaction_end(&self) -> Option<String> {
        self.inner.transaction_end.map(|offset| format!("{}:{offset}", self.inner.file))
    }

    /// The commit timestamp of the statement's transaction in a log of a TiDB cluster; None in a server's log.
    #[getter]
    fn commit_ts(&self) -> Option<i64> {
        self.inner.commit_ts
    }

    /// Start time of the statement, in microseconds since 1970.
    #[getter]
    fn timestamp_us(&self) -> i64 {
        self.inner.timestamp_us
    }

    /// The effects of a DDL statement on its tables, in order: the kind (such as TRUNCATE), the database, the table
    /// (its new name after a rename) and an equivalent statement for this table alone. The table is "" if the statement
    /// names none.
    #[getter]
    fn definitions(&self) -> Vec<(&'static str, String, String, String)> {
        let statement = &self.inner;
        ddl::table_statements(&statement.text, &statement.database, statement.session.backslash())
            .map(|(of, text)| (of.kind.name(), of.database.into_owned(), of.table.into_owned(), text.into_owned()))
            .collect()
    }

    /// Commit time of the statement's transaction, in microseconds since 1970; the statement's start time if the log
    /// has no commit time.
    #[getter]
    fn commit_us(&self) -> i64 {
        self.inner.commit_us
    }

    /// The id of the server that ran the statement.
    #[getter]
    fn server_id(&self) -> u32 {
        self.inner.server_id
    }

    /// The GTID of the statement's transaction; "" if the transaction has none.
    #[getter]
    fn gtid(&self) -> &str {
        &self.inner.gtid
    }
}
