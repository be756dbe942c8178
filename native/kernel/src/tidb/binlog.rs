//! The message `Binlog`, which TiDB's pump client sends at each step of a transaction.
//!
//! A transaction consists of a Prewrite, which has the rows or the statement, and a Commit or a Rollback, which refers
//! to the Prewrite by the start timestamp. A Pump sends to Drainers a Commit that also contains the content of the
//! Prewrite.

use std::ops::Range;

use super::protobuf::{next, Field};
use crate::cursor::Cursor;
use crate::error::{malformed, Result};

/// The step of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BinlogKind {
    /// The content of a transaction that may commit.
    Prewrite = 0,
    /// The transaction committed.
    Commit = 1,
    /// The transaction was rolled back. If both timestamps are equal, the payload only shows how far its Pump has
    /// advanced.
    Rollback = 2,
    /// Unused by TiDB since 2.0.
    PreDdl = 3,
    /// Unused by TiDB since 2.0.
    PostDdl = 4,
}

impl BinlogKind {
    fn from_number(number: u64) -> Result<BinlogKind> {
        Ok(match number {
            0 => BinlogKind::Prewrite,
            1 => BinlogKind::Commit,
            2 => BinlogKind::Rollback,
            3 => BinlogKind::PreDdl,
            4 => BinlogKind::PostDdl,
            _ => return Err(malformed(format!("a TiDB payload of kind {number}"))),
        })
    }
}

/// A payload, as a view of its bytes. Fields that are missing are zero or empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binlog<'a> {
    /// The step of the transaction.
    pub kind: BinlogKind,
    /// The timestamp at which the transaction began.
    pub start_ts: i64,
    /// The timestamp at which the transaction committed; 0 for a Prewrite.
    pub commit_ts: i64,
    /// The transaction's primary key in TiKV, under which its outcome can be looked up.
    pub prewrite_key: &'a [u8],
    /// The rows: a `PrewriteValue`.
    pub prewrite_value: &'a [u8],
    /// The statement of a DDL.
    pub ddl_query: &'a [u8],
    /// The job of a DDL; 0 if the transaction changes rows.
    pub ddl_job_id: i64,
    /// The schema state that the job reached.
    pub ddl_schema_state: i32,
}

impl<'a> Binlog<'a> {
    /// Reads a payload. Raises `EventMalformed`.
    pub fn read(payload: &'a [u8]) -> Result<Binlog<'a>> {
        let mut binlog = Binlog {
            kind: BinlogKind::Prewrite,
            start_ts: 0,
            commit_ts: 0,
            prewrite_key: &[],
            prewrite_value: &[],
            ddl_query: &[],
            ddl_job_id: 0,
            ddl_schema_state: 0,
        };
        let mut cursor = Cursor::new(payload);
        while let Some((number, field)) = next(&mut cursor)? {
            match number {
                1 => binlog.kind = BinlogKind::from_number(field.number()?)?,
                2 => binlog.start_ts = timestamp(field)?,
                3 => binlog.commit_ts = timestamp(field)?,
                4 => binlog.prewrite_key = field.bytes()?,
                5 => binlog.prewrite_value = field.bytes()?,
                6 => binlog.ddl_query = field.bytes()?,
                7 => binlog.ddl_job_id = field.signed()?,
                8 => {
                    binlog.ddl_schema_state =
                        i32::try_from(field.signed()?).map_err(|_| malformed("a TiDB schema state over 32 bits"))?;
                }
                _ => {}
            }
        }
        Ok(binlog)
    }

    /// Appends the payload as TiDB's client writes it: number fields always, byte fields only if they are not empty.
    pub fn write(&self, out: &mut Vec<u8>) {
        number(1, self.kind as u64, out);
        number(2, unsigned(self.start_ts), out);
        number(3, unsigned(self.commit_ts), out);
        for (field, content) in [(4, self.prewrite_key), (5, self.prewrite_value), (6, self.ddl_query)] {
            if !content.is_empty() {
                varint(field << 3 | 2, out);
                varint(content.len() as u64, out);
                out.extend_from_slice(content);
            }
        }
        number(7, unsigned(self.ddl_job_id), out);
        number(8, unsigned(i64::from(self.ddl_schema_state)), out);
    }

    /// The statement of a DDL. Bytes that are not UTF-8 become U+FFFD.
    pub fn query(&self) -> String {
        String::from_utf8_lossy(self.ddl_query).into_owned()
    }
}

/// Timestamps are signed in the messages; none is negative.
fn timestamp(field: Field<'_>) -> Result<i64> {
    match field.signed()? {
        negative if negative < 0 => Err(malformed(format!("a TiDB timestamp of {negative}"))),
        timestamp => Ok(timestamp),
    }
}

/// Returns the cluster of a `WriteBinlogReq`, and the location of its payload. Raises `EventMalformed`.
pub fn write_request(request: &[u8]) -> Result<(u64, Range<usize>)> {
    let (mut cluster_id, mut payload) = (0, 0..0);
    let mut cursor = Cursor::new(request);
    while let Some((number, field)) = next(&mut cursor)? {
        match number {
            1 => cluster_id = field.number()?,
            2 => {
                let end = request.len() - cursor.remaining();
                payload = end - field.bytes()?.len()..end;
            }
            _ => {}
        }
    }
    Ok((cluster_id, payload))
}

/// Returns the Commit merged with the content of its Prewrite, as a Pump sends it. Raises `EventMalformed` if the
/// payloads are not a Prewrite and a Commit of the same transaction.
pub fn matched(prewrite: &[u8], commit: &[u8]) -> Result<Vec<u8>> {
    let (before, after) = (Binlog::read(prewrite)?, Binlog::read(commit)?);
    if before.kind != BinlogKind::Prewrite || after.kind != BinlogKind::Commit {
        return Err(malformed(format!("{:?} and {:?} are no Prewrite and its Commit", before.kind, after.kind)));
    }
    if before.start_ts != after.start_ts {
        let message =
            format!("the Prewrite of {} does not belong to the Commit of {}", before.start_ts, after.start_ts);
        return Err(malformed(message));
    }
    let prewrite_key = if after.prewrite_key.is_empty() { before.prewrite_key } else { after.prewrite_key };
    let matched = Binlog { kind: after.kind, commit_ts: after.commit_ts, prewrite_key, ..before };
    let mut out = Vec::with_capacity(prewrite.len() + 32);
    matched.write(&mut out);
    Ok(out)
}

fn unsigned(value: i64) -> u64 {
    u64::from_ne_bytes(value.to_ne_bytes())
}

fn number(field: u64, value: u64, out: &mut Vec<u8>) {
    varint(field << 3, out);
    varint(value, out);
}

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREWRITE: Binlog<'_> = Binlog {
        kind: BinlogKind::Prewrite,
        start_ts: 470_639_217_766_825_984,
        commit_ts: 0,
        prewrite_key: b"t\x80key",
        prewrite_value: b"rows",
        ddl_query: b"",
        ddl_job_id: 0,
        ddl_schema_state: 0,
    };

    fn written(binlog: &Binlog<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        binlog.write(&mut out);
        out
    }

    #[test]
    fn a_payload_survives_a_round_trip() {
        let ddl = Binlog { ddl_query: b"DROP TABLE t", ddl_job_id: 95, ddl_schema_state: -1, ..PREWRITE };
        for binlog in [PREWRITE, ddl] {
            assert_eq!(Binlog::read(&written(&binlog)), Ok(binlog));
        }
    }

    #[test]
    fn a_commit_gets_the_content_of_its_prewrite() {
        let commit =
            Binlog { kind: BinlogKind::Commit, commit_ts: 9, prewrite_key: b"", prewrite_value: b"", ..PREWRITE };
        let matched_bytes = matched(&written(&PREWRITE), &written(&commit)).unwrap();
        let expected = Binlog { kind: BinlogKind::Commit, commit_ts: 9, ..PREWRITE };
        assert_eq!(Binlog::read(&matched_bytes), Ok(expected));
        let foreign = Binlog { start_ts: 1, ..commit };
        for (first, second) in [(PREWRITE, PREWRITE), (commit, commit), (PREWRITE, foreign)] {
            assert!(matched(&written(&first), &written(&second)).is_err(), "{first:?} {second:?}");
        }
    }

    #[test]
    fn the_payload_of_a_request_is_found_without_a_copy() {
        let request = b"\x08\xd9\x36\x12\x03abc\x18\x01";
        assert_eq!(write_request(request), Ok((7001, 5..8)));
        assert_eq!(write_request(b"\x12\x00\x08\x07"), Ok((7, 2..2)));
        assert_eq!(write_request(b""), Ok((0, 0..0)));
        for damaged in [&b"\x12\x04abc"[..], b"\x0a\x01a", b"\x10\x01"] {
            assert!(write_request(damaged).is_err(), "{damaged:?}");
        }
    }

    #[test]
    fn payloads_that_contradict_the_message_are_refused() {
        for payload in [&b"\x08\x05"[..], b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x22\x05ab", b"\x20\x01"] {
            assert!(Binlog::read(payload).is_err(), "{payload:?}");
        }
        assert_eq!(Binlog::read(b"").map(|binlog| binlog.start_ts), Ok(0));
    }
}
