//! The emitter of messages in a dialect.

use std::sync::Arc;

use super::dialect::view::{At, DialectOptions, End, StatementKind, StatementView, TableView};
use super::dialect::walk::Images;
use super::dialect::writer::{Dialect, TableWriter};
use super::dialect::{Named, NamedWriter};
use super::messages::Messages;
use super::rows::{ChangeFilter, RowsView};
use super::system::EventView;
use super::verdicts::Verdicts;
use crate::emit::{Batch, TransactionView};
use crate::error::{Error, ErrorKind, Result};
use crate::event::session::Backslash;
use crate::gtid::GtidSet;

/// A table as the decoder stores it.
pub struct MessageTable {
    view: Arc<TableView>,
    writer: NamedWriter,
}

impl MessageTable {
    /// Whether some rows or columns are not visible.
    pub fn is_limited(&self) -> bool {
        self.view.is_limited()
    }
}

/// The properties that all messages of a transaction share.
struct Texts {
    instance: Arc<str>,
    gtid: String,
    gtid_set: String,
    xa_id: Option<String>,
    /// The statement that commits a prepared XA transaction; None for other transactions.
    xa_commit: Option<Box<str>>,
}

impl Texts {
    fn at<'a>(&'a self, transaction: &'a TransactionView, event: EventView, row_first: u32) -> At<'a> {
        At {
            instance: &self.instance,
            transaction,
            gtid: &self.gtid,
            gtid_set: &self.gtid_set,
            event,
            xa_id: self.xa_id.as_deref(),
            row_first,
            snapshot: false,
        }
    }
}

/// The emitter that encodes changes as messages.
pub struct MessagesBatch {
    dialect: Named,
    out: Messages,
    texts: Texts,
    /// The executed GTID set, if messages must carry it.
    executed: Option<GtidSet>,
    /// The BEGIN of the open transaction, or its GTID event.
    begin: EventView,
    rows_query: Option<(EventView, String)>,
    /// Whether a begin message of the open transaction was written.
    begun: bool,
    /// Whether the texts of the open transaction were computed.
    named: bool,
    no_table: Arc<str>,
    /// The visible images of rows with conditions.
    verdicts: Verdicts,
}

impl MessagesBatch {
    /// Starts without messages. Raises `OptionInvalid` for an unknown dialect.
    pub fn new(options: &DialectOptions, instance: &Arc<str>) -> Result<MessagesBatch> {
        let texts = Texts {
            instance: instance.clone(),
            gtid: String::new(),
            gtid_set: String::new(),
            xa_id: None,
            xa_commit: None,
        };
        Ok(MessagesBatch {
            dialect: Named::of_options(options, instance)?,
            out: Messages::new(),
            texts,
            executed: options.gtid_set.clone(),
            begin: EventView::default(),
            rows_query: None,
            begun: false,
            named: false,
            no_table: "".into(),
            verdicts: Verdicts::default(),
        })
    }

    /// Prepares a table. Raises `OptionInvalid` if its rows have conditions and the dialect cannot leave rows out.
    pub fn table(&self, view: TableView) -> Result<MessageTable> {
        if view.judged && !self.dialect.splits_updates() {
            return Err(Error::new(ErrorKind::OptionInvalid, "the dialect cannot leave out single rows"));
        }
        let view = Arc::new(view);
        Ok(MessageTable { writer: self.dialect.table(view.clone())?, view })
    }

    /// Which images are visible, for rows whose table has conditions. Add them before the rows.
    pub fn verdicts(&mut self) -> &mut Verdicts {
        &mut self.verdicts
    }

    /// Number of messages.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// Whether there are no messages.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Size of all messages in bytes.
    pub fn bytes(&self) -> usize {
        self.out.value.len()
    }

    /// Opens a transaction. Its begin message is written together with the first message of its contents.
    pub fn open(&mut self, transaction: &TransactionView, event: EventView) {
        if let Some(executed) = &mut self.executed {
            executed.add(&transaction.gtid);
        }
        self.begin = event;
        self.rows_query = None;
        (self.texts.xa_id, self.texts.xa_commit) = (None, None);
        (self.begun, self.named) = (false, false);
        self.out.changes = 0;
    }

    /// Records the BEGIN of the transaction.
    pub fn note_begin(&mut self, event: EventView) {
        self.begin = event;
    }

    /// Records the id of an XA transaction.
    pub fn note_xa(&mut self, id: &[u8]) {
        self.texts.xa_id = Some(String::from_utf8_lossy(id).into_owned());
    }

    /// Records the statement that commits a prepared transaction; None if the transaction commits in one phase.
    pub fn note_xa_commit(&mut self, statement: Option<Box<str>>) {
        self.texts.xa_commit = statement;
    }

    /// Restarts the open transaction at its first row.
    pub fn begin_again(&mut self) {
        self.out.changes = 0;
    }

    /// Records the text of the statement whose row changes follow.
    pub fn note_rows_query(&mut self, event: EventView, text: &[u8]) {
        self.rows_query = Some((event, String::from_utf8_lossy(text).into_owned()));
    }

    /// Drops the text of the statement whose row changes follow, so that it is not written.
    pub fn forget_rows_query(&mut self) {
        self.rows_query = None;
    }

    /// Computes the transaction's texts, such as its GTID, before its first message.
    fn name(&mut self, transaction: &TransactionView) {
        if !std::mem::replace(&mut self.named, true) {
            self.texts.gtid.clear();
            transaction.gtid.write(&mut self.texts.gtid);
            if let Some(executed) = &self.executed {
                self.texts.gtid_set = executed.position().text();
            }
        }
        self.out.current.1 = transaction.commit_version;
    }

    /// Writes the transaction's begin message and, before a statement's first rows, the statement's text.
    fn begin(&mut self, transaction: &TransactionView, row_first: u32) -> Result<()> {
        self.name(transaction);
        if !std::mem::replace(&mut self.begun, true) {
            self.out.set_table(&self.no_table);
            let at = self.texts.at(transaction, self.begin, row_first);
            self.dialect.begin(&at, &mut self.out)?;
        }
        if let Some((event, text)) = self.rows_query.take() {
            self.out.set_table(&self.no_table);
            let at = self.texts.at(transaction, event, row_first);
            self.dialect.rows_query(&at, &text, &mut self.out)?;
        }
        Ok(())
    }

    /// Adds the messages of a rows event and returns how many changes it has.
    pub fn add(
        &mut self,
        transaction: &TransactionView,
        table: &MessageTable,
        rows: &RowsView<'_>,
        filter: ChangeFilter,
    ) -> Result<u32> {
        if table.view.judged {
            return self.add_visible(transaction, table, rows);
        }
        let mut images = Images::new(&table.view, *rows, self.dialect.json_style())?;
        if filter.images(images.change()).is_none() {
            while images.next()?.is_some() {}
            return Ok(images.changes());
        }
        if rows.row_first < rows.resume_rows {
            // The begin message and the statement's text were emitted with these rows before a reconnect.
            self.begun = true;
            self.rows_query = None;
        }
        self.begin(transaction, rows.row_first)?;
        self.out.set_table(&table.view.name);
        let start = self.out.value.len();
        let at = self.texts.at(transaction, rows.event, rows.row_first);
        table.writer.rows(&at, &mut images, &mut self.out)?;
        if table.writer.writes_changes() {
            let passed = rows.resume_rows.saturating_sub(rows.row_first).min(images.changes());
            self.out.changes = self.out.changes.saturating_add(passed);
        }
        self.out.check(start)?;
        Ok(images.changes())
    }

    /// Adds the messages of the visible rows of an event, for a table whose rows have conditions. Without a visible row
    /// nothing is written.
    fn add_visible(&mut self, transaction: &TransactionView, table: &MessageTable, rows: &RowsView<'_>) -> Result<u32> {
        let (before, begun) = (self.out.len(), self.begun);
        self.begin(transaction, rows.row_first)?;
        self.out.set_table(&table.view.name);
        let (first, start) = (self.out.len(), self.out.value.len());
        let codes = self.verdicts.of_event(transaction.commit_version, &table.view, rows.event.offset);
        let mut images = Images::new(&table.view, *rows, self.dialect.json_style())?.visible(codes);
        let at = self.texts.at(transaction, rows.event, rows.row_first);
        table.writer.rows(&at, &mut images, &mut self.out)?;
        let changes = images.changes();
        self.verdicts.use_up(transaction.commit_version, &table.view, changes);
        if self.out.len() == first {
            self.out.truncate(before);
            self.begun = begun;
        }
        self.out.check(start)?;
        Ok(changes)
    }

    /// Adds the message of a statement. If the statement is `alone`, the message also ends its transaction, at
    /// `event.end_offset`.
    pub fn add_statement(
        &mut self,
        transaction: &TransactionView,
        event: EventView,
        statement: &StatementView<'_>,
    ) -> Result<()> {
        if statement.alone {
            self.name(transaction);
        } else {
            self.begin(transaction, 0)?;
        }
        let before = self.out.len();
        self.out.set_table(&self.no_table);
        let at = self.texts.at(transaction, event, 0);
        self.dialect.statement(&at, statement, &mut self.out)?;
        if statement.alone && self.out.len() > before {
            self.out.mark_end(event.end_offset);
        }
        Ok(())
    }

    /// Ends a complete transaction; writes its end message if its begin message was written.
    pub fn end(&mut self, transaction: &TransactionView, event: EventView, xid: Option<u64>, rows: u32) -> Result<()> {
        // An error here drops the messages of the transaction.
        self.verdicts.end(transaction.commit_version)?;
        if std::mem::take(&mut self.begun) {
            let before = self.out.len();
            self.out.set_table(&self.no_table);
            let at = self.texts.at(transaction, event, rows);
            let end = match (self.texts.xa_id.as_deref(), xid) {
                (_, Some(xid)) => End::Xid(xid),
                (Some(id), None) => End::Xa(id),
                (None, None) => End::Commit,
            };
            self.dialect.end(&at, end, &mut self.out)?;
            if let Some(text) = &self.texts.xa_commit {
                let statement = StatementView {
                    database: "",
                    text,
                    backslash: Backslash::default(),
                    kind: StatementKind::XaCommit,
                    alone: false,
                };
                self.dialect.statement(&at, &statement, &mut self.out)?;
            }
            if self.out.len() > before {
                self.out.mark_end(event.end_offset);
            }
        }
        self.out.committed = self.out.len();
        Ok(())
    }

    /// Closes the batch and starts an empty batch. Without `all`, the messages of the open transaction are dropped.
    pub fn finish(&mut self, all: bool, position: (Arc<str>, u64)) -> Result<Option<Batch>> {
        if !all {
            self.out.truncate(self.out.committed);
        }
        let is_open = self.out.len() > self.out.committed;
        let held_back = usize::from(is_open && self.dialect.marks_last_row());
        let count = self.out.len().saturating_sub(held_back);
        self.batch(count, position)
    }

    /// Number of the open transaction's changes that were held back when the batch closed inside the transaction.
    pub fn held_back(&self) -> u32 {
        self.out.rows.iter().sum::<i32>().unsigned_abs()
    }

    /// Closes the batch of complete transactions; messages of the open transaction stay.
    pub fn close(&mut self, position: (Arc<str>, u64)) -> Result<Option<Batch>> {
        let count = self.out.committed;
        self.batch(count, position)
    }

    fn batch(&mut self, count: usize, position: (Arc<str>, u64)) -> Result<Option<Batch>> {
        self.out.committed = 0;
        let record = self.out.take(count)?;
        Ok(record.map(|record| Batch { database: "".into(), table: "".into(), schema_version: 0, record, position }))
    }
}
