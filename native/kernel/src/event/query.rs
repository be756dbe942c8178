//! Statements logged as text: DDL, transaction control, or changes in statement format.

use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::{malformed, Result};
use crate::event::session::{Backslash, Session};

/// The parts of a query event that the kernel uses, as views of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query<'a> {
    /// The server connection that ran the statement.
    pub thread_id: u32,
    /// The number of the error that the statement ended with; 0 for none.
    pub error_code: u16,
    /// The default database in UTF-8; may be empty.
    pub database: &'a [u8],
    /// The status variables, in the format that `Session` reads.
    pub variables: &'a [u8],
    /// The statement in the client's character set; compressed if the event type says so.
    pub text: &'a [u8],
}

/// The effect of a statement on the stream.
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
    /// SAVEPOINT: a later ROLLBACK TO may refer to it.
    Savepoint,
    /// RELEASE or XA END: no effect on rows.
    Marker,
    /// XA COMMIT.
    XaCommit,
    /// XA ROLLBACK.
    XaRollback,
    /// INSERT, UPDATE and the like: the row images are not in the log.
    Change,
    /// An unknown statement: it may change any row and any table definition.
    Unknown,
    /// DDL, and other statements that are known not to change rows.
    Definition,
}

impl<'a> Query<'a> {
    /// Reads the body, without checksum (`Query_event`).
    ///
    /// Layout: thread id u32, seconds u32, length of the database u8, error u16, length of the status variables u16,
    /// the status variables, the database, a zero, the text.
    pub fn read(body: &'a [u8]) -> Result<Query<'a>> {
        let mut cursor = Cursor::new(body);
        let head = Head::read(&mut cursor)?;
        Query::read_rest(&head, cursor)
    }

    /// Reads the body of a LOAD DATA that was logged as a statement, and also returns the statement's text
    /// (`Execute_load_query_event`).
    ///
    /// Between the lengths and the status variables are four fields: the file id u32, the start and the end of ` INFILE
    /// 'name' ... INTO` in the text, u32 each, and the duplicate handling u8. The text is returned without the file
    /// name, because the server does not escape quotes in the name.
    pub fn read_load(body: &'a [u8]) -> Result<(Query<'a>, Vec<u8>)> {
        let mut cursor = Cursor::new(body);
        let head = Head::read(&mut cursor)?;
        cursor.skip(4)?;
        let (start, end) = (cursor.u32()?, cursor.u32()?);
        let duplicates = cursor.u8()?;
        let query = Query::read_rest(&head, cursor)?;
        let before = usize::try_from(start).ok().and_then(|start| query.text.get(..start));
        let after = usize::try_from(end).ok().filter(|_| start <= end).and_then(|end| query.text.get(end..));
        let (Some(before), Some(after)) = (before, after) else {
            return Err(malformed(format!("a LOAD DATA whose file name is at {start} to {end} of its text")));
        };
        let file: &[u8] = match duplicates {
            0 => b" INFILE '...' INTO",
            1 => b" INFILE '...' IGNORE INTO",
            _ => b" INFILE '...' REPLACE INTO",
        };
        Ok((query, [before, file, after].concat()))
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

    /// Decodes the statement to UTF-8. Bytes that are invalid in the session's character set become U+FFFD, because a
    /// bad byte must not stop the stream and only the names in a statement matter.
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
    /// Classifies the statement by its first words. `text` is the statement after decompression.
    pub fn verb(&self, text: &[u8]) -> Verb {
        // Parse the session variables on demand: they matter only for strings in a prefix of the statement, which are
        // rare.
        verb(text, || Session::read(self.variables).backslash())
    }
}

/// The fields at the start of every statement's body.
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

/// Classifies a statement by its first words.
///
/// The server itself writes the statements for transaction control, in capitals and without comments. All other
/// statements are text from clients, and may start with comments. `backslash` is called only if strings precede the
/// verb.
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
    let is = |token: &[u8], expected: &str| token.eq_ignore_ascii_case(expected.as_bytes());
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
    // A SELECT or DO is logged only if the functions that it calls changed rows.
    const CHANGES: [&str; 10] =
        ["INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "WITH", "CALL", "SELECT", "DO", "VALUES"];
    if CHANGES.iter().any(|change| is(first, change)) {
        return Verb::Change;
    }
    // MariaDB's ANALYZE runs the statement after it, unless it is ANALYZE TABLE.
    const ANALYZE_TABLE: [&str; 4] = ["TABLE", "TABLES", "LOCAL", "NO_WRITE_TO_BINLOG"];
    if is(first, "ANALYZE") && !ANALYZE_TABLE.iter().any(|option| is(second, option)) {
        return Verb::Change;
    }
    // CREATE TABLE ... SELECT is a single transaction. Its definition is logged with START TRANSACTION at the end, and
    // the rows follow.
    if text.ends_with(b"START TRANSACTION") {
        return Verb::Begin;
    }
    if first.is_empty() && statement.is_empty() || CHANGES_NO_ROWS.iter().any(|word| is(first, word)) {
        return Verb::Definition;
    }
    Verb::Unknown
}

/// Statements that may be logged as text. They change no rows, except that DDL may remove rows.
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

/// Returns the name in a SAVEPOINT or ROLLBACK TO, with its quotes.
pub fn savepoint_name(text: &[u8]) -> &[u8] {
    let mut rest = text.trim_ascii();
    loop {
        let (first, after) = word(rest);
        if !["SAVEPOINT", "ROLLBACK", "WORK", "TO"].iter().any(|word| first.eq_ignore_ascii_case(word.as_bytes())) {
            return rest;
        }
        rest = after.trim_ascii_start();
    }
}

/// Returns the statement without leading comments, parentheses and SET STATEMENT; None if a SET STATEMENT has no FOR.
pub fn after_prefix(text: &str, backslash: Backslash) -> Option<&str> {
    let rest = after_set_statement(after_comments(text.as_bytes()), || backslash)?;
    text.get(text.len() - rest.len()..)
}

/// Skips `SET STATEMENT variable = value, ... FOR`, which MariaDB logs in front of the statement that it applies to.
/// Returns None if there is no FOR.
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

/// Returns the text after the first FOR outside quotes, comments and parentheses.
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
                let (token, after) = word(rest);
                if depth == 0 && token.eq_ignore_ascii_case(b"FOR") {
                    return Some(after);
                }
                after
            }
        };
    }
}

/// Returns the text after a line comment. `inside` is the comment without its opening bytes. The last opening byte may
/// already be the newline that ends the comment.
fn after_line<'a>(comment: &'a [u8], inside: &'a [u8]) -> Option<&'a [u8]> {
    let passed = comment.len() - inside.len();
    let at = memchr::memchr(b'\n', comment.get(passed - 1..)?)?;
    comment.get(passed + at..)
}

/// Returns the text after a closing quote. A doubled quote opens a new string, which gives the same result.
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

/// Skips white space and `/* */`, `--` and `#` comments, but not the contents of `/*! */` and MariaDB's `/*M! */`,
/// which the server runs.
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
            // The end of a `/*! */` comment.
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
        for (text, expected) in [
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
            assert_eq!(verb(text.as_bytes(), Backslash::default), expected, "{text}");
        }
    }

    #[test]
    fn backslashes_follow_the_sql_mode() {
        let text = r"SET STATEMENT a='\' FOR INSERT INTO t VALUES (1) /* ' FOR ALTER TABLE t ADD c INT */";
        assert_eq!(verb(text.as_bytes(), || Backslash::Plain), Verb::Change);
        assert_eq!(verb(text.as_bytes(), || Backslash::Escapes), Verb::Definition);
        assert_eq!(after_prefix(r"SET STATEMENT a='\' FOR DROP TABLE t", Backslash::Plain), Some("DROP TABLE t"));
        assert_eq!(after_prefix(r"SET STATEMENT a='\' FOR DROP TABLE t", Backslash::Escapes), None);
    }

    /// The body of a query event with these status variables, preceded by `between`.
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
    fn load_data_text_omits_the_file_name() {
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
    fn savepoint_names_are_extracted() {
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
    fn deep_nesting_is_parsed_in_linear_time_without_recursion() {
        for prefix in ["/*!", "/*M!", "(", "/*!99999", "SET STATEMENT a=1 FOR ", "/**/", "#\n"] {
            let text = format!("{} CREATE TABLE d.z (a INT) */", prefix.repeat(300_000));
            assert_eq!(verb(text.as_bytes(), Backslash::default), Verb::Definition, "{prefix}");
        }
        let quotes = format!("SET STATEMENT a={} FOR INSERT INTO t VALUES (1)", "'\\''".repeat(100_000));
        assert_eq!(verb(quotes.as_bytes(), Backslash::default), Verb::Change);
    }
}
