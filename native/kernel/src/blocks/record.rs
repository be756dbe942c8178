//! The record of a block: 128 bytes of index data with which readers locate a position without reading the log.
//!
//! All numbers are little-endian.
//!
//! ```text
//!   0 source start u64     8 source end u64      16 file number u32     20 server id u32
//!  24 time i64            32 largest time i64    40 uuid 16 bytes, or domain u32 and server u32
//!  56 number u64          64 event index u32     68 transactions u32    72 changes u32
//!  76 events u32          80 tables u64          88 flags u32           92 epoch u32
//!  96 last boundary u64  104 transaction start u64  112 sequence start u64  124 CRC32 of the bytes before
//! ```

use crate::checksum::crc32;
use crate::gtid::Gtid;

/// Size of a record in bytes.
pub const RECORD_BYTES: usize = 128;

/// The block begins at the start of a transaction, or between transactions.
pub const FLAG_BEGINS: u32 = 1;
/// The block ends at the end of a transaction, or between transactions.
pub const FLAG_ENDS: u32 = 2;
/// The block contains a statement, and only the statement's text tells which tables it changes.
pub const FLAG_STATEMENT: u32 = 4;
/// The block's transactions have consecutive GTIDs, starting with the GTID in the record.
pub const FLAG_CONSECUTIVE: u32 = 8;
/// Some rows of the block could not be counted or assigned to a table, so all table bits are set.
pub const FLAG_UNCOUNTED: u32 = 16;
/// An XA transaction commits in the block. All table bits are set, because its rows are in another block. Records
/// written by version 0.1 lack this flag, and their table bits do not cover such transactions.
pub const FLAG_XA_COMMITS: u32 = 32;

/// The fields of the current block's record.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub start: u64,
    pub end: u64,
    pub file_number: u32,
    pub epoch: u32,
    pub server_id: u32,
    pub time_us: i64,
    /// GTID of the first transaction that has events in the block.
    pub gtid: Gtid,
    /// Whether the fields above describe a transaction, which is false for a block without transactions.
    pub has_transaction: bool,
    /// The number of the last transaction, as long as all numbers in the block are consecutive.
    pub last_number: Option<u64>,
    pub event_index: u32,
    pub transactions: u32,
    pub changes: u32,
    pub events: u32,
    pub tables: u64,
    pub flags: u32,
    pub last_boundary: u64,
    /// Offset where the first event's transaction starts; the block's own start if no transaction is open there.
    pub transaction_start: u64,
}

/// A run of consecutively numbered transactions of one source, ending with the newest transaction.
#[derive(Debug, Clone)]
pub(super) struct Run {
    first: Gtid,
    last: u64,
    /// From this offset on, the file contains only transactions of the run.
    pub start: u64,
}

impl Run {
    /// Starts a run with a transaction, if a record can hold its number.
    pub fn new(gtid: &Gtid, start: u64) -> Option<Run> {
        Some(Run { first: gtid.clone(), last: number_of(gtid)?, start })
    }

    /// Adds a transaction to the run. Returns false if the number is not consecutive.
    pub fn extend(&mut self, gtid: &Gtid) -> bool {
        let follows = follows(&self.first, self.last, gtid);
        if follows {
            self.last += 1;
        }
        follows
    }
}

impl Block {
    pub fn new(start: u64, file_number: u32, epoch: u32) -> Block {
        Block {
            start,
            end: start,
            file_number,
            epoch,
            server_id: 0,
            time_us: 0,
            gtid: Gtid::Anonymous,
            has_transaction: false,
            last_number: None,
            event_index: 0,
            transactions: 0,
            changes: 0,
            events: 0,
            tables: 0,
            flags: 0,
            last_boundary: 0,
            transaction_start: start,
        }
    }

    /// block before => previous block
    pub fn note_transaction(&mut self, gtid: &Gtid, server_id: u32, time_us: i64) {
        if self.has_transaction {
            let follows = self.last_number.filter(|last| follows(&self.gtid, *last, gtid));
            self.last_number = follows.map(|last| last + 1);
            return;
        }
        self.has_transaction = true;
        self.server_id = server_id;
        self.time_us = time_us;
        self.last_number = number_of(gtid);
        self.gtid = gtid.clone();
    }

    /// Encodes the record. `time_max_us` is the largest commit time of the log so far, and `run` is the run of the
    /// newest transaction.
    pub fn encode(&self, time_max_us: i64, in_transaction: bool, run: Option<&Run>) -> Vec<u8> {
        let mut flags = self.flags | FLAG_XA_COMMITS;
        if !in_transaction {
            flags |= FLAG_ENDS;
        }
        if self.last_number.is_some() {
            flags |= FLAG_CONSECUTIVE;
        }
        let mut out = Vec::with_capacity(RECORD_BYTES);
        out.extend_from_slice(&self.start.to_le_bytes());
        out.extend_from_slice(&self.end.to_le_bytes());
        out.extend_from_slice(&self.file_number.to_le_bytes());
        out.extend_from_slice(&self.server_id.to_le_bytes());
        out.extend_from_slice(&self.time_us.to_le_bytes());
        out.extend_from_slice(&time_max_us.to_le_bytes());
        let (uuid, number) = gtid_fields(&self.gtid);
        out.extend_from_slice(&uuid);
        out.extend_from_slice(&number.to_le_bytes());
        for count in [self.event_index, self.transactions, self.changes, self.events] {
            out.extend_from_slice(&count.to_le_bytes());
        }
        out.extend_from_slice(&self.tables.to_le_bytes());
        out.extend_from_slice(&flags.to_le_bytes());
        out.extend_from_slice(&self.epoch.to_le_bytes());
        // If the block's numbers are consecutive, they belong to the current run.
        let sequence_start = run.filter(|_| self.last_number.is_some()).map_or(0, |run| run.start);
        for offset in [self.last_boundary, self.transaction_start, sequence_start] {
            out.extend_from_slice(&offset.to_le_bytes());
        }
        out.resize(RECORD_BYTES - 4, 0);
        let checksum = crc32(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }
}

/// Returns the number of a transaction, if a record can hold its GTID.
fn number_of(gtid: &Gtid) -> Option<u64> {
    match gtid {
        // A record has no field for a tag, so a tagged GTID counts as not consecutive.
        Gtid::Mysql { tag, number, .. } if tag.is_empty() => Some(*number),
        Gtid::Mariadb { sequence, .. } => Some(*sequence),
        _ => None,
    }
}

/// Whether `next` directly follows number `last` in the sequence that `first` belongs to.
fn follows(first: &Gtid, last: u64, next: &Gtid) -> bool {
    let Some(expected) = last.checked_add(1) else { return false };
    match (first, next) {
        (Gtid::Mysql { uuid, .. }, Gtid::Mysql { uuid: next_uuid, tag, number }) => {
            uuid == next_uuid && tag.is_empty() && *number == expected
        }
        (
            Gtid::Mariadb { domain, server, .. },
            Gtid::Mariadb { domain: next_domain, server: next_server, sequence },
        ) => domain == next_domain && server == next_server && *sequence == expected,
        _ => false,
    }
}

fn gtid_fields(gtid: &Gtid) -> ([u8; 16], u64) {
    match gtid {
        Gtid::Anonymous => ([0; 16], 0),
        Gtid::Mysql { uuid, number, .. } => (*uuid, *number),
        Gtid::Mariadb { domain, server, sequence } => {
            let [a, b, c, d] = domain.to_le_bytes();
            let [e, f, g, h] = server.to_le_bytes();
            ([a, b, c, d, e, f, g, h, 0, 0, 0, 0, 0, 0, 0, 0], *sequence)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mysql(number: u64, tag: &str) -> Gtid {
        Gtid::Mysql { uuid: [7; 16], tag: tag.into(), number }
    }

    fn flags_after(gtids: &[Gtid]) -> u32 {
        let mut block = Block::new(4, 1, 0);
        for gtid in gtids {
            block.note_transaction(gtid, 1, 2);
        }
        let record = block.encode(9, false, None);
        assert_eq!(record.len(), RECORD_BYTES);
        u32::from_le_bytes(record[88..92].try_into().unwrap())
    }

    #[test]
    fn only_consecutive_numbers_set_the_flag() {
        let maria = |server, sequence| Gtid::Mariadb { domain: 1, server, sequence };
        for (gtids, expected) in [
            (vec![mysql(5, ""), mysql(6, ""), mysql(7, "")], FLAG_CONSECUTIVE),
            (vec![mysql(5, ""), mysql(7, "")], 0),
            (vec![mysql(5, ""), mysql(7, ""), mysql(8, "")], 0),
            (vec![mysql(5, "tag")], 0),
            (vec![mysql(5, ""), mysql(6, "tag")], 0),
            (vec![mysql(u64::MAX, ""), mysql(0, "")], 0),
            (vec![maria(1, 5), maria(1, 6)], FLAG_CONSECUTIVE),
            (vec![maria(1, 5), maria(2, 6)], 0),
            (vec![Gtid::Anonymous], 0),
            (vec![], 0),
        ] {
            assert_eq!(flags_after(&gtids) & FLAG_CONSECUTIVE, expected, "{gtids:?}");
        }
    }

    #[test]
    fn a_run_extends_only_over_consecutive_numbers() {
        let mut run = Run::new(&mysql(5, ""), 100).unwrap();
        assert!(run.extend(&mysql(6, "")) && run.extend(&mysql(7, "")));
        for gtid in [mysql(7, ""), mysql(9, ""), mysql(8, "tag"), Gtid::Anonymous] {
            assert!(!run.clone().extend(&gtid), "{gtid:?}");
        }
        assert!(Run::new(&Gtid::Anonymous, 100).is_none() && Run::new(&mysql(1, "tag"), 100).is_none());

        let field = |record: &[u8], at: usize| u64::from_le_bytes(record[at..at + 8].try_into().unwrap());
        let mut block = Block::new(300, 1, 0);
        block.transaction_start = 200;
        assert_eq!(field(&block.encode(9, true, Some(&run)), 112), 0, "a block without a number claims no run");
        block.note_transaction(&mysql(7, ""), 1, 2);
        let record = block.encode(9, true, Some(&run));
        assert_eq!((field(&record, 104), field(&record, 112)), (200, 100));
        block.note_transaction(&mysql(9, ""), 1, 2);
        assert_eq!(field(&block.encode(9, true, Some(&run)), 112), 0);
    }
}
