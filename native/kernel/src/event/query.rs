//! A statement as text: DDL, transaction control, or a change in statement format.

use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::{malformed, Result};

/// The parts of a query event that matter, as views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query<'a> {
    /// The connection on the server that ran it.
    pub thread_id: u32,
    /// The error the statement ended with, 0 for none.
    pub error_code: u16,
    /// The default database, UTF-8; may be empty.
    pub database: &'a [u8],
    /// The collation of the text, where the event says so.
    pub collation: Option<u16>,
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
    /// SAVEPOINT, RELEASE, XA END: means nothing for rows.
    Marker,
    /// XA COMMIT.
    XaCommit,
    /// XA ROLLBACK.
    XaRollback,
    /// INSERT, UPDATE and their like: the rows are not in the log.
    Change,
    /// Anything else, DDL above all.
    Definition,
}

impl<'a> Query<'a> {
    /// Reads the body, without checksum (`Query_event`): thread id u32, seconds u32, database length u8, error u16,
    /// length of the status variables u16, these, the database, a zero, the text.
    pub fn read(body: &'a [u8]) -> Result<Query<'a>> {
        let mut cursor = Cursor::new(body);
        let thread_id = cursor.u32()?;
        cursor.skip(4)?;
        let database_bytes = usize::from(cursor.u8()?);
        let error_code = cursor.u16()?;
        let variables_bytes = usize::from(cursor.u16()?);
        let variables = cursor.take(variables_bytes)?;
        let database = cursor.take(database_bytes)?;
        if cursor.u8()? != 0 {
            return Err(malformed("a query event's database does not end with a zero"));
        }
        Ok(Query {
            thread_id,
            error_code,
            database,
            collation: collation(variables),
            variables,
            text: cursor.take_rest(),
        })
    }

    /// The statement as UTF-8. Bytes that are not valid in the session's character set are shown as U+FFFD: a
    /// statement is read for its names, and must not stop the stream.
    pub fn text_utf8(&self, text: &[u8]) -> String {
        let charset = self.collation.and_then(|id| Charset::from_collation_id(u32::from(id)));
        let mut decoded = Vec::with_capacity(text.len());
        match charset {
            Some(charset) if !charset.is_binary() && charset.decode_into(text, &mut decoded).is_ok() => {
                String::from_utf8_lossy(&decoded).into_owned()
            }
            _ => String::from_utf8_lossy(text).into_owned(),
        }
    }
}

/// The client's collation among the status variables. They come in a fixed order in which the collation is early, so
/// the search ends at the first variable that is not known by its length.
fn collation(variables: &[u8]) -> Option<u16> {
    let mut cursor = Cursor::new(variables);
    while let Ok(code) = cursor.u8() {
        match code {
            0 | 3 => cursor.skip(4).ok()?,
            1 | 9 => cursor.skip(8).ok()?,
            2 => {
                cursor.prefixed(1).ok()?;
                cursor.skip(1).ok()?;
            }
            5 | 6 => {
                cursor.prefixed(1).ok()?;
            }
            4 => return cursor.u16().ok(),
            // MariaDB from 11.2 on: pairs of collation ids, four bytes each.
            131 => {
                let pairs = usize::from(cursor.u8().ok()?);
                cursor.skip(4 * pairs).ok()?;
            }
            _ => return None,
        }
    }
    None
}

/// What a statement means, by its first words.
///
/// The server writes transaction control itself, in capitals and without comments; comments before other statements
/// are what clients sent.
pub fn verb(text: &[u8]) -> Verb {
    match text {
        b"BEGIN" => return Verb::Begin,
        b"COMMIT" => return Verb::Commit,
        b"ROLLBACK" => return Verb::Rollback,
        _ => {}
    }
    let Some(statement) = after_set_statement(after_comments(text)) else { return Verb::Change };
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
    if is(first, "SAVEPOINT") || is(first, "RELEASE") {
        return Verb::Marker;
    }
    if is(first, "COMMIT") {
        return Verb::Commit;
    }
    // A SELECT or DO is logged for the functions that it calls: they changed rows.
    const CHANGES: [&str; 9] = ["INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "WITH", "CALL", "SELECT", "DO"];
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
    Verb::Definition
}

/// Passes over `SET STATEMENT variable = value, ... FOR`, which MariaDB logs before the statement that it is for; None
/// where no FOR follows.
fn after_set_statement(mut text: &[u8]) -> Option<&[u8]> {
    loop {
        let (first, rest) = word(text);
        let (second, settings) = word(after_comments(rest));
        if !first.eq_ignore_ascii_case(b"SET") || !second.eq_ignore_ascii_case(b"STATEMENT") {
            return Some(text);
        }
        text = after_comments(after_for(settings)?);
    }
}

/// The text behind the first FOR that is in no quotes, comment or parentheses.
fn after_for(text: &[u8]) -> Option<&[u8]> {
    let (mut rest, mut depth) = (text, 0usize);
    loop {
        rest = match rest {
            [] => return None,
            [quote @ (b'\'' | b'"' | b'`'), inside @ ..] => after_quote(inside, *quote)?,
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

/// The text behind a closing quote; a doubled quote opens the next string, which comes to the same.
fn after_quote(inside: &[u8], quote: u8) -> Option<&[u8]> {
    let mut escaped = false;
    let at = inside.iter().position(|byte| {
        let closes = *byte == quote && !escaped;
        escaped = *byte == b'\\' && !escaped && quote != b'`';
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
            [b'(', rest @ ..] => Some(rest),
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
            ("SAVEPOINT `a`", Verb::Marker),
            ("/* app */ -- x\n insert into t values (1)", Verb::Change),
            ("/*!40000 ALTER TABLE t DISABLE KEYS */", Verb::Definition),
            ("/*M!100100 INSERT INTO t VALUES (1) */", Verb::Change),
            ("SELECT `d`.`g`(7)", Verb::Change),
            ("DO f(1)", Verb::Change),
            ("ANALYZE TABLE t", Verb::Definition),
            ("ANALYZE TABLES a, b", Verb::Definition),
            ("ANALYZE NO_WRITE_TO_BINLOG TABLE t", Verb::Definition),
            ("ANALYZE FORMAT=JSON UPDATE t SET a = 1", Verb::Change),
            ("SET PASSWORD FOR `u`@`h` = 'x'", Verb::Definition),
            ("SET STATEMENT sql_mode='it''s \\' FOR x', a=(b FOR c) FOR insert into t values (1)", Verb::Change),
            ("SET STATEMENT a=1 FOR SET STATEMENT b=2 for ALTER TABLE t ADD c INT", Verb::Definition),
            ("SET STATEMENT a=1", Verb::Change),
            ("SET STATEMENT a='open", Verb::Change),
            ("CREATE TABLE `c` (\n  `a` int\n) START TRANSACTION", Verb::Begin),
            ("# only a comment", Verb::Definition),
            ("/* open", Verb::Definition),
            ("", Verb::Definition),
        ] {
            assert_eq!(verb(text.as_bytes()), wanted, "{text}");
        }
    }
    #[test]
    fn nesting_costs_no_stack_and_linear_time() {
        for prefix in ["/*!", "/*M!", "(", "/*!99999", "SET STATEMENT a=1 FOR ", "/**/", "#\n"] {
            let text = format!("{} CREATE TABLE d.z (a INT) */", prefix.repeat(300_000));
            assert_eq!(verb(text.as_bytes()), Verb::Definition, "{prefix}");
        }
        let quotes = format!("SET STATEMENT a={} FOR INSERT INTO t VALUES (1)", "'\\''".repeat(100_000));
        assert_eq!(verb(quotes.as_bytes()), Verb::Change);
    }
}
