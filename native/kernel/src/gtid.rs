//! Global transaction ids of both families, and sets of them.
//!
//! MySQL: `uuid[:tag]:number`; a set has intervals for each uuid and tag. MariaDB: `domain-server-sequence`; a set is
//! a position, the last sequence of each domain, and includes all transactions up to it.

use std::collections::BTreeMap;

use crate::error::{Error, ErrorKind, Result};

/// Maximum length of a tag in bytes.
const TAG_BYTES_MAX: usize = 32;

/// The server's limit for transaction numbers (`GNO_END`).
const NUMBER_MAX: u64 = i64::MAX as u64;

/// The id of a transaction.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Gtid {
    /// The transaction has no id.
    #[default]
    Anonymous,
    /// A GTID of MySQL.
    Mysql {
        /// The server that first committed the transaction.
        uuid: [u8; 16],
        /// The tag (MySQL 8.3 and later) in lower case; usually empty.
        tag: String,
        /// Number of the transaction, starting at 1.
        number: u64,
    },
    /// A GTID of MariaDB.
    Mariadb {
        /// The replication domain.
        domain: u32,
        /// The server that first committed the transaction.
        server: u32,
        /// Sequence number within the domain.
        sequence: u64,
    },
}

/// The two hexadecimal digits of each byte.
const HEX: [[u8; 2]; 256] = {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let mut pairs = [[0u8; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [DIGITS[byte >> 4], DIGITS[byte & 15]];
        byte += 1;
    }
    pairs
};

/// The offsets of each byte's digits in the text of a uuid.
const UUID_DIGIT_OFFSETS: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];

/// Appends a uuid. Called for every transaction, so the text is assembled on the stack first.
fn push_uuid(uuid: &[u8; 16], out: &mut String) {
    let mut text = [b'-'; 36];
    for (byte, offset) in uuid.iter().zip(UUID_DIGIT_OFFSETS) {
        if let Some(digits) = text.get_mut(offset..offset + 2) {
            digits.copy_from_slice(&HEX[usize::from(*byte)]);
        }
    }
    out.push_str(std::str::from_utf8(&text).unwrap_or_default());
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let mut uuid = [0u8; 16];
    let mut digits = text.bytes().filter(|&byte| byte != b'-');
    for byte in &mut uuid {
        let high = char::from(digits.next()?).to_digit(16)?;
        let low = char::from(digits.next()?).to_digit(16)?;
        *byte = u8::try_from(high << 4 | low).ok()?;
    }
    digits.next().is_none().then_some(uuid)
}

impl Gtid {
    /// Appends the text of the id; nothing for a transaction without id.
    pub fn write(&self, out: &mut String) {
        match self {
            Gtid::Anonymous => {}
            Gtid::Mysql { uuid, tag, number } => {
                push_uuid(uuid, out);
                if !tag.is_empty() {
                    out.push(':');
                    out.push_str(tag);
                }
                out.push(':');
                push_decimal(*number, out);
            }
            Gtid::Mariadb { domain, server, sequence } => {
                push_decimal(u64::from(*domain), out);
                out.push('-');
                push_decimal(u64::from(*server), out);
                out.push('-');
                push_decimal(*sequence, out);
            }
        }
    }
}

/// Appends a decimal number, faster than `write!`.
fn push_decimal(value: u64, out: &mut String) {
    let mut digits = [0u8; 20];
    let mut remaining = value;
    let mut first = digits.len();
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (remaining % 10) as u8;
        remaining /= 10;
        first -= 1;
        if remaining == 0 {
            break;
        }
    }
    let text = digits.get(first..).and_then(|digits| std::str::from_utf8(digits).ok());
    out.push_str(text.unwrap_or_default());
}

#[cold]
fn wrong_family(set: &GtidSet, family: &str, form: &str) -> Error {
    Error::new(ErrorKind::PositionInvalid, format!("`{}` is not a GTID set of {family}", set.text()))
        .hint(format!("write {form}, several by commas"))
}

/// Intervals `[start, end)`: sorted, disjoint, and with gaps between them.
type Intervals = Vec<(u64, u64)>;

/// How many keys of a set are compared one by one before a tree lookup.
const KEYS_SCANNED_MAX: usize = 8;

/// A set of transactions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GtidSet {
    mysql: BTreeMap<([u8; 16], String), Intervals>,
    mariadb: BTreeMap<u32, (u32, u64)>,
}

impl GtidSet {
    /// Parses the text of either family. Spaces and line breaks are allowed; an empty text is the empty set.
    pub fn parse(text: &str) -> Result<GtidSet> {
        let mut set = GtidSet::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let parsed = if part.contains(':') { set.parse_mysql(part) } else { set.parse_mariadb(part) };
            parsed.ok_or_else(|| {
                Error::new(ErrorKind::OptionInvalid, format!("`{part}` is not a GTID set"))
                    .hint("write uuid:1-5:8 (MySQL) or domain-server-sequence (MariaDB), separated by commas")
            })?;
        }
        Ok(set)
    }

    fn parse_mysql(&mut self, part: &str) -> Option<()> {
        let mut fields = part.split(':').map(str::trim);
        let uuid = parse_uuid(fields.next()?)?;
        let mut tag = String::new();
        for field in fields {
            if field.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_') {
                let is_tag = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
                if field.len() > TAG_BYTES_MAX || !field.bytes().all(is_tag) {
                    return None;
                }
                tag = field.to_ascii_lowercase();
                continue;
            }
            let (start, end) = match field.split_once('-') {
                Some((start, end)) => (start.trim().parse().ok()?, end.trim().parse().ok()?),
                None => (field.parse().ok()?, field.parse::<u64>().ok()?),
            };
            if start == 0 || start > end || end >= NUMBER_MAX {
                return None;
            }
            self.add_interval(uuid, &tag, start, end + 1);
        }
        Some(())
    }

    fn parse_mariadb(&mut self, part: &str) -> Option<()> {
        let mut fields = part.splitn(3, '-');
        let domain = fields.next()?.parse().ok()?;
        let server = fields.next()?.parse().ok()?;
        let sequence = fields.next()?.parse().ok()?;
        self.mariadb.insert(domain, (server, sequence));
        Some(())
    }

    /// Adds the interval `[start, end)`.
    pub fn add_interval(&mut self, uuid: [u8; 16], tag: &str, start: u64, end: u64) {
        // A log has one or a few servers, so comparing each key is cheaper than allocating a key for a lookup. An
        // empty tag is detected by its length, because comparing empty slices is slow.
        let is_key = |existing: &([u8; 16], String)| {
            existing.0 == uuid && existing.1.len() == tag.len() && (tag.is_empty() || existing.1 == tag)
        };
        let existing = self.mysql.iter_mut().take(KEYS_SCANNED_MAX).find(|(key, _)| is_key(key));
        let intervals = match existing {
            Some((_, intervals)) => intervals,
            None => self.mysql.entry((uuid, tag.to_owned())).or_default(),
        };
        // Transactions nearly always arrive in order, so usually the last interval just grows.
        match intervals.last_mut() {
            Some(last) if last.0 <= start && start <= last.1 => {
                last.1 = last.1.max(end);
                return;
            }
            Some(last) if start < last.0 => {}
            _ => {
                intervals.push((start, end));
                return;
            }
        }
        let before = intervals.partition_point(|interval| interval.0 <= start);
        if before.checked_sub(1).and_then(|at| intervals.get(at)).is_some_and(|existing| end <= existing.1) {
            return;
        }
        intervals.push((start, end));
        intervals.sort_unstable();
        let mut merged: Intervals = Vec::with_capacity(intervals.len());
        for &(start, end) in intervals.iter() {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        *intervals = merged;
    }

    /// Adds a transaction.
    pub fn add(&mut self, gtid: &Gtid) {
        match gtid {
            Gtid::Anonymous => {}
            Gtid::Mysql { uuid, tag, number } => self.add_interval(*uuid, tag, *number, number.saturating_add(1)),
            Gtid::Mariadb { domain, server, sequence } => {
                self.mariadb.insert(*domain, (*server, *sequence));
            }
        }
    }

    /// Adds all transactions of another set.
    pub fn union(&mut self, other: &GtidSet) {
        for ((uuid, tag), intervals) in &other.mysql {
            for &(start, end) in intervals {
                self.add_interval(*uuid, tag, start, end);
            }
        }
        for (&domain, &(server, sequence)) in &other.mariadb {
            let existing = self.mariadb.entry(domain).or_insert((server, sequence));
            if existing.1 < sequence {
                *existing = (server, sequence);
            }
        }
    }

    /// Removes the transactions of another set. A MariaDB domain is removed if `other` has reached its position.
    pub fn subtract(&mut self, other: &GtidSet) {
        for (key, intervals) in &mut self.mysql {
            let Some(removed) = other.mysql.get(key) else { continue };
            let mut remaining: Intervals = Vec::new();
            for &(start, end) in intervals.iter() {
                let mut from = start;
                for &(removed_start, removed_end) in removed.iter().filter(|t| t.1 > start && t.0 < end) {
                    if from < removed_start {
                        remaining.push((from, removed_start));
                    }
                    from = from.max(removed_end);
                }
                if from < end {
                    remaining.push((from, end));
                }
            }
            *intervals = remaining;
        }
        self.mysql.retain(|_, intervals| !intervals.is_empty());
        self.mariadb
            .retain(|domain, (_, sequence)| other.mariadb.get(domain).is_none_or(|existing| existing.1 < *sequence));
    }

    /// Whether the set contains the transaction.
    pub fn contains(&self, gtid: &Gtid) -> bool {
        match gtid {
            Gtid::Anonymous => false,
            Gtid::Mysql { uuid, tag, number } => {
                // Compare in place: a lookup would need a key with an owned tag.
                self.mysql.iter().any(|((existing, existing_tag), intervals)| {
                    existing == uuid && existing_tag == tag && {
                        let after = intervals.partition_point(|interval| interval.0 <= *number);
                        after.checked_sub(1).and_then(|at| intervals.get(at)).is_some_and(|i| *number < i.1)
                    }
                })
            }
            Gtid::Mariadb { domain, sequence, .. } => {
                self.mariadb.get(domain).is_some_and(|existing| *sequence <= existing.1)
            }
        }
    }

    /// Whether the set contains all transactions of `other`.
    pub fn contains_set(&self, other: &GtidSet) -> bool {
        let mut rest = other.clone();
        rest.subtract(self);
        rest.is_empty()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.mysql.is_empty() && self.mariadb.is_empty()
    }

    /// Returns the canonical text, as the server prints it.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut previous: Option<[u8; 16]> = None;
        for ((uuid, tag), intervals) in &self.mysql {
            if previous != Some(*uuid) {
                if previous.is_some() {
                    out.push(',');
                }
                push_uuid(uuid, &mut out);
                previous = Some(*uuid);
            }
            if !tag.is_empty() {
                out.push(':');
                out.push_str(tag);
            }
            for &(start, end) in intervals {
                out.push(':');
                push_decimal(start, &mut out);
                if end - 1 > start {
                    out.push('-');
                    push_decimal(end - 1, &mut out);
                }
            }
        }
        for (&domain, &(server, sequence)) in &self.mariadb {
            if !out.is_empty() {
                out.push(',');
            }
            Gtid::Mariadb { domain, server, sequence }.write(&mut out);
        }
        out
    }

    /// Encodes the set for COM_BINLOG_DUMP_GTID (`Gtid_set::encode`): a count, then uuid, tag and intervals. Only
    /// sets that contain a tag use the format with tags of MySQL 8.3 and later.
    ///
    /// The body of PREVIOUS_GTIDS has the same format. Raises `PositionInvalid` for a set of MariaDB.
    pub fn encode_mysql(&self) -> Result<Vec<u8>> {
        if !self.mariadb.is_empty() {
            return Err(wrong_family(self, "MySQL", "uuid:1-5:7, with a tag uuid:tag:1-5"));
        }
        Ok(self.encode())
    }

    /// Encodes the set as the body of GTID_LIST (`Gtid_list_log_event`): a count, then domain, server and sequence of
    /// each domain. Raises `PositionInvalid` for a set of MySQL.
    pub fn encode_mariadb(&self) -> Result<Vec<u8>> {
        if !self.mysql.is_empty() {
            return Err(wrong_family(self, "MariaDB", "domain-server-sequence"));
        }
        let mut out = (self.mariadb.len() as u32).to_le_bytes().to_vec();
        for (domain, (server, sequence)) in &self.mariadb {
            out.extend_from_slice(&domain.to_le_bytes());
            out.extend_from_slice(&server.to_le_bytes());
            out.extend_from_slice(&sequence.to_le_bytes());
        }
        if self.mariadb.is_empty() {
            // The server rejects lists shorter than six bytes and pads an empty list itself.
            out.extend_from_slice(&[0, 0]);
        }
        Ok(out)
    }

    fn encode(&self) -> Vec<u8> {
        let tagged = self.mysql.keys().any(|(_, tag)| !tag.is_empty());
        let mut out = Vec::new();
        let count = self.mysql.len() as u64;
        if tagged {
            // The format byte at both ends of the 8-byte count prevents older readers from parsing it as a number.
            out.extend_from_slice(&(count << 8 | 1 << 56 | 1).to_le_bytes());
        } else {
            out.extend_from_slice(&count.to_le_bytes());
        }
        for ((uuid, tag), intervals) in &self.mysql {
            out.extend_from_slice(uuid);
            if tagged {
                // A tag has at most 32 characters, so its length takes a single byte of the variable-length encoding.
                out.push(u8::try_from(tag.len()).unwrap_or(u8::MAX).wrapping_shl(1));
                out.extend_from_slice(tag.as_bytes());
            }
            out.extend_from_slice(&(intervals.len() as u64).to_le_bytes());
            for &(start, end) in intervals {
                out.extend_from_slice(&start.to_le_bytes());
                out.extend_from_slice(&end.to_le_bytes());
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "3e11fa47-71ca-11e1-9e33-c80aa9429562";

    #[test]
    fn text_is_canonical_and_round_trips() {
        for (text, canonical) in [
            (format!("{UUID}:1-5:8"), format!("{UUID}:1-5:8")),
            (format!("{UUID}:8:1-3:4-5"), format!("{UUID}:1-5:8")),
            (format!("{UUID}:1:blue:2-3"), format!("{UUID}:1:blue:2-3")),
            ("0-1-5, 7-2-9".to_owned(), "0-1-5,7-2-9".to_owned()),
            (String::new(), String::new()),
        ] {
            assert_eq!(GtidSet::parse(&text).unwrap().text(), canonical);
        }
        assert!(GtidSet::parse("nonsense").is_err());
        assert!(GtidSet::parse(&format!("{UUID}:5-1")).is_err());
    }

    #[test]
    fn membership_follows_intervals_and_positions() {
        let set = GtidSet::parse(&format!("{UUID}:1-5:8,3-1-7")).unwrap();
        let uuid = parse_uuid(UUID).unwrap();
        for (number, is_member) in [(1, true), (5, true), (6, false), (8, true), (9, false)] {
            assert_eq!(set.contains(&Gtid::Mysql { uuid, tag: String::new(), number }), is_member, "{number}");
        }
        assert!(set.contains(&Gtid::Mariadb { domain: 3, server: 9, sequence: 7 }));
        assert!(!set.contains(&Gtid::Mariadb { domain: 3, server: 9, sequence: 8 }));
    }

    #[test]
    fn subtracting_a_set_splits_intervals() {
        let mut set = GtidSet::parse(&format!("{UUID}:1-10")).unwrap();
        set.subtract(&GtidSet::parse(&format!("{UUID}:3-4:7")).unwrap());
        assert_eq!(set.text(), format!("{UUID}:1-2:5-6:8-10"));
        assert!(GtidSet::parse(&format!("{UUID}:1-10")).unwrap().contains_set(&set));
    }
}
