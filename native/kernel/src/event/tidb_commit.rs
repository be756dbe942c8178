//! The commit of a TiDB transaction, which follows the GTID event in the transaction that Penstock writes for it.
//!
//! ```text
//! commit timestamp u64 │ start timestamp u64 │ cluster id u64 │ schema version i64
//! ```
//!
//! The event is inside its transaction, so that a range that begins with the transaction contains it.

use crate::cursor::Cursor;
use crate::error::{malformed, Result};

/// The timestamps of a TiDB transaction, as TiDB's placement driver issues them: milliseconds since 1970 in the upper
/// 46 bits, and a counter in the lower 18 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TidbCommit {
    /// The commit time. It increases in commit order over the whole cluster.
    pub commit_ts: u64,
    /// When the transaction began.
    pub start_ts: u64,
    /// The cluster that issued the timestamps.
    pub cluster_id: u64,
    /// The version of the cluster's schema under which the rows were written; 0 for DDL.
    pub schema_version: i64,
}

impl TidbCommit {
    /// Reads the body, without checksum. Later versions may append fields.
    pub fn read(body: &[u8]) -> Result<TidbCommit> {
        let mut cursor = Cursor::new(body);
        let commit = TidbCommit {
            commit_ts: cursor.u64()?,
            start_ts: cursor.u64()?,
            cluster_id: cursor.u64()?,
            schema_version: i64::from_le_bytes(cursor.u64()?.to_le_bytes()),
        };
        match commit.commit_ts {
            1..=0x7fff_ffff_ffff_ffff => Ok(commit),
            outside => Err(malformed(format!("a commit timestamp of {outside}"))),
        }
    }

    /// Appends the body in the format that `read` expects.
    pub fn write(&self, out: &mut Vec<u8>) {
        for field in [self.commit_ts, self.start_ts, self.cluster_id] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        out.extend_from_slice(&self.schema_version.to_le_bytes());
    }

    /// The commit time in microseconds since 1970, exact to a millisecond.
    pub fn commit_us(&self) -> u64 {
        physical_us(self.commit_ts)
    }
}

/// Returns the physical part of a timestamp, in microseconds since 1970.
pub fn physical_us(timestamp: u64) -> u64 {
    const LOGICAL_BITS: u32 = 18;
    (timestamp >> LOGICAL_BITS) * 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_survives_a_round_trip() {
        let commit =
            TidbCommit { commit_ts: 470_639_217_768_660_992, start_ts: 7, cluster_id: 7001, schema_version: -1 };
        let mut body = Vec::new();
        commit.write(&mut body);
        assert_eq!(TidbCommit::read(&body), Ok(commit));
        assert_eq!(commit.commit_us(), 1_795_346_137_118_000);
        assert!(TidbCommit::read(body.get(..31).unwrap_or_default()).is_err());
    }

    #[test]
    fn commit_timestamps_are_positive() {
        for commit_ts in [0, 1 << 63] {
            let mut body = Vec::new();
            TidbCommit { commit_ts, ..TidbCommit::default() }.write(&mut body);
            assert!(TidbCommit::read(&body).is_err(), "{commit_ts}");
        }
    }
}
