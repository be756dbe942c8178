//! The session state that a statement's event logs, as far as it affects the meaning of DDL.

use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::Result;

/// MySQL lists the databases that a statement changes only if there are at most 16. This count means that there were
/// more, and that they are not logged.
const DATABASES_UNLISTED: u8 = 254;

/// The SQL modes that change how DDL is parsed, each with its bit in `Q_SQL_MODE_CODE`. The last two exist only in
/// MariaDB and in MySQL before 8.0.
const PARSING_MODES: [(u64, &str); 5] = [
    (1, "REAL_AS_FLOAT"),
    (1 << 2, "ANSI_QUOTES"),
    (1 << 20, "NO_BACKSLASH_ESCAPES"),
    (1 << 9, "ORACLE"),
    (1 << 12, "MAXDB"),
];

/// The meaning of a backslash in a quoted string.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Backslash {
    /// A backslash escapes the next character.
    #[default]
    Escapes,
    /// A backslash is an ordinary character (NO_BACKSLASH_ESCAPES).
    Plain,
}

/// The status variables of a query event that affect its meaning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Session {
    /// The collation of the statement's text.
    pub collation: Option<u16>,
    /// The databases of all tables that the statement accessed, including tables used by views, triggers and functions.
    /// An empty list means any database, because there are more than 16, or because a foreign key refers to a table of
    /// the statement. `None` if the event contains no list, as on MariaDB and before MySQL 5.6.
    pub accessed: Option<Vec<String>>,
    /// The default character set of a new database (`collation_server`).
    pub server_charset: Option<&'static str>,
    /// The SQL mode as a bit set; 0 if the event does not have it.
    pub sql_mode: u64,
}

impl Session {
    /// Reads the status variables (`Query_event`, MariaDB's `Query_log_event`). The length of an unknown variable
    /// cannot be determined, so reading stops at the first unknown variable. Later variables keep their defaults.
    pub fn read(variables: &[u8]) -> Session {
        let mut session = Session::default();
        let mut cursor = Cursor::new(variables);
        while let Ok(true) = session.read_variable(&mut cursor) {}
        session
    }

    /// Returns the names of the active SQL modes that change how DDL is parsed.
    pub fn reading_modes(&self) -> impl Iterator<Item = &'static str> + '_ {
        PARSING_MODES.into_iter().filter(|(bit, _)| self.sql_mode & bit != 0).map(|(_, name)| name)
    }

    /// Returns the meaning of a backslash in the statement's strings.
    pub fn backslash(&self) -> Backslash {
        match self.reading_modes().any(|name| name == "NO_BACKSLASH_ESCAPES") {
            true => Backslash::Plain,
            false => Backslash::Escapes,
        }
    }

    /// Returns the databases whose tables the statement may have changed; None if the event does not list them.
    pub fn listed_databases(self) -> Option<Vec<String>> {
        self.accessed.filter(|databases| !databases.is_empty())
    }

    /// Reads one variable. Returns false at the end and at an unknown variable.
    fn read_variable(&mut self, cursor: &mut Cursor<'_>) -> Result<bool> {
        if cursor.is_empty() {
            return Ok(false);
        }
        match cursor.u8()? {
            // Skip four bytes: flags, auto_increment settings, or the obsolete count of bytes written.
            0 | 3 | 10 => cursor.skip(4)?,
            1 => self.sql_mode = cursor.u64()?,
            // Skip eight bytes: a bitmap of tables, the commit time, the XID of DDL, or MariaDB's XID.
            9 | 15 | 17 | 129 => cursor.skip(8)?,
            2 => {
                cursor.prefixed(1)?;
                cursor.skip(1)?;
            }
            4 => {
                self.collation = Some(cursor.u16()?);
                cursor.skip(2)?;
                let collation = Charset::from_collation_id(u32::from(cursor.u16()?));
                self.server_charset = collation.map(Charset::name);
            }
            // Skip a text: the name of the time zone (5) or the catalog (6).
            5 | 6 => {
                cursor.prefixed(1)?;
            }
            // Skip two bytes: lc_time_names, the collation of the default database, or the default collation of
            // utf8mb4.
            7 | 8 | 18 => cursor.skip(2)?,
            // Skip the account: user name and host.
            11 => {
                cursor.prefixed(1)?;
                cursor.prefixed(1)?;
            }
            12 => self.accessed = Some(read_accessed(cursor)?),
            // Skip the microseconds of the start time, which MariaDB logs in a variable of its own.
            13 | 128 => cursor.skip(3)?,
            16 | 19 | 20 => cursor.skip(1)?,
            // Skip pairs of collation ids, four bytes for each pair (MariaDB 11.2 and later).
            131 => {
                let pairs = usize::from(cursor.u8()?);
                cursor.skip(4 * pairs)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Reads a count, then that many zero-terminated names. Returns an empty list if the event may concern any database.
fn read_accessed(cursor: &mut Cursor<'_>) -> Result<Vec<String>> {
    let count = cursor.u8()?;
    if count >= DATABASES_UNLISTED {
        return Ok(Vec::new());
    }
    let mut databases = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let mut name = Vec::new();
        loop {
            match cursor.u8()? {
                0 => break,
                byte => name.push(byte),
            }
        }
        databases.push(String::from_utf8_lossy(&name).into_owned());
    }
    Ok(databases)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables() -> Vec<u8> {
        let mut variables = vec![0, 1, 2, 3, 4];
        variables.extend([1, 0, 0, 0, 0, 0, 0, 0, 0]);
        variables.extend(b"\x06\x03std");
        // The character sets: client utf8mb4, connection utf8mb4, server latin1.
        variables.extend([4, 255, 0, 255, 0, 8, 0]);
        variables.extend(b"\x05\x03UTC\x0b\x01u\x01h");
        variables
    }

    #[test]
    fn accessed_databases_are_read_after_all_earlier_variables() {
        let with = |listed: &[u8]| Session::read(&[variables().as_slice(), listed].concat());
        let listed = with(b"\x0c\x02a\0shop\0\x0d\x01\x02\x03");
        assert_eq!(listed.accessed, Some(vec!["a".to_owned(), "shop".to_owned()]));
        assert_eq!(listed.collation, Some(255));
        assert_eq!(listed.clone().listed_databases(), listed.accessed);
        assert_eq!(listed.server_charset, Some("latin1"));
        assert_eq!(with(b"\x0c\xfe").accessed, Some(Vec::new()));
        assert_eq!(with(b"\x0c\xfe").listed_databases(), None);
        assert_eq!(with(b"").accessed, None);
    }

    #[test]
    fn only_sql_modes_that_change_parsing_are_named() {
        let modes = |bits: u64| Session::read(&[&[0, 1, 2, 3, 4, 1][..], &bits.to_le_bytes()].concat());
        // STRICT_TRANS_TABLES and ONLY_FULL_GROUP_BY do not change parsing.
        let strict = modes((1 << 21) | (1 << 5));
        assert_eq!((strict.reading_modes().count(), strict.backslash()), (0, Backslash::Escapes));
        let plain = modes((1 << 20) | (1 << 21) | 4);
        assert_eq!(plain.reading_modes().collect::<Vec<_>>(), ["ANSI_QUOTES", "NO_BACKSLASH_ESCAPES"]);
        assert_eq!(plain.backslash(), Backslash::Plain);
        let dialect_modes = modes(1 | (1 << 9) | (1 << 12));
        assert_eq!(dialect_modes.reading_modes().collect::<Vec<_>>(), ["REAL_AS_FLOAT", "ORACLE", "MAXDB"]);
    }

    #[test]
    fn unknown_and_truncated_variables_are_ignored() {
        assert_eq!(Session::read(b"\xc8\x0c\x01a\0"), Session::default());
        assert_eq!(Session::read(b"\x0c\x02a\0sho"), Session::default());
        for end in 0..variables().len() {
            Session::read(&variables()[..end]);
        }
    }
}
