//! The row images that a reader may see. The caller evaluates conditions on the rows and passes the outcomes.
//!
//! The outcomes of a table's rows are in the order of the log. They are taken event by event, so that an outcome can
//! never apply to a row of another event. Without an outcome, a row is an error.

use std::collections::{BTreeMap, HashMap};

use crate::emit::dialect::TableView;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::Change;
use crate::limits::VERDICT_ROWS_MAX;

/// The bit of a visible image before an update or a delete.
const BEFORE: u8 = 1;
/// The bit of a visible image after an insert or an update.
const AFTER: u8 = 2;

/// The kind of change that a reader sees, given the visible images of a change; None if no image is visible. An update
/// with a single visible image is a delete or an insert.
pub fn visible_change(change: Change, code: u8) -> Result<Option<Change>> {
    match (change, code) {
        (_, 0) => Ok(None),
        (Change::Insert | Change::Update, AFTER) => Ok(Some(Change::Insert)),
        (Change::Delete | Change::Update, BEFORE) => Ok(Some(Change::Delete)),
        (Change::Update, code) if code == BEFORE | AFTER => Ok(Some(Change::Update)),
        _ => Err(malformed(format!("the conditions of another change: {code}"))),
    }
}

/// The outcomes of one table's rows in a transaction.
#[derive(Default)]
struct TableVerdicts {
    codes: Vec<u8>,
    /// For each event in order: its offset, and the number of outcomes up to its end.
    events: Vec<(i64, usize)>,
    /// Number of outcomes that were used, and of events whose outcomes were all used.
    used: usize,
    events_used: usize,
}

/// Database and table.
type Name = (Box<str>, Box<str>);

fn name_of(view: &TableView) -> Name {
    (Box::from(&*view.database), Box::from(&*view.table))
}

/// The outcomes of transactions that have not ended yet.
#[derive(Default)]
pub struct Verdicts {
    transactions: BTreeMap<i64, HashMap<Name, TableVerdicts>>,
    rows: usize,
}

impl Verdicts {
    /// Adds the outcomes of rows of a table, in log order: the commit version, the event's offset, and the visible
    /// images of each change. Raises `LimitExceeded` for a transaction with too many changes.
    pub fn add(&mut self, name: (&str, &str), versions: &[i64], offsets: &[i64], codes: &[u8]) -> Result<()> {
        if versions.len() != codes.len() || offsets.len() != codes.len() {
            return Err(malformed("outcomes of conditions with different lengths"));
        }
        self.rows = self.rows.saturating_add(codes.len());
        if self.rows > VERDICT_ROWS_MAX {
            let message =
                format!("a transaction has more than {VERDICT_ROWS_MAX} changes of tables whose rows have conditions");
            return Err(Error::new(ErrorKind::LimitExceeded, message));
        }
        let mut rows = versions.iter().zip(offsets).zip(codes).peekable();
        while let Some(((version, _), _)) = rows.peek() {
            let version = **version;
            let table = self.table(version, name);
            while let Some(((_, offset), code)) = rows.next_if(|((next, _), _)| **next == version) {
                table.codes.push(*code);
                let end = table.codes.len();
                match table.events.last_mut() {
                    Some((last, last_end)) if last == offset => *last_end = end,
                    _ => table.events.push((*offset, end)),
                }
            }
        }
        Ok(())
    }

    fn table(&mut self, version: i64, (database, table): (&str, &str)) -> &mut TableVerdicts {
        let name = (Box::from(database), Box::from(table));
        self.transactions.entry(version).or_default().entry(name).or_default()
    }

    /// Returns the unused outcomes of an event. Events in a compressed payload share an offset.
    pub fn of_event(&self, version: i64, view: &TableView, offset: u64) -> &[u8] {
        let tables = self.transactions.get(&version);
        let Some(table) = tables.and_then(|tables| tables.get(&name_of(view))) else { return &[] };
        match table.events.get(table.events_used) {
            Some((known, end)) if *known == offset as i64 => table.codes.get(table.used..*end).unwrap_or_default(),
            _ => &[],
        }
    }

    /// Counts outcomes of a table as used.
    pub fn use_up(&mut self, version: i64, view: &TableView, changes: u32) {
        let tables = self.transactions.get_mut(&version);
        if let Some(table) = tables.and_then(|tables| tables.get_mut(&name_of(view))) {
            table.used = table.used.saturating_add(changes as usize);
            while table.events.get(table.events_used).is_some_and(|(_, end)| *end <= table.used) {
                table.events_used += 1;
            }
        }
    }

    /// Drops the outcomes up to a transaction that ends. Raises `EventMalformed` if there are outcomes of rows that were
    /// not read: the caller has read other rows.
    pub fn end(&mut self, version: i64) -> Result<()> {
        while let Some(first) = self.transactions.first_entry().filter(|first| *first.key() <= version) {
            for ((database, table), verdicts) in first.remove() {
                let (used, evaluated) = (verdicts.used, verdicts.codes.len());
                self.rows = self.rows.saturating_sub(evaluated);
                if used != evaluated {
                    let counts = format!("{used} rows were read, and the conditions of {evaluated} evaluated");
                    return Err(malformed(format!("{counts}: table `{database}`.`{table}`")));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(table: &str) -> TableView {
        TableView {
            database: "shop".into(),
            table: table.into(),
            name: format!("shop.{table}").into(),
            schema_version: 0,
            columns: Vec::new(),
            shard_columns: Vec::new(),
            json_columns: 0,
            mariadb: false,
            judged: true,
        }
    }

    #[test]
    fn outcomes_apply_only_to_the_event_whose_rows_they_are_of() {
        let (orders, users) = (view("orders"), view("users"));
        let mut verdicts = Verdicts::default();
        verdicts.add(("shop", "orders"), &[7, 7, 7, 8], &[100, 100, 200, 300], &[1, 0, 2, 3]).expect("few rows");
        assert_eq!(verdicts.of_event(7, &orders, 100), [1, 0]);
        assert!(verdicts.of_event(7, &orders, 200).is_empty(), "the first event was not read");
        assert!(verdicts.of_event(7, &users, 100).is_empty());
        verdicts.use_up(7, &orders, 2);
        assert_eq!(verdicts.of_event(7, &orders, 200), [2]);
        assert!(verdicts.of_event(7, &orders, 100).is_empty());
        verdicts.use_up(7, &orders, 1);
        verdicts.end(7).expect("all rows were read");
        assert!(verdicts.of_event(7, &orders, 200).is_empty());
        assert_eq!(verdicts.of_event(8, &orders, 300), [3]);
        assert_eq!(verdicts.end(8).expect_err("a row was not read").kind(), ErrorKind::EventMalformed);
        assert_eq!(verdicts.rows, 0);
    }

    #[test]
    fn outcomes_that_do_not_belong_to_the_kind_of_change_are_refused() {
        assert_eq!(visible_change(Change::Update, 0).expect("known"), None);
        assert_eq!(visible_change(Change::Update, 1).expect("known"), Some(Change::Delete));
        assert_eq!(visible_change(Change::Update, 2).expect("known"), Some(Change::Insert));
        assert_eq!(visible_change(Change::Update, 3).expect("known"), Some(Change::Update));
        for (change, code) in [(Change::Insert, 1), (Change::Insert, 3), (Change::Delete, 2), (Change::Update, 4)] {
            assert!(visible_change(change, code).is_err());
        }
    }
}
