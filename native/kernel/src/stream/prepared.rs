//! XA transactions that were prepared and whose outcome is still unknown.
//!
//! Their rows are decoded when they commit. Until then the location of their events is recorded, and small
//! transactions also keep the events in memory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::event::format_description::Format;
use crate::event::xa::XaId;
use crate::event::Header;
use crate::frame::events::Span;
use crate::limits::{EVENT_HEADER_BYTES, PREPARED_TRANSACTIONS_MAX};

/// Size of the span that is stored before each held event: the offsets of its first byte and of the byte after it.
pub(super) const SPAN_BYTES: usize = 16;

/// The location of a prepared transaction's events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedLocation {
    /// The file.
    pub file: Arc<str>,
    /// The number of the file.
    pub file_number: u32,
    /// The offset of the transaction's first event.
    pub start: u64,
    /// The offset after the transaction's last event.
    pub end: u64,
}

/// A prepared transaction.
#[derive(Debug, Clone)]
pub(super) struct Transaction {
    pub location: PreparedLocation,
    /// The format of the held events.
    pub format: Option<Format>,
    /// All events except the last, each after its span; None if they must be read again.
    pub events: Option<Arc<[u8]>>,
}

/// Prepared transactions by id. Missing transactions are searched for in the log.
#[derive(Debug)]
pub(super) struct Prepared {
    transactions: HashMap<XaId, Transaction>,
    bytes: usize,
    bytes_max: usize,
    /// Ids of transactions whose outcome was read without a prepare before it. A transaction that was prepared earlier
    /// under such an id can no longer commit.
    ended: HashSet<XaId>,
}

impl Prepared {
    pub fn new(bytes_max: usize) -> Prepared {
        Prepared { transactions: HashMap::new(), bytes: 0, bytes_max, ended: HashSet::new() }
    }

    pub fn get(&self, id: &XaId) -> Option<&Transaction> {
        self.transactions.get(id)
    }

    pub fn locations(&self) -> impl Iterator<Item = (String, &PreparedLocation)> {
        self.transactions.iter().map(|(id, transaction)| (id.to_string(), &transaction.location))
    }

    /// Adds a transaction. Replaces an earlier transaction with the same id, whose outcome a crashed server may not
    /// have logged.
    pub fn insert(&mut self, id: XaId, transaction: Transaction) {
        self.remove(&id);
        if self.transactions.len() >= PREPARED_TRANSACTIONS_MAX {
            (self.transactions, self.bytes) = (HashMap::new(), 0);
        }
        self.bytes += transaction.events.as_ref().map_or(0, |events| events.len());
        self.transactions.insert(id, transaction);
        if self.bytes > self.bytes_max {
            self.drop_oldest_events();
        }
    }

    /// Removes the transaction with this id. Returns whether it was recorded.
    pub fn remove(&mut self, id: &XaId) -> bool {
        let Some(transaction) = self.transactions.remove(id) else { return false };
        self.bytes -= transaction.events.map_or(0, |events| events.len());
        true
    }

    /// Records the outcome of a transaction that is skipped.
    pub fn note_outcome(&mut self, id: XaId) {
        if !self.remove(&id) && self.ended.len() < PREPARED_TRANSACTIONS_MAX {
            self.ended.insert(id);
        }
    }

    /// Whether the outcome of this transaction has been read. The transaction was prepared before the range. Returns
    /// true for every id once there are too many outcomes to remember.
    pub fn has_outcome(&self, id: &XaId) -> bool {
        self.ended.len() >= PREPARED_TRANSACTIONS_MAX || self.ended.contains(id)
    }

    /// Drops the events of the oldest transactions until half of the limit is free, so that this is rarely needed.
    fn drop_oldest_events(&mut self) {
        let mut kept: Vec<&mut Transaction> =
            self.transactions.values_mut().filter(|transaction| transaction.events.is_some()).collect();
        kept.sort_unstable_by_key(|transaction| (transaction.location.file_number, transaction.location.start));
        for transaction in kept {
            if self.bytes <= self.bytes_max / 2 {
                return;
            }
            self.bytes -= transaction.events.take().map_or(0, |events| events.len());
        }
    }
}

/// The events of an open XA transaction, kept undecoded until the transaction's outcome is known.
#[derive(Debug, Clone)]
pub(super) struct HeldEvents {
    pub id: XaId,
    events: Vec<u8>,
    bytes_max: usize,
    overflowed: bool,
}

impl HeldEvents {
    /// Holds events with a total size of up to `bytes_max`. Events of a larger transaction are read again when it
    /// commits.
    pub fn new(id: XaId, bytes_max: usize) -> HeldEvents {
        HeldEvents { id, events: Vec::new(), bytes_max, overflowed: false }
    }

    pub fn add(&mut self, header: &Header, body: &[u8], span: Span) {
        let bytes = SPAN_BYTES + EVENT_HEADER_BYTES + body.len();
        if self.overflowed || self.events.len() + bytes > self.bytes_max {
            self.events = Vec::new();
            self.overflowed = true;
            return;
        }
        self.events.extend_from_slice(&span.start.to_le_bytes());
        self.events.extend_from_slice(&span.end.to_le_bytes());
        let size = (EVENT_HEADER_BYTES + body.len()) as u32;
        Header { size, ..*header }.write(&mut self.events);
        self.events.extend_from_slice(body);
    }

    pub fn into_events(self) -> (XaId, Option<Arc<[u8]>>) {
        let kept = !self.overflowed && !self.events.is_empty();
        (self.id, kept.then(|| self.events.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> XaId {
        XaId::new(&number.to_le_bytes(), b"", 1).unwrap()
    }

    fn transaction(start: u64, bytes: usize) -> Transaction {
        let location = PreparedLocation { file: "binlog.000001".into(), file_number: 1, start, end: start + 1 };
        Transaction { location, format: None, events: Some(vec![0; bytes].into()) }
    }

    #[test]
    fn oldest_events_are_dropped_but_their_locations_stay() {
        let quarter = 100;
        let mut prepared = Prepared::new(4 * quarter);
        for number in 0..5 {
            prepared.insert(id(number), transaction(u64::from(number), quarter));
        }
        let kept: Vec<bool> = (0..5).map(|number| prepared.get(&id(number)).unwrap().events.is_some()).collect();
        assert_eq!(kept, [false, false, false, true, true]);
        assert_eq!(prepared.bytes, 2 * quarter);
    }

    #[test]
    fn a_reused_id_refers_to_the_newer_transaction() {
        let mut prepared = Prepared::new(100);
        prepared.insert(id(1), transaction(4, 10));
        prepared.insert(id(1), transaction(900, 20));
        assert_eq!(prepared.get(&id(1)).unwrap().location.start, 900);
        prepared.remove(&id(1));
        assert_eq!((prepared.get(&id(1)).is_none(), prepared.bytes), (true, 0));
    }

    #[test]
    fn an_outcome_without_prepare_belongs_to_an_earlier_transaction() {
        let mut prepared = Prepared::new(100);
        prepared.insert(id(1), transaction(4, 10));
        prepared.note_outcome(id(1));
        assert!(!prepared.has_outcome(&id(1)));
        prepared.note_outcome(id(1));
        assert!(prepared.has_outcome(&id(1)) && !prepared.has_outcome(&id(2)));
        for number in 2..=PREPARED_TRANSACTIONS_MAX as u32 {
            prepared.note_outcome(id(number));
        }
        assert!(prepared.has_outcome(&id(0)));
    }

    #[test]
    fn too_large_transactions_keep_no_events() {
        let header = Header { timestamp: 0, code: 30, server_id: 1, size: 0, end_position: 0, flags: 0 };
        let mut held_events = HeldEvents::new(id(1), 300);
        for _ in 0..3 {
            held_events.add(&header, &[0; 80], Span { start: 0, end: 1 });
        }
        assert!(held_events.into_events().1.is_none());
    }
}
