//! Splits a SQL type into its words and numbers.
//!
//! Members of ENUM and SET are quoted in the same way as by the server's `append_unescaped`: quotes are doubled, and
//! `\\`, `\n`, `\r`, `\0` are escaped in every SQL mode.

use std::iter::Peekable;
use std::str::Chars;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// A parsed type: `decimal(10,2) unsigned` has the words `decimal` and `unsigned` and the numbers 10 and 2.
pub(super) struct Parsed<'a> {
    text: &'a str,
    name: String,
    numbers: Vec<u64>,
    members: Vec<Arc<str>>,
    attributes: Vec<String>,
}

fn invalid(text: &str, why: &str) -> Error {
    Error::new(ErrorKind::SchemaInvalid, format!("the column type \"{text}\": {why}"))
        .hint("Give types as information_schema.COLUMNS.COLUMN_TYPE does.")
}

/// Removes plain comments, and unwraps those that MariaDB and MySQL execute, such as `/*M!100301 COMPRESSED*/`.
fn without_comments(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("/*") {
        let (comment, after) = after.split_once("*/").unwrap_or((after, ""));
        plain.push_str(before);
        plain.push(' ');
        if let Some(words) = comment.strip_prefix("M!").or_else(|| comment.strip_prefix('!')) {
            plain.push_str(words.trim_start_matches(|letter: char| letter.is_ascii_digit()));
        }
        rest = after;
    }
    plain.push_str(rest);
    plain
}

/// Parses the rest of a quoted member, in which quotes are doubled and backslashes escape.
fn quoted(letters: &mut Peekable<Chars<'_>>) -> Option<Arc<str>> {
    let mut member = String::new();
    loop {
        match letters.next()? {
            '\'' if letters.next_if_eq(&'\'').is_some() => member.push('\''),
            '\'' => return Some(member.into()),
            '\\' => member.push(match letters.next()? {
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                '0' => '\0',
                character => character,
            }),
            letter => member.push(letter),
        }
    }
}

fn word(letters: &mut Peekable<Chars<'_>>) -> String {
    let mut word = String::new();
    while let Some(letter) = letters.next_if(|letter| letter.is_ascii_alphanumeric() || *letter == '_') {
        word.push(letter.to_ascii_lowercase());
    }
    word
}

fn spaces(letters: &mut Peekable<Chars<'_>>) {
    while letters.next_if(|letter| letter.is_ascii_whitespace()).is_some() {}
}

impl<'a> Parsed<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Parsed<'a>> {
        let members = Vec::new();
        let mut parsed = Parsed { text, name: String::new(), numbers: Vec::new(), members, attributes: Vec::new() };
        // Strip only the comments that follow the members, because a member may contain any characters.
        let (head, tail) = text.split_at(text.rfind(')').unwrap_or(0));
        let plain = format!("{head}{}", without_comments(tail));
        let mut letters = plain.chars().peekable();
        spaces(&mut letters);
        parsed.name = word(&mut letters);
        spaces(&mut letters);
        if letters.next_if_eq(&'(').is_some() {
            parsed.arguments(&mut letters)?;
        }
        loop {
            spaces(&mut letters);
            let attribute = word(&mut letters);
            match (attribute.is_empty(), letters.peek()) {
                (false, _) => parsed.attributes.push(attribute),
                (true, None) => break,
                (true, Some(letter)) => return Err(invalid(text, &format!("unexpected {letter:?}"))),
            }
        }
        match parsed.name.is_empty() {
            true => Err(invalid(text, "no name")),
            false => Ok(parsed),
        }
    }

    fn arguments(&mut self, letters: &mut Peekable<Chars<'_>>) -> Result<()> {
        loop {
            spaces(letters);
            if letters.next_if_eq(&'\'').is_some() {
                let member = quoted(letters).ok_or_else(|| invalid(self.text, "a quote that does not end"))?;
                self.members.push(member);
            } else {
                let number = word(letters).parse().map_err(|_| invalid(self.text, "a number expected"))?;
                self.numbers.push(number);
            }
            spaces(letters);
            match letters.next() {
                Some(',') => {}
                Some(')') => return Ok(()),
                _ => return Err(invalid(self.text, "',' or ')' expected")),
            }
        }
    }

    pub(super) fn has(&self, attribute: &str) -> bool {
        self.attributes.iter().any(|word| word == attribute)
    }

    /// Returns a `SchemaInvalid` error that shows this type.
    pub(super) fn invalid(&self, why: &str) -> Error {
        invalid(self.text, why)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn numbers(&self) -> &[u64] {
        &self.numbers
    }

    pub(super) fn members(&self) -> &[Arc<str>] {
        &self.members
    }

    /// Returns the argument at this index, or the default if it is missing. Fails above the maximum.
    pub(super) fn number(&self, slot: usize, default: u64, max: u64) -> Result<u64> {
        let number = self.numbers.get(slot).copied().unwrap_or(default);
        if number > max {
            return Err(invalid(self.text, &format!("{number} where at most {max} is allowed")));
        }
        Ok(number)
    }

    pub(super) fn small(&self, slot: usize, default: u64, max: u8) -> Result<u8> {
        let number = self.number(slot, default, max.into())?;
        u8::try_from(number).map_err(|_| invalid(self.text, "a number out of range"))
    }
}
