//! Counters of processed events, changes and transactions, for metrics. The counters outlive the cutters that write
//! them.
//!
//! Only one cutter writes at a time, while any thread may read. A reader may see some counters before and others after
//! they are updated for the same event, which is acceptable for metrics.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::event::{Change, EventKind};

/// A counter with a single writer, so adding needs no atomic read-modify-write.
#[derive(Debug, Default)]
struct Count(AtomicU64);

impl Count {
    #[inline]
    fn add(&self, number: u64) {
        self.0.store(self.0.load(Relaxed) + number, Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Counters for one table, or for all tables that are not counted separately.
#[derive(Debug, Default)]
pub(super) struct RowCounts([Count; 3]);

impl RowCounts {
    #[inline]
    pub fn add(&self, change: Change, rows: u32) {
        self.0[change as usize].add(u64::from(rows));
    }

    fn get(&self) -> [u64; 3] {
        [0, 1, 2].map(|change| self.0[change].get())
    }
}

/// Events by type, changes by table, and transactions. Only the first `tables_max` tables are counted separately, so
/// that memory is bounded however many tables a log has.
#[derive(Debug)]
pub struct Counts {
    events: [Count; EventKind::ALL.len()],
    transactions: Count,
    large_transactions: Count,
    large_bytes: u64,
    tables_max: usize,
    tables: Mutex<HashMap<Box<str>, Arc<RowCounts>>>,
    other: Arc<RowCounts>,
}

impl Counts {
    /// Counts the changes of up to `tables_max` tables separately. A transaction of more than `large_bytes` is large.
    pub fn new(tables_max: usize, large_bytes: u64) -> Counts {
        Counts {
            events: std::array::from_fn(|_| Count::default()),
            transactions: Count::default(),
            large_transactions: Count::default(),
            large_bytes,
            tables_max,
            tables: Mutex::default(),
            other: Arc::default(),
        }
    }

    /// Counts an event.
    #[inline]
    pub(super) fn add_event(&self, kind: EventKind) {
        self.events[kind as usize].add(1);
    }

    /// Counts a complete transaction.
    #[inline]
    pub(super) fn add_transaction(&self, bytes: u64) {
        self.transactions.add(1);
        if bytes > self.large_bytes {
            self.large_transactions.add(1);
        }
    }

    /// Returns the counters of a table, `database.table`.
    pub(super) fn rows_of(&self, name: &[u8]) -> Arc<RowCounts> {
        if self.tables_max == 0 {
            return self.other.clone();
        }
        let name = String::from_utf8_lossy(name);
        let mut tables = self.tables();
        if let Some(rows) = tables.get(&*name) {
            return rows.clone();
        }
        if tables.len() >= self.tables_max {
            return self.other.clone();
        }
        tables.entry(name.into()).or_default().clone()
    }

    /// Returns the number of events by type, for the types that occurred. Types with the same printed name are listed
    /// separately.
    pub fn events(&self) -> Vec<(&'static str, u64)> {
        let counted = EventKind::ALL.iter().map(|kind| (kind.name(), self.events[*kind as usize].get()));
        counted.filter(|(_, number)| *number > 0).collect()
    }

    /// The number of complete transactions.
    pub fn transactions(&self) -> u64 {
        self.transactions.get()
    }

    /// The number of large transactions.
    pub fn large_transactions(&self) -> u64 {
        self.large_transactions.get()
    }

    /// Returns the inserts, updates and deletes of each table that is counted separately.
    pub fn tables_rows(&self) -> Vec<(String, [u64; 3])> {
        self.tables().iter().map(|(name, rows)| (name.to_string(), rows.get())).collect()
    }

    /// Returns the changes of all tables that are not counted separately.
    pub fn other_rows(&self) -> [u64; 3] {
        self.other.get()
    }

    fn tables(&self) -> MutexGuard<'_, HashMap<Box<str>, Arc<RowCounts>>> {
        // A panic cannot leave the map inconsistent, because every change is a single insertion.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Counts {
    fn default() -> Counts {
        Counts::new(0, u64::MAX)
    }
}
