//! The GTID event of MariaDB (code 162), and its GTID list (code 163).

use crate::cursor::Cursor;
use crate::error::Result;
use crate::event::gtid::TransactionHead;
use crate::event::xa::XaId;
use crate::gtid::{Gtid, GtidSet};

const STANDALONE: u8 = 1;
const GROUP_COMMIT_ID: u8 = 2;
const PREPARED_XA: u8 = 64;
const COMPLETED_XA: u8 = 128;
const EXTRA_MULTI_ENGINE: u8 = 1;
const EXTRA_COMMIT_ALTER: u8 = 4;
const EXTRA_ROLLBACK_ALTER: u8 = 8;
const EXTRA_THREAD_ID: u8 = 16;

/// Reads the body, without checksum (`Gtid_log_event`).
///
/// Layout: sequence u64, domain u32, flags u8; then, depending on the flags, a commit id, an XA id and extra fields.
/// The server pads the body with zeros to 19 bytes. The server id is in the event's header.
pub fn read(body: &[u8], server: u32) -> Result<TransactionHead> {
    let mut cursor = Cursor::new(body);
    let sequence = cursor.u64()?;
    let domain = cursor.u32()?;
    let flags = cursor.u8()?;
    let mut head = TransactionHead {
        gtid: Gtid::Mariadb { domain, server, sequence },
        standalone: flags & STANDALONE != 0,
        ..TransactionHead::default()
    };
    if flags & GROUP_COMMIT_ID != 0 {
        cursor.skip(8)?;
    }
    if flags & (PREPARED_XA | COMPLETED_XA) != 0 {
        let format = cursor.u32()?;
        let lengths = [usize::from(cursor.u8()?), usize::from(cursor.u8()?)];
        let [global, branch] = lengths;
        let parts = (cursor.take(global)?, cursor.take(branch)?);
        if flags & PREPARED_XA != 0 {
            head.xa_id = Some(XaId::new(parts.0, parts.1, format)?);
        }
    }
    head.thread_id = extra_thread_id(cursor);
    Ok(head)
}

/// Reads the thread id from the optional fields at the end. Servers before 11.5 write none.
fn extra_thread_id(mut cursor: Cursor<'_>) -> Option<u64> {
    let extra = cursor.u8().ok()?;
    if extra & EXTRA_MULTI_ENGINE != 0 {
        cursor.skip(1).ok()?;
    }
    if extra & (EXTRA_COMMIT_ALTER | EXTRA_ROLLBACK_ALTER) != 0 {
        cursor.skip(8).ok()?;
    }
    if extra & EXTRA_THREAD_ID == 0 {
        return None;
    }
    cursor.u32().ok().map(u64::from)
}

/// Reads a GTID list (`Gtid_list_log_event`): count and flags in one u32, then domain, server and sequence of each
/// GTID.
pub fn read_list(body: &[u8]) -> Result<GtidSet> {
    let mut cursor = Cursor::new(body);
    let count = cursor.u32()? & 0x0fff_ffff;
    let mut set = GtidSet::default();
    for _ in 0..count {
        let domain = cursor.u32()?;
        let server = cursor.u32()?;
        let sequence = cursor.u64()?;
        // The list may name several servers of a domain. The server with the newest transaction is last.
        set.add(&Gtid::Mariadb { domain, server, sequence });
    }
    Ok(set)
}
