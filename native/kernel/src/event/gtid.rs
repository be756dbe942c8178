//! The GTID event of MySQL (codes 33 and 34): the id and commit time of the transaction after the event.

use crate::cursor::Cursor;
use crate::error::Result;
use crate::event::xa::XaId;
use crate::gtid::Gtid;

/// The fields that the three kinds of GTID events share.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TransactionHead {
    /// The GTID; anonymous if GTIDs are off.
    pub gtid: Gtid,
    /// When this server committed the transaction, in microseconds since 1970 (MySQL 8.0.1 and later).
    pub commit_us: Option<u64>,
    /// Size in bytes of the whole transaction including the GTID event (MySQL 8.0.2 and later).
    pub length: Option<u64>,
    /// MariaDB: a single statement follows, without a commit event.
    pub standalone: bool,
    /// The connection that committed the transaction (MariaDB 11.5 and later).
    pub thread_id: Option<u64>,
    /// The logical clock of parallel replication: the sequence number of the last transaction that must commit before
    /// this transaction, and its own sequence number (MySQL 5.7 and later).
    pub clock: Option<(i64, i64)>,
    /// The XA transaction that this transaction prepares (MariaDB 10.5 and later).
    pub xa_id: Option<XaId>,
}

fn to_signed(value: u64) -> i64 {
    i64::from_ne_bytes(value.to_ne_bytes())
}

/// Reads the body, without checksum (`Gtid_event`).
///
/// Layout: flags u8, uuid 16 bytes, number i64. MySQL 5.7 adds a logical clock (type u8 = 2, two i64), and MySQL 8.0
/// adds the commit times of 7 bytes each, the transaction's length and the server versions.
pub fn read(body: &[u8], anonymous: bool) -> Result<TransactionHead> {
    let mut cursor = Cursor::new(body);
    cursor.skip(1)?;
    let mut uuid = [0u8; 16];
    uuid.copy_from_slice(cursor.take(16)?);
    let number = cursor.u64()?;
    let mut head = TransactionHead::default();
    if !anonymous {
        head.gtid = Gtid::Mysql { uuid, tag: String::new(), number };
    }
    if cursor.remaining() < 17 || cursor.u8()? != 2 {
        return Ok(head);
    }
    head.clock = Some((to_signed(cursor.u64()?), to_signed(cursor.u64()?)));
    if cursor.remaining() < 7 {
        return Ok(head);
    }
    const HAS_ORIGINAL: u64 = 1 << 55;
    let immediate = u64::from(cursor.u24()?) | u64::from(cursor.u32()?) << 24;
    if immediate & HAS_ORIGINAL != 0 {
        cursor.skip(7)?;
    }
    head.commit_us = Some(immediate & !HAS_ORIGINAL);
    if !cursor.is_empty() {
        head.length = Some(cursor.length_encoded()?);
    }
    Ok(head)
}
