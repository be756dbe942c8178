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

/// Used outcomes of a table are removed once this many, and half of all, are used: removing them moves the others.
const USED_MAX: usize = 4096;

/// The outcomes of the rows of an event.
struct EventVerdicts {
    commit_version: i64,
    offset: i64,
    /// Number of the table's outcomes up to the event's end.
    end: usize,
}

/// The outcomes of one table's rows, in log order.
#[derive(Default)]
struct TableVerdicts {
    codes: Vec<u8>,
    events: Vec<EventVerdicts>,
    /// Number of outcomes that were used, and of events whose outcomes were all used.
    used: usize,
    events_used: usize,
}

impl TableVerdicts {
    fn add(&mut self, commit_version: i64, offset: i64, code: u8) {
        self.codes.push(code);
        let end = self.codes.len();
        match self.events.last_mut() {
            Some(last) if (last.commit_version, last.offset) == (commit_version, offset) => last.end = end,
            _ => self.events.push(EventVerdicts { commit_version, offset, end }),
        }
    }

    /// The next event with unused outcomes.
    fn next(&self) -> Option<&EventVerdicts> {
        self.events.get(self.events_used)
    }

    fn use_up(&mut self, changes: usize) {
        self.used = self.used.saturating_add(changes);
        while self.next().is_some_and(|event| event.end <= self.used) {
            self.events_used += 1;
        }
        let due = USED_MAX.max(self.codes.len() / 2).min(self.codes.len());
        if self.used >= due {
            self.remove_used();
        }
    }

    /// Removes used outcomes, and frees memory that a large transaction needed.
    fn remove_used(&mut self) {
        self.codes.drain(..self.used.min(self.codes.len()));
        self.events.drain(..self.events_used);
        for event in &mut self.events {
            event.end = event.end.saturating_sub(self.used);
        }
        (self.used, self.events_used) = (0, 0);
        self.codes.shrink_to(USED_MAX);
        self.events.shrink_to(USED_MAX);
    }
}

/// Number of outcomes of a transaction.
#[derive(Default)]
struct Counts {
    evaluated: usize,
    used: usize,
}

/// The outcomes of transactions that have not ended yet.
#[derive(Default)]
pub struct Verdicts {
    /// The outcomes by database and table, so that a lookup needs no owned name.
    tables: HashMap<Box<str>, HashMap<Box<str>, TableVerdicts>>,
    /// The counts of each transaction, by commit version.
    transactions: BTreeMap<i64, Counts>,
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
        let table = self.tables.entry(name.0.into()).or_default().entry(name.1.into()).or_default();
        for ((version, offset), code) in versions.iter().zip(offsets).zip(codes) {
            table.add(*version, *offset, *code);
        }
        for transaction in versions.chunk_by(i64::eq) {
            if let Some(version) = transaction.first() {
                self.transactions.entry(*version).or_default().evaluated += transaction.len();
            }
        }
        Ok(())
    }

    /// Returns the unused outcomes of an event. Events in a compressed payload share an offset.
    pub fn of_event(&self, version: i64, view: &TableView, offset: u64) -> &[u8] {
        let tables = self.tables.get(&*view.database);
        let Some(table) = tables.and_then(|tables| tables.get(&*view.table)) else { return &[] };
        match table.next() {
            Some(event) if (event.commit_version, event.offset) == (version, offset as i64) => {
                table.codes.get(table.used..event.end).unwrap_or_default()
            }
            _ => &[],
        }
    }

    /// Counts the outcomes of a table's changes as used.
    pub fn use_up(&mut self, version: i64, view: &TableView, changes: u32) {
        let changes = changes as usize;
        if let Some(counts) = self.transactions.get_mut(&version) {
            counts.used = counts.used.saturating_add(changes);
        }
        let tables = self.tables.get_mut(&*view.database);
        if let Some(table) = tables.and_then(|tables| tables.get_mut(&*view.table)) {
            table.use_up(changes);
        }
    }

    /// Ends the transactions up to a commit version. Raises `EventMalformed` if there are outcomes of rows that were
    /// not read: the caller has read other rows.
    pub fn end(&mut self, version: i64) -> Result<()> {
        while let Some(first) = self.transactions.first_entry().filter(|first| *first.key() <= version) {
            let counts = first.remove();
            self.rows = self.rows.saturating_sub(counts.evaluated);
            if counts.used != counts.evaluated {
                return Err(self.unread(version, &counts));
            }
        }
        Ok(())
    }

    /// Returns the error for outcomes of rows that were not read, which names the table of the first of them.
    #[cold]
    fn unread(&self, version: i64, counts: &Counts) -> Error {
        let mut tables = self.tables.iter().flat_map(|(database, tables)| {
            let is_unread = |table: &TableVerdicts| table.next().is_some_and(|event| event.commit_version <= version);
            tables.iter().filter(move |(_, table)| is_unread(table)).map(move |(table, _)| (database, table))
        });
        let table = tables.next().map(|(database, table)| format!(": table `{database}`.`{table}`"));
        let Counts { evaluated, used } = counts;
        let rows = format!("{used} rows were read, and the conditions of {evaluated} evaluated");
        malformed(format!("{rows}{}", table.unwrap_or_default()))
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
        let unread = verdicts.end(8).expect_err("a row was not read");
        assert_eq!(unread.kind(), ErrorKind::EventMalformed);
        assert!(unread.to_string().contains("`shop`.`orders`"), "{unread}");
        assert_eq!(verdicts.rows, 0);
    }

    #[test]
    fn outcomes_of_many_transactions_are_found_after_used_ones_are_removed() {
        let views = [view("orders"), view("users")];
        let mut verdicts = Verdicts::default();
        let transactions = 3 * USED_MAX as i64;
        let versions: Vec<i64> = (0..transactions).flat_map(|version| [version; 3]).collect();
        let offsets: Vec<i64> =
            (0..transactions).flat_map(|version| [10 * version, 10 * version, 10 * version + 5]).collect();
        let codes: Vec<u8> = (0..versions.len()).map(|at| (at % 4) as u8).collect();
        for view in &views {
            verdicts.add((&view.database, &view.table), &versions, &offsets, &codes).expect("few rows");
        }
        let mut events = codes.as_slice();
        for version in 0..transactions {
            let (first, rest) = events.split_at(2);
            let (second, rest) = rest.split_at(1);
            for (offset, expected) in [(10 * version, first), (10 * version + 5, second)] {
                for view in &views {
                    assert_eq!(verdicts.of_event(version, view, offset as u64), expected);
                    assert!(verdicts.of_event(version + 1, view, offset as u64).is_empty());
                    verdicts.use_up(version, view, expected.len() as u32);
                }
            }
            verdicts.end(version).expect("all rows were read");
            events = rest;
        }
        assert_eq!((verdicts.rows, verdicts.transactions.len()), (0, 0));
        let tables = verdicts.tables.values().flat_map(HashMap::values);
        assert!(tables.clone().all(|table| table.codes.is_empty() && table.events.capacity() <= USED_MAX));
        assert_eq!(tables.count(), 2);
    }

    #[test]
    fn outcomes_of_a_large_transaction_are_moved_a_few_times_only() {
        let rows = 64 * USED_MAX;
        let orders = view("orders");
        let mut verdicts = Verdicts::default();
        let offsets: Vec<i64> = (0..rows as i64).collect();
        verdicts.add((&orders.database, &orders.table), &vec![7; rows], &offsets, &vec![3; rows]).expect("few rows");
        let mut lengths = std::collections::BTreeSet::new();
        for offset in 0..rows as u64 {
            assert_eq!(verdicts.of_event(7, &orders, offset), [3]);
            verdicts.use_up(7, &orders, 1);
            lengths.extend(verdicts.tables.values().flat_map(HashMap::values).map(|table| table.codes.len()));
        }
        assert!(lengths.len() <= 10, "{lengths:?}");
        verdicts.end(7).expect("all rows were read");
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
