//! A statement as text: DDL, transaction control, or a change in statement format.

use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::session::{Backslash, Session};

/// The parts of a query event that matter, as views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query<'a> {
    /// The connection on the server that ran it.
    pub thread_id: u32,
    /// The error the statement ended with, 0 for none.
    pub error_code: u16,
    /// The default database, UTF-8; may be empty.
    pub database: &'a [u8],
    /// The status variables, as `Session` reads them.
    pub variables: &'a [u8],
    /// The statement, in the client's character set; compressed when the event type says so.
    pub text: &'a [u8],
}

/// What a statement means for the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// BEGIN, or XA START: rows follow.
    Begin,
    /// COMMIT.
    Commit,
    /// ROLLBACK of the whole transaction.
    Rollback,
    /// ROLLBACK TO a savepoint.
    RollbackTo,
    /// SAVEPOINT: a ROLLBACK TO may come back to it.
    Savepoint,
    /// RELEASE, XA END: means nothing for rows.
    Marker,
    /// XA COMMIT.
    XaCommit,
    /// XA ROLLBACK.
    XaRollback,
    /// INSERT, UPDATE and their like: the rows are not in the log.
    Change,
    /// A statement that is not known: it may change and define anything.
    Unknown,
    /// DDL, and other statements known to change no rows.
    Definition,
}

impl<'a> Query<'a> {
    /// Reads the body, without checksum (`Query_event`): thread id u32, seconds u32, database length u8, error u16,
    /// length of the status variables u16, these, the database, a zero, the text.
    pub fn read(body: &'a [u8]) -> Result<Query<'a>> {
        let mut cursor = Cursor::new(body);
        let head = Head::read(&mut cursor)?;
        Query::read_rest(&head, cursor)
    }

    /// Reads the body of a LOAD DATA that was logged as a statement, and returns its text besides
    /// (`Execute_load_query_event`): between the lengths and the status variables stand the file's id u32, where
    /// ` INFILE 'name' ... INTO` starts and ends in the text, u32 each, and what becomes of duplicates, u8.
    ///
    /// The file's name is left out of the text: the server writes it between quotes as it is, with any quotes in it.
    pub fn read_load(body: &'a [u8]) -> Result<(Query<'a>, Vec<u8>)> {
        let mut cursor = Cursor::new(body);
        let head = Head::read(&mut cursor)?;
        cursor.skip(4)?;
        let (start, end) = (cursor.u32()?, cursor.u32()?);
        let duplicates = cursor.u8()?;
        let query = Query::read_rest(&head, cursor)?;
        let before = usize::try_from(start).ok().and_then(|start| query.text.get(..start));
        let behind = usize::try_from(end).ok().filter(|_| start <= end).and_then(|end| query.text.get(end..));
        let (Some(before), Some(behind)) = (before, behind) else {
            return Err(malformed(format!("a LOAD DATA whose file name is at {start} to {end} of its text")));
        };
        let file: &[u8] = match duplicates {
            0 => b" INFILE '...' INTO",
            1 => b" INFILE '...' IGNORE INTO",
            _ => b" INFILE '...' REPLACE INTO",
        };
        Ok((query, [before, file, behind].concat()))
    }

    fn read_rest(head: &Head, mut cursor: Cursor<'a>) -> Result<Query<'a>> {
        let variables = cursor.take(head.variables_bytes)?;
        let database = cursor.take(head.database_bytes)?;
        if cursor.u8()? != 0 {
            return Err(malformed("a query event's database does not end with a zero"));
        }
        Ok(Query {
            thread_id: head.thread_id,
            error_code: head.error_code,
            database,
            variables,
            text: cursor.take_rest(),
        })
    }

    /// The statement as UTF-8. Bytes that are not valid in the session's character set are shown as U+FFFD: a
    /// statement is read for its names, and must not stop the stream.
    pub fn text_utf8(&self, text: &[u8]) -> String {
        let collation = Session::read(self.variables).collation;
        let charset = collation.and_then(|id| Charset::from_collation_id(u32::from(id)));
        let mut decoded = Vec::with_capacity(text.len());
        match charset {
            Some(charset) if !charset.is_binary() && charset.decode_into(text, &mut decoded).is_ok() => {
                String::from_utf8_lossy(&decoded).into_owned()
            }
            _ => String::from_utf8_lossy(text).into_owned(),
        }
    }
}

impl Query<'_> {
    /// What the statement means, by its first words. `text` is the statement, decompressed where it was compressed.
    pub fn verb(&self, text: &[u8]) -> Verb {
        // Session variables are read only where a prefix has strings: most statements have none.
        verb(text, || Session::read(self.variables).backslash())
    }
}

/// What every statement's body begins with.
struct Head {
    thread_id: u32,
    error_code: u16,
    database_bytes: usize,
    variables_bytes: usize,
}

impl Head {
    fn read(cursor: &mut Cursor<'_>) -> Result<Head> {
        let thread_id = cursor.u32()?;
        cursor.skip(4)?;
        let database_bytes = usize::from(cursor.u8()?);
        let error_code = cursor.u16()?;
        Ok(Head { thread_id, error_code, database_bytes, variables_bytes: usize::from(cursor.u16()?) })
    }
}

/// What a statement means, by its first words.
///
/// The server writes transaction control itself, in capitals and without comments; comments before other statements
/// what clients sent. `backslash` is asked where strings precede the verb.
pub fn verb(text: &[u8], backslash: impl FnOnce() -> Backslash) -> Verb {
    match text {
        b"BEGIN" => return Verb::Begin,
        b"COMMIT" => return Verb::Commit,
        b"ROLLBACK" => return Verb::Rollback,
        _ => {}
    }
    let Some(statement) = after_set_statement(after_comments(text), backslash) else {
        return Verb::Change;
    };
    let (first, rest) = word(statement);
    let (second, _) = word(after_comments(rest));
    let is = |found: &[u8], wanted: &str| found.eq_ignore_ascii_case(wanted.as_bytes());
    if is(first, "XA") {
        return match second {
            w if is(w, "START") || is(w, "BEGIN") => Verb::Begin,
            w if is(w, "COMMIT") => Verb::XaCommit,
            w if is(w, "ROLLBACK") => Verb::XaRollback,
            _ => Verb::Marker,
        };
    }
    if is(first, "ROLLBACK") {
        return if is(second, "TO") || is(second, "WORK") { Verb::RollbackTo } else { Verb::Rollback };
    }
    if is(first, "SAVEPOINT") {
        return Verb::Savepoint;
    }
    if is(first, "RELEASE") {
        return Verb::Marker;
    }
    if is(first, "COMMIT") {
        return Verb::Commit;
    }
    // A SELECT or DO is logged for the functions that it calls: they changed rows.
    const CHANGES: [&str; 10] =
        ["INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "WITH", "CALL", "SELECT", "DO", "VALUES"];
    if CHANGES.iter().any(|change| is(first, change)) {
        return Verb::Change;
    }
    // MariaDB's ANALYZE runs the statement behind it, unless it is ANALYZE TABLE.
    const ANALYZE_TABLE: [&str; 4] = ["TABLE", "TABLES", "LOCAL", "NO_WRITE_TO_BINLOG"];
    if is(first, "ANALYZE") && !ANALYZE_TABLE.iter().any(|option| is(second, option)) {
        return Verb::Change;
    }
    // CREATE TABLE ... SELECT is one transaction: its definition ends with these words, and rows follow.
    if text.ends_with(b"START TRANSACTION") {
        return Verb::Begin;
    }
    if first.is_empty() && statement.is_empty() || CHANGES_NO_ROWS.iter().any(|word| is(first, word)) {
        return Verb::Definition;
    }
    Verb::Unknown
}

/// The statements that can be logged as text though they change no rows but those that a definition empties.
const CHANGES_NO_ROWS: [&str; 39] = [
    "ALTER",
    "ANALYZE",
    "BACKUP",
    "BINLOG",
    "CACHE",
    "CHANGE",
    "CHECK",
    "CHECKSUM",
    "CLONE",
    "CREATE",
    "DEALLOCATE",
    "DESC",
    "DESCRIBE",
    "DROP",
    "EXPLAIN",
    "FLUSH",
    "GRANT",
    "HELP",
    "IMPORT",
    "INSTALL",
    "KILL",
    "LOCK",
    "OPTIMIZE",
    "PREPARE",
    "PURGE",
    "RENAME",
    "REPAIR",
    "RESET",
    "RESTART",
    "REVOKE",
    "SET",
    "SHOW",
    "SHUTDOWN",
    "START",
    "STOP",
    "TRUNCATE",
    "UNINSTALL",
    "UNLOCK",
    "USE",
];

/// The name of a SAVEPOINT or ROLLBACK TO, as it is written.
pub fn savepoint_name(text: &[u8]) -> &[u8] {
    let mut rest = text.trim_ascii();
    loop {
        let (first, behind) = word(rest);
        if !["SAVEPOINT", "ROLLBACK", "WORK", "TO"].iter().any(|word| first.eq_ignore_ascii_case(word.as_bytes())) {
            return rest;
        }
        rest = behind.trim_ascii_start();
    }
}

/// The statement behind comments, parentheses and SET STATEMENT; None where no FOR follows.
pub fn after_prefix(text: &str, backslash: Backslash) -> Option<&str> {
    let rest = after_set_statement(after_comments(text.as_bytes()), || backslash)?;
    text.get(text.len() - rest.len()..)
}

/// Passes over `SET STATEMENT variable = value, ... FOR`, which MariaDB logs before the statement that it is for; None
/// where no FOR follows.
fn after_set_statement(mut text: &[u8], backslash: impl FnOnce() -> Backslash) -> Option<&[u8]> {
    let mut unread = Some(backslash);
    let mut known = Backslash::default();
    loop {
        let (first, rest) = word(text);
        let (second, settings) = word(after_comments(rest));
        if !first.eq_ignore_ascii_case(b"SET") || !second.eq_ignore_ascii_case(b"STATEMENT") {
            return Some(text);
        }
        if let Some(backslash) = unread.take() {
            known = backslash();
        }
        text = after_comments(after_for(settings, known)?);
    }
}

/// The text behind the first FOR that is in no quotes, comment or parentheses.
fn after_for(text: &[u8], backslash: Backslash) -> Option<&[u8]> {
    let (mut rest, mut depth) = (text, 0usize);
    loop {
        rest = match rest {
            [] => return None,
            [quote @ (b'\'' | b'"' | b'`'), inside @ ..] => after_quote(inside, *quote, backslash)?,
            [b'#', inside @ ..] | [b'-', b'-', b'\t' | b'\n' | b'\r' | b' ', inside @ ..] => after_line(rest, inside)?,
            [b'/', b'*', inside @ ..] => memchr::memmem::find(inside, b"*/").and_then(|at| inside.get(at + 2..))?,
            [b'(', inside @ ..] => {
                depth += 1;
                inside
            }
            [b')', outside @ ..] => {
                depth = depth.saturating_sub(1);
                outside
            }
            [byte, after @ ..] if !byte.is_ascii_alphanumeric() && *byte != b'_' => after,
            _ => {
                let (found, after) = word(rest);
                if depth == 0 && found.eq_ignore_ascii_case(b"FOR") {
                    return Some(after);
                }
                after
            }
        };
    }
}

/// The text behind a line comment, of which the first bytes are passed; the blank after `--` may end the line.
fn after_line<'a>(comment: &'a [u8], inside: &'a [u8]) -> Option<&'a [u8]> {
    let passed = comment.len() - inside.len();
    let at = memchr::memchr(b'\n', comment.get(passed - 1..)?)?;
    comment.get(passed + at..)
}

/// The text behind a closing quote; a doubled quote opens the next string, which comes to the same.
fn after_quote(inside: &[u8], quote: u8, backslash: Backslash) -> Option<&[u8]> {
    let may_escape = quote != b'`' && backslash == Backslash::Escapes;
    let mut escaped = false;
    let at = inside.iter().position(|byte| {
        let closes = *byte == quote && !escaped;
        escaped = *byte == b'\\' && !escaped && may_escape;
        closes
    })?;
    inside.get(at + 1..)
}

/// Passes over white space, `/* */`, `--` and `#` comments. What is in `/*! */` and MariaDB's `/*M! */` stays: it is
/// text that the server runs.
fn after_comments(mut text: &[u8]) -> &[u8] {
    loop {
        text = text.trim_ascii_start();
        let rest = match text {
            [b'/', b'*', b'!', digits @ ..] | [b'/', b'*', b'M', b'!', digits @ ..] => {
                let count = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
                digits.get(count..)
            }
            [b'/', b'*', rest @ ..] => memchr::memmem::find(rest, b"*/").and_then(|at| rest.get(at + 2..)),
            [b'-', b'-', rest @ ..] | [b'#', rest @ ..] => {
                memchr::memchr(b'\n', rest).and_then(|at| rest.get(at + 1..))
            }
            // What stood in `/*! */` has ended.
            [b'*', b'/', rest @ ..] | [b'(', rest @ ..] => Some(rest),
            _ => return text,
        };
        match rest {
            Some(rest) => text = rest,
            None => return &[],
        }
    }
}

fn word(text: &[u8]) -> (&[u8], &[u8]) {
    let length = text.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_').count();
    text.split_at_checked(length).unwrap_or((text, &[]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_are_known_by_their_first_words() {
        for (text, wanted) in [
            ("BEGIN", Verb::Begin),
            ("COMMIT", Verb::Commit),
            ("XA START X'61',X'',1", Verb::Begin),
            ("XA END X'61',X'',1", Verb::Marker),
            ("XA COMMIT X'61',X'',1", Verb::XaCommit),
            ("XA ROLLBACK X'61',X'',1", Verb::XaRollback),
            ("ROLLBACK TO `a`", Verb::RollbackTo),
            ("SAVEPOINT `a`", Verb::Savepoint),
            ("RELEASE SAVEPOINT `a`", Verb::Marker),
            ("/* app */ -- x\n insert into t values (1)", Verb::Change),
            ("/*!40000 ALTER TABLE t DISABLE KEYS */", Verb::Definition),
            ("/*M!100100 INSERT INTO t VALUES (1) */", Verb::Change),
            ("SELECT `d`.`g`(7)", Verb::Change),
            ("DO f(1)", Verb::Change),
            ("VALUES ROW(`d`.`g`(7))", Verb::Change),
            ("MERGE INTO t USING u", Verb::Unknown),
            ("load data infile 'f' into table t", Verb::Change),
            ("(INSERT INTO t VALUES (1))", Verb::Change),
            ("GRANT ALL ON *.* TO u", Verb::Definition),
            ("FLUSH TABLES", Verb::Definition),
            ("set password = 'x'", Verb::Definition),
            ("ANALYZE TABLE t", Verb::Definition),
            ("ANALYZE TABLES a, b", Verb::Definition),
            ("ANALYZE NO_WRITE_TO_BINLOG TABLE t", Verb::Definition),
            ("ANALYZE FORMAT=JSON UPDATE t SET a = 1", Verb::Change),
            ("SET PASSWORD FOR `u`@`h` = 'x'", Verb::Definition),
            ("SET STATEMENT sql_mode='it''s \\' FOR x', a=(b FOR c) FOR insert into t values (1)", Verb::Change),
            ("SET STATEMENT a=1 FOR SET STATEMENT b=2 for ALTER TABLE t ADD c INT", Verb::Definition),
            ("SET STATEMENT a=1, # `\n b=2, -- ' FOR\n c=3, --\nd=4 FOR ALTER TABLE t ADD c INT", Verb::Definition),
            ("SET STATEMENT a=1, # FOR ALTER TABLE t ADD c INT", Verb::Change),
            ("SET STATEMENT a=1", Verb::Change),
            ("SET STATEMENT a='open", Verb::Change),
            ("CREATE TABLE `c` (\n  `a` int\n) START TRANSACTION", Verb::Begin),
            ("/*! */ ALTER TABLE t AUTO_INCREMENT=5", Verb::Definition),
            ("/*!*/ (/*M!100100 */ insert into t values (1))", Verb::Change),
            ("SET STATEMENT a=1 FOR /*! */  RENAME TABLES a TO b", Verb::Definition),
            ("# only a comment", Verb::Definition),
            ("/* open", Verb::Definition),
            ("", Verb::Definition),
        ] {
            assert_eq!(verb(text.as_bytes(), Backslash::default), wanted, "{text}");
        }
    }

    #[test]
    fn a_backslash_ends_no_string_early_or_late() {
        let text = r"SET STATEMENT a='\' FOR INSERT INTO t VALUES (1) /* ' FOR ALTER TABLE t ADD c INT */";
        assert_eq!(verb(text.as_bytes(), || Backslash::Plain), Verb::Change);
        assert_eq!(verb(text.as_bytes(), || Backslash::Escapes), Verb::Definition);
        assert_eq!(after_prefix(r"SET STATEMENT a='\' FOR DROP TABLE t", Backslash::Plain), Some("DROP TABLE t"));
        assert_eq!(after_prefix(r"SET STATEMENT a='\' FOR DROP TABLE t", Backslash::Escapes), None);
    }

    /// A statement's body with these status variables, and `between` in front of them.
    fn body(between: &[u8], variables: &[u8], text: &str) -> Vec<u8> {
        let mut body = vec![0; 8];
        body.push(1);
        body.extend([0, 0]);
        body.extend((variables.len() as u16).to_le_bytes());
        body.extend(between);
        body.extend(variables);
        body.extend(b"d\0");
        body.extend(text.as_bytes());
        body
    }

    #[test]
    fn load_data_is_read_without_its_file_name() {
        let text = "LOAD DATA INFILE '/tmp/it's' INTO TABLE `u` FIELDS' IGNORE INTO TABLE `t` (a)";
        let end = text.find(" TABLE `t`").expect("the table");
        let lengths = |start: usize, end: usize| {
            [&[7, 0, 0, 0][..], &(start as u32).to_le_bytes(), &(end as u32).to_le_bytes(), &[1]].concat()
        };
        let whole = body(&lengths(9, end), &[12, 1, b'd', 0], text);
        let (query, text_read) = Query::read_load(&whole).expect("a whole body");
        assert_eq!(String::from_utf8_lossy(&text_read), "LOAD DATA INFILE '...' IGNORE INTO TABLE `t` (a)");
        let accessed = Session::read(query.variables).accessed;
        assert_eq!((query.database, accessed), (&b"d"[..], Some(vec!["d".to_owned()])));
        for (start, end) in [(10, 9), (9, text.len() + 1), (usize::MAX, usize::MAX)] {
            assert!(Query::read_load(&body(&lengths(start, end), &[], text)).is_err(), "{start} to {end}");
        }
        for length in 0..whole.len() - text.len() {
            assert!(Query::read_load(&whole[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn savepoints_are_known_by_name() {
        for (text, name) in [
            ("SAVEPOINT `s 1`", "`s 1`"),
            ("rollback to `s 1`", "`s 1`"),
            ("ROLLBACK WORK TO SAVEPOINT s2", "s2"),
            ("SAVEPOINT", ""),
        ] {
            assert_eq!(savepoint_name(text.as_bytes()), name.as_bytes());
        }
    }

    #[test]
    fn nesting_costs_no_stack_and_linear_time() {
        for prefix in ["/*!", "/*M!", "(", "/*!99999", "SET STATEMENT a=1 FOR ", "/**/", "#\n"] {
            let text = format!("{} CREATE TABLE d.z (a INT) */", prefix.repeat(300_000));
            assert_eq!(verb(text.as_bytes(), Backslash::default), Verb::Definition, "{prefix}");
        }
        let quotes = format!("SET STATEMENT a={} FOR INSERT INTO t VALUES (1)", "'\\''".repeat(100_000));
        assert_eq!(verb(quotes.as_bytes(), Backslash::default), Verb::Change);
    }
}
