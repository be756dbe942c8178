//! XA transactions that were prepared and of which the outcome has not come.
//!
//! Their rows are decoded when they commit. Until then there is kept where their events lie, and, of small ones, the events
//! themselves.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::event::format_description::Format;
use crate::event::xa::XaId;
use crate::event::Header;
use crate::frame::events::Span;
use crate::limits::{EVENT_HEADER_BYTES, PREPARED_TRANSACTIONS_MAX};

/// The bytes that say where a kept event lies: the offsets of its first byte and of the byte after it.
pub(super) const SPAN_BYTES: usize = 16;

/// Where a prepared transaction lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedPlace {
    /// The file.
    pub file: Arc<str>,
    /// Its number.
    pub file_number: u32,
    /// The offset of the transaction's first event.
    pub start: u64,
    /// The offset after its last event.
    pub end: u64,
}

/// A prepared transaction.
#[derive(Debug, Clone)]
pub(super) struct Transaction {
    pub place: PreparedPlace,
    /// The format of the events that are kept.
    pub format: Option<Format>,
    /// Its events without the last, each after its span; None where they are to be read again.
    pub events: Option<Arc<[u8]>>,
}

/// Prepared transactions by their ids. One that is not here is looked for in the log.
#[derive(Debug)]
pub(super) struct Prepared {
    transactions: HashMap<XaId, Transaction>,
    bytes: usize,
    bytes_max: usize,
    /// Ids of which the outcome came first: what was prepared under them earlier can commit no more.
    ended: HashSet<XaId>,
}

impl Prepared {
    pub fn new(bytes_max: usize) -> Prepared {
        Prepared { transactions: HashMap::new(), bytes: 0, bytes_max, ended: HashSet::new() }
    }

    pub fn get(&self, id: &XaId) -> Option<&Transaction> {
        self.transactions.get(id)
    }

    pub fn places(&self) -> impl Iterator<Item = (String, &PreparedPlace)> {
        self.transactions.iter().map(|(id, transaction)| (id.to_string(), &transaction.place))
    }

    /// Adds a transaction, in place of an earlier one of this id: a server that crashed may have lost that one.
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

    /// Forgets the transaction of this id; whether there was one.
    pub fn remove(&mut self, id: &XaId) -> bool {
        let Some(transaction) = self.transactions.remove(id) else { return false };
        self.bytes -= transaction.events.map_or(0, |events| events.len());
        true
    }

    /// Notes the outcome of a transaction that is passed over.
    pub fn pass_outcome(&mut self, id: XaId) {
        if !self.remove(&id) && self.ended.len() < PREPARED_TRANSACTIONS_MAX {
            self.ended.insert(id);
        }
    }

    /// Whether an outcome came of a transaction that was prepared before all that was passed. Where there were too many, it
    /// is so of any.
    pub fn has_outcome(&self, id: &XaId) -> bool {
        self.ended.len() >= PREPARED_TRANSACTIONS_MAX || self.ended.contains(id)
    }

    /// Halves the bytes, so that the search for the oldest is rare.
    fn drop_oldest_events(&mut self) {
        let mut kept: Vec<&mut Transaction> =
            self.transactions.values_mut().filter(|transaction| transaction.events.is_some()).collect();
        kept.sort_unstable_by_key(|transaction| (transaction.place.file_number, transaction.place.start));
        for transaction in kept {
            if self.bytes <= self.bytes_max / 2 {
                return;
            }
            self.bytes -= transaction.events.take().map_or(0, |events| events.len());
        }
    }
}

/// An XA transaction of which the end has not come: its events are kept, and not decoded.
#[derive(Debug, Clone)]
pub(super) struct Holding {
    pub id: XaId,
    events: Vec<u8>,
    bytes_max: usize,
    overflown: bool,
}

impl Holding {
    /// Of a transaction with more than `bytes_max` of events they are read again when it commits.
    pub fn new(id: XaId, bytes_max: usize) -> Holding {
        Holding { id, events: Vec::new(), bytes_max, overflown: false }
    }

    pub fn add(&mut self, header: &Header, body: &[u8], span: Span) {
        let bytes = SPAN_BYTES + EVENT_HEADER_BYTES + body.len();
        if self.overflown || self.events.len() + bytes > self.bytes_max {
            self.events = Vec::new();
            self.overflown = true;
            return;
        }
        self.events.extend_from_slice(&span.start.to_le_bytes());
        self.events.extend_from_slice(&span.end.to_le_bytes());
        let size = (EVENT_HEADER_BYTES + body.len()) as u32;
        Header { size, ..*header }.write(&mut self.events);
        self.events.extend_from_slice(body);
    }

    pub fn into_events(self) -> (XaId, Option<Arc<[u8]>>) {
        let kept = !self.overflown && !self.events.is_empty();
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
        let place = PreparedPlace { file: "binlog.000001".into(), file_number: 1, start, end: start + 1 };
        Transaction { place, format: None, events: Some(vec![0; bytes].into()) }
    }

    #[test]
    fn oldest_events_are_dropped_and_their_places_stay() {
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
    fn an_id_that_is_used_again_means_the_newer_transaction() {
        let mut prepared = Prepared::new(100);
        prepared.insert(id(1), transaction(4, 10));
        prepared.insert(id(1), transaction(900, 20));
        assert_eq!(prepared.get(&id(1)).unwrap().place.start, 900);
        prepared.remove(&id(1));
        assert_eq!((prepared.get(&id(1)).is_none(), prepared.bytes), (true, 0));
    }

    #[test]
    fn an_outcome_that_comes_first_is_of_an_earlier_transaction() {
        let mut prepared = Prepared::new(100);
        prepared.insert(id(1), transaction(4, 10));
        prepared.pass_outcome(id(1));
        assert!(!prepared.has_outcome(&id(1)));
        prepared.pass_outcome(id(1));
        assert!(prepared.has_outcome(&id(1)) && !prepared.has_outcome(&id(2)));
        for number in 2..=PREPARED_TRANSACTIONS_MAX as u32 {
            prepared.pass_outcome(id(number));
        }
        assert!(prepared.has_outcome(&id(0)));
    }

    #[test]
    fn a_transaction_that_is_too_large_keeps_no_events() {
        let header = Header { timestamp: 0, code: 30, server_id: 1, size: 0, end_position: 0, flags: 0 };
        let mut holding = Holding::new(id(1), 300);
        for _ in 0..3 {
            holding.add(&header, &[0; 80], Span { start: 0, end: 1 });
        }
        assert!(holding.into_events().1.is_none());
    }
}
