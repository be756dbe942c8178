//! Global transaction ids, and sets of them, of both families.
//!
//! MySQL: `uuid[:tag]:number`; a set is intervals for each uuid and tag. MariaDB: `domain-server-sequence`; a set is
//! a position, the last sequence of each domain, and holds every transaction at or before it.

use std::collections::BTreeMap;

use crate::error::{Error, ErrorKind, Result};

/// The longest tag.
const TAG_BYTES_MAX: usize = 32;

/// The server's own ceiling of a transaction's number (`GNO_END`).
const NUMBER_MAX: u64 = i64::MAX as u64;

/// One transaction's id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Gtid {
    /// The server gave none.
    #[default]
    Anonymous,
    /// MySQL's form.
    Mysql {
        /// The server on which it was first committed.
        uuid: [u8; 16],
        /// The tag (MySQL 8.3 and later), lower case; mostly empty.
        tag: String,
        /// Counts from 1.
        number: u64,
    },
    /// MariaDB's form.
    Mariadb {
        /// The replication domain.
        domain: u32,
        /// The server on which it was first committed.
        server: u32,
        /// Counts within the domain.
        sequence: u64,
    },
}

/// The text of one byte, twice sixteen times sixteen characters in all.
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

/// Where the digits of each byte of a uuid stand in its text.
const UUID_PLACES: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];

/// Appends a uuid. Every transaction's id passes here, so the text is put together on the stack first.
fn push_uuid(uuid: &[u8; 16], out: &mut String) {
    let mut text = [b'-'; 36];
    for (byte, place) in uuid.iter().zip(UUID_PLACES) {
        if let Some(digits) = text.get_mut(place..place + 2) {
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
    /// Appends the text form; nothing for a transaction without an id.
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

/// Appends a number in decimal, as `write!` would and faster.
fn push_decimal(value: u64, out: &mut String) {
    let mut digits = [0u8; 20];
    let mut left = value;
    let mut first = digits.len();
    for place in digits.iter_mut().rev() {
        *place = b'0' + (left % 10) as u8;
        left /= 10;
        first -= 1;
        if left == 0 {
            break;
        }
    }
    let text = digits.get(first..).and_then(|digits| std::str::from_utf8(digits).ok());
    out.push_str(text.unwrap_or_default());
}

#[cold]
fn other_family(set: &GtidSet, family: &str, form: &str) -> Error {
    Error::new(ErrorKind::PositionInvalid, format!("`{}` is not a GTID set of {family}", set.text()))
        .hint(format!("write {form}, several by commas"))
}

/// Intervals `[start, end)`, sorted, disjoint and never touching.
type Intervals = Vec<(u64, u64)>;

/// How many keys of a set are compared one by one before it is searched.
const KEYS_LOOKED_AT_MAX: usize = 8;

/// A set of transactions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GtidSet {
    mysql: BTreeMap<([u8; 16], String), Intervals>,
    mariadb: BTreeMap<u32, (u32, u64)>,
}

impl GtidSet {
    /// Parses either family's text. Spaces and line breaks are allowed, empty text is the empty set.
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
        // One or a few servers write a log, so looking at each key costs less than making one to search with. An empty
        // tag is told by its length: comparing no bytes at all is slow where their address is none.
        let is_key = |held: &([u8; 16], String)| {
            held.0 == uuid && held.1.len() == tag.len() && (tag.is_empty() || held.1 == tag)
        };
        let held = self.mysql.iter_mut().take(KEYS_LOOKED_AT_MAX).find(|(key, _)| is_key(key));
        let intervals = match held {
            Some((_, intervals)) => intervals,
            None => self.mysql.entry((uuid, tag.to_owned())).or_default(),
        };
        // Transactions nearly always arrive in order, so the last interval nearly always just grows.
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
        if before.checked_sub(1).and_then(|at| intervals.get(at)).is_some_and(|held| end <= held.1) {
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

    /// Adds one transaction.
    pub fn add(&mut self, gtid: &Gtid) {
        match gtid {
            Gtid::Anonymous => {}
            Gtid::Mysql { uuid, tag, number } => self.add_interval(*uuid, tag, *number, number.saturating_add(1)),
            Gtid::Mariadb { domain, server, sequence } => {
                self.mariadb.insert(*domain, (*server, *sequence));
            }
        }
    }

    /// Adds a whole set.
    pub fn union(&mut self, other: &GtidSet) {
        for ((uuid, tag), intervals) in &other.mysql {
            for &(start, end) in intervals {
                self.add_interval(*uuid, tag, start, end);
            }
        }
        for (&domain, &(server, sequence)) in &other.mariadb {
            let held = self.mariadb.entry(domain).or_insert((server, sequence));
            if held.1 < sequence {
                *held = (server, sequence);
            }
        }
    }

    /// Takes a whole set away. A MariaDB domain goes when `other` has reached it.
    pub fn subtract(&mut self, other: &GtidSet) {
        for (key, intervals) in &mut self.mysql {
            let Some(taken) = other.mysql.get(key) else { continue };
            let mut left: Intervals = Vec::new();
            for &(start, end) in intervals.iter() {
                let mut from = start;
                for &(taken_start, taken_end) in taken.iter().filter(|t| t.1 > start && t.0 < end) {
                    if from < taken_start {
                        left.push((from, taken_start));
                    }
                    from = from.max(taken_end);
                }
                if from < end {
                    left.push((from, end));
                }
            }
            *intervals = left;
        }
        self.mysql.retain(|_, intervals| !intervals.is_empty());
        self.mariadb.retain(|domain, (_, sequence)| other.mariadb.get(domain).is_none_or(|held| held.1 < *sequence));
    }

    /// Whether the transaction is in the set.
    pub fn contains(&self, gtid: &Gtid) -> bool {
        match gtid {
            Gtid::Anonymous => false,
            Gtid::Mysql { uuid, tag, number } => {
                // A key with an owned tag is made only for the rare tagged transaction.
                self.mysql.iter().any(|((held, held_tag), intervals)| {
                    held == uuid && held_tag == tag && {
                        let after = intervals.partition_point(|interval| interval.0 <= *number);
                        after.checked_sub(1).and_then(|at| intervals.get(at)).is_some_and(|i| *number < i.1)
                    }
                })
            }
            Gtid::Mariadb { domain, sequence, .. } => self.mariadb.get(domain).is_some_and(|held| *sequence <= held.1),
        }
    }

    /// Whether every transaction of `other` is in this set.
    pub fn contains_set(&self, other: &GtidSet) -> bool {
        let mut rest = other.clone();
        rest.subtract(self);
        rest.is_empty()
    }

    /// Whether the set holds nothing.
    pub fn is_empty(&self) -> bool {
        self.mysql.is_empty() && self.mariadb.is_empty()
    }

    /// The canonical text, as the server prints it.
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

    /// The payload of COM_BINLOG_DUMP_GTID: a count, then uuid, tag where the server knows tags, and intervals
    /// (`Gtid_set::encode`). `tagged` picks the format of MySQL 8.3 and later, which is written only where a tag is held.
    ///
    /// It is the body of PREVIOUS_GTIDS as well. Raises `PositionInvalid` for a set of MariaDB.
    pub fn encode_mysql(&self) -> Result<Vec<u8>> {
        if !self.mariadb.is_empty() {
            return Err(other_family(self, "MySQL", "uuid:1-5:7, with a tag uuid:tag:1-5"));
        }
        Ok(self.encode())
    }

    /// The body of GTID_LIST (`Gtid_list_log_event`): a count, then domain, server and sequence of each domain.
    /// Raises `PositionInvalid` for a set of MySQL.
    pub fn encode_mariadb(&self) -> Result<Vec<u8>> {
        if !self.mysql.is_empty() {
            return Err(other_family(self, "MariaDB", "domain-server-sequence"));
        }
        let mut out = (self.mariadb.len() as u32).to_le_bytes().to_vec();
        for (domain, (server, sequence)) in &self.mariadb {
            out.extend_from_slice(&domain.to_le_bytes());
            out.extend_from_slice(&server.to_le_bytes());
            out.extend_from_slice(&sequence.to_le_bytes());
        }
        if self.mariadb.is_empty() {
            // The server takes no list shorter than six bytes, and fills an empty one up.
            out.extend_from_slice(&[0, 0]);
        }
        Ok(out)
    }

    fn encode(&self) -> Vec<u8> {
        let tagged = self.mysql.keys().any(|(_, tag)| !tag.is_empty());
        let mut out = Vec::new();
        let count = self.mysql.len() as u64;
        if tagged {
            // One byte of format on both ends of the 8-byte count keeps old readers from taking it for a number.
            out.extend_from_slice(&(count << 8 | 1 << 56 | 1).to_le_bytes());
        } else {
            out.extend_from_slice(&count.to_le_bytes());
        }
        for ((uuid, tag), intervals) in &self.mysql {
            out.extend_from_slice(uuid);
            if tagged {
                // A tag has at most 32 characters, so its length is one byte of the variable-length form.
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
        for (given, canonical) in [
            (format!("{UUID}:1-5:8"), format!("{UUID}:1-5:8")),
            (format!("{UUID}:8:1-3:4-5"), format!("{UUID}:1-5:8")),
            (format!("{UUID}:1:blue:2-3"), format!("{UUID}:1:blue:2-3")),
            ("0-1-5, 7-2-9".to_owned(), "0-1-5,7-2-9".to_owned()),
            (String::new(), String::new()),
        ] {
            assert_eq!(GtidSet::parse(&given).unwrap().text(), canonical);
        }
        assert!(GtidSet::parse("nonsense").is_err());
        assert!(GtidSet::parse(&format!("{UUID}:5-1")).is_err());
    }

    #[test]
    fn membership_follows_intervals_and_positions() {
        let set = GtidSet::parse(&format!("{UUID}:1-5:8,3-1-7")).unwrap();
        let uuid = parse_uuid(UUID).unwrap();
        for (number, held) in [(1, true), (5, true), (6, false), (8, true), (9, false)] {
            assert_eq!(set.contains(&Gtid::Mysql { uuid, tag: String::new(), number }), held, "{number}");
        }
        assert!(set.contains(&Gtid::Mariadb { domain: 3, server: 9, sequence: 7 }));
        assert!(!set.contains(&Gtid::Mariadb { domain: 3, server: 9, sequence: 8 }));
    }

    #[test]
    fn a_difference_leaves_holes() {
        let mut set = GtidSet::parse(&format!("{UUID}:1-10")).unwrap();
        set.subtract(&GtidSet::parse(&format!("{UUID}:3-4:7")).unwrap());
        assert_eq!(set.text(), format!("{UUID}:1-2:5-6:8-10"));
        assert!(GtidSet::parse(&format!("{UUID}:1-10")).unwrap().contains_set(&set));
    }
}
