//! Global transaction ids of both families, and sets of them.
//!
//! MySQL: `uuid[:tag]:number`; a set has intervals for each uuid and tag. MariaDB: `domain-server-sequence`; a set has
//! the last sequence of each server in each domain, like `gtid_binlog_state`, and the newest transaction of a domain
//! comes last. A position such as `gtid_binlog_pos` contains only the last transaction of each domain. It does not name
//! the servers of earlier transactions. Whether an earlier transaction belongs to the set therefore depends on where
//! the transaction is in the log.

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

/// Appends a uuid. Because this runs for every transaction, the text is assembled on the stack.
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
    /// Parses the text of an id; an empty text is a transaction without id.
    pub fn parse(text: &str) -> Result<Gtid> {
        let set = GtidSet::parse(text)?;
        if let Some((domain, server, sequence)) = set.mariadb_ends().next() {
            return Ok(Gtid::Mariadb { domain, server, sequence });
        }
        let first = set.mysql.into_iter().next().and_then(|(key, intervals)| Some((key, intervals.first()?.0)));
        Ok(first.map_or(Gtid::Anonymous, |((uuid, tag), number)| Gtid::Mysql { uuid, tag, number }))
    }

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

#[cold]
fn ambiguous(gtid: &Gtid, place: &str) -> Error {
    let mut text = String::new();
    gtid.write(&mut text);
    let message = format!("{text} {place}, so GTIDs do not tell whether it is still to be read");
    Error::new(ErrorKind::PositionInvalid, message).hint(
        "gtid_strict_mode was off while servers wrote into one domain; go on by file and offset, and compare the tables: penstock verify",
    )
}

/// Intervals `[start, end)`: sorted, disjoint, and with gaps between them.
type Intervals = Vec<(u64, u64)>;

/// Number of keys of a set that are compared one by one before a tree lookup.
const KEYS_SCANNED_MAX: usize = 8;

/// A set of transactions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GtidSet {
    mysql: BTreeMap<([u8; 16], String), Intervals>,
    mariadb: BTreeMap<u32, Domain>,
}

/// The transactions of a MariaDB domain: at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Domain {
    /// The last sequence of each server.
    ends: BTreeMap<u32, u64>,
    /// The server of the newest transaction.
    last: u32,
}

impl Domain {
    fn new(server: u32, sequence: u64) -> Domain {
        Domain { ends: BTreeMap::from([(server, sequence)]), last: server }
    }

    /// Adds the newest transaction. As in the server, a lower sequence replaces a higher one.
    fn add(&mut self, server: u32, sequence: u64) {
        self.ends.insert(server, sequence);
        self.last = server;
    }

    fn contains(&self, server: u32, sequence: u64) -> bool {
        self.ends.get(&server).is_some_and(|end| sequence <= *end)
    }

    /// The newest transaction.
    fn newest(&self) -> (u32, u64) {
        (self.last, self.ends.get(&self.last).copied().unwrap_or_default())
    }

    /// Whether this set contains all transactions of `log`, which are the first transactions in a log.
    ///
    /// If the set does not name a server, it contains that server's transactions up to the newest transaction of the
    /// set.
    fn covers(&self, log: &Domain) -> bool {
        let (server, sequence) = self.newest();
        let is_passed = log.contains(server, sequence);
        log.ends.iter().all(|(other, end)| match self.ends.get(other) {
            Some(known) => end <= known,
            None if is_passed => log.last == server,
            None => *end <= sequence,
        })
    }

    fn union(&mut self, other: &Domain) {
        let (newest_server, newest) = other.newest();
        let is_later = !self.contains(newest_server, newest);
        for (&server, &end) in &other.ends {
            let existing = self.ends.entry(server).or_insert(end);
            *existing = end.max(*existing);
        }
        if is_later {
            self.last = newest_server;
        }
    }
}

impl GtidSet {
    /// Parses the text of a MySQL or MariaDB set. Spaces and line breaks are allowed; an empty text is the empty set.
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
        self.add(&Gtid::Mariadb { domain, server, sequence });
        Some(())
    }

    /// Adds the interval `[start, end)`.
    pub fn add_interval(&mut self, uuid: [u8; 16], tag: &str, start: u64, end: u64) {
        // A log has only one or a few servers, so comparing each key is cheaper than allocating a key for a lookup.
        // Tags are first compared by length, because comparing empty slices is slow.
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
            Gtid::Mariadb { domain, server, sequence } => match self.mariadb.get_mut(domain) {
                Some(existing) => existing.add(*server, *sequence),
                None => {
                    self.mariadb.insert(*domain, Domain::new(*server, *sequence));
                }
            },
        }
    }

    /// Adds all transactions of another set. In a MariaDB domain, transactions that only the other set contains count
    /// as later.
    pub fn union(&mut self, other: &GtidSet) {
        for ((uuid, tag), intervals) in &other.mysql {
            for &(start, end) in intervals {
                self.add_interval(*uuid, tag, start, end);
            }
        }
        for (domain, others) in &other.mariadb {
            match self.mariadb.get_mut(domain) {
                Some(existing) => existing.union(others),
                None => {
                    self.mariadb.insert(*domain, others.clone());
                }
            }
        }
    }

    /// Removes the transactions of another set. A MariaDB domain is removed if `other` has reached the domain's
    /// position. Otherwise, each server of which `other` contains all transactions is removed.
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
        self.mariadb.retain(|domain, rest| {
            let Some(removed) = other.mariadb.get(domain) else { return true };
            if removed.covers(rest) {
                return false;
            }
            let newest = rest.newest();
            rest.ends.retain(|server, end| !removed.contains(*server, *end));
            if !rest.ends.contains_key(&newest.0) {
                rest.last = rest.ends.keys().next_back().copied().unwrap_or_default();
            }
            !rest.ends.is_empty()
        });
    }

    /// Whether the set contains the transaction. A MariaDB set contains only transactions of servers that it names.
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
            Gtid::Mariadb { domain, server, sequence } => {
                self.mariadb.get(domain).is_some_and(|existing| existing.contains(*server, *sequence))
            }
        }
    }

    /// Whether the set contains a transaction of a log, given the transactions `before` it in the log.
    ///
    /// A MariaDB set also contains transactions of servers that it does not name, up to its newest transaction in the
    /// log. Raises `PositionInvalid` if this cannot be determined, because a sequence of one server goes backward or
    /// repeats, or because the log contains different transactions where the newest transaction should be.
    pub fn contains_in_log(&self, gtid: &Gtid, before: &GtidSet) -> Result<bool> {
        let Gtid::Mariadb { domain, server, sequence } = *gtid else { return Ok(self.contains(gtid)) };
        let Some(set) = self.mariadb.get(&domain) else { return Ok(false) };
        let log = before.mariadb.get(&domain);
        if set.ends.contains_key(&server) {
            if !set.contains(server, sequence) {
                return Ok(false);
            }
            return match log.filter(|log| log.contains(server, sequence)) {
                Some(_) => Err(ambiguous(gtid, "comes after the same or a higher number of its server")),
                None => Ok(true),
            };
        }
        let (newest_server, newest) = set.newest();
        if log.is_some_and(|log| log.contains(newest_server, newest)) {
            return Ok(false);
        }
        if sequence < newest {
            return Ok(true);
        }
        if sequence == newest || log.is_some() {
            let place = format!("comes without {domain}-{newest_server}-{newest} before it");
            return Err(ambiguous(gtid, &place));
        }
        Ok(false)
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
        for (domain, server, sequence) in self.mariadb_ends() {
            if !out.is_empty() {
                out.push(',');
            }
            Gtid::Mariadb { domain, server, sequence }.write(&mut out);
        }
        out
    }

    /// Returns the domain, the server and the last sequence number of each server in a MariaDB set. Within a domain,
    /// the server of the newest transaction comes last.
    fn mariadb_ends(&self) -> impl Iterator<Item = (u32, u32, u64)> + '_ {
        self.mariadb.iter().flat_map(|(&domain, set)| {
            let earlier = set.ends.iter().filter(|(server, _)| **server != set.last);
            let newest = set.ends.get_key_value(&set.last);
            earlier.chain(newest).map(move |(&server, &end)| (domain, server, end))
        })
    }

    /// Returns the set in the form that the server accepts as the start of a replica. For MariaDB, that is only the
    /// newest transaction of each domain.
    pub fn position(&self) -> GtidSet {
        let newest = self.mariadb.iter().map(|(&domain, set)| {
            let (server, sequence) = set.newest();
            (domain, Domain::new(server, sequence))
        });
        GtidSet { mysql: self.mysql.clone(), mariadb: newest.collect() }
    }

    /// Encodes the set for COM_BINLOG_DUMP_GTID (`Gtid_set::encode`): a count, then uuid, tag and intervals.
    ///
    /// Sets that contain a tag are encoded in the format with tags, which MySQL 8.3 introduced. The body of
    /// PREVIOUS_GTIDS has the same format. Raises `PositionInvalid` for a MariaDB set.
    pub fn encode_mysql(&self) -> Result<Vec<u8>> {
        if !self.mariadb.is_empty() {
            return Err(wrong_family(self, "MySQL", "uuid:1-5:7, with a tag uuid:tag:1-5"));
        }
        Ok(self.encode())
    }

    /// Encodes the set as the body of GTID_LIST (`Gtid_list_log_event`): a count, then the domain, the server and the
    /// sequence number of each server. Raises `PositionInvalid` for a MySQL set.
    pub fn encode_mariadb(&self) -> Result<Vec<u8>> {
        if !self.mysql.is_empty() {
            return Err(wrong_family(self, "MariaDB", "domain-server-sequence"));
        }
        let mut out = (self.mariadb_ends().count() as u32).to_le_bytes().to_vec();
        for (domain, server, sequence) in self.mariadb_ends() {
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
mod tests;
