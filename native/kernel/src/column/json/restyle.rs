//! Validates documents given as text, and writes them in another style.
//!
//! The types that the server keeps in addition to the text are lost: a DATE in a document becomes a plain string. A
//! DECIMAL is distinguished from a DOUBLE only if its digits differ from those that the server shows for a DOUBLE.

use crate::column::float;
use crate::error::{value_malformed, Error, Result};

use super::style::JsonStyle;
use super::text::{deeper, Writer};

/// Writes the document in Canal's style. Raises `ValueMalformed` if the text is not a document.
pub fn restyle(document: &str) -> Result<String> {
    let mut out = Vec::with_capacity(document.len());
    Reader::of(document).document(&mut Some(Writer::new(document.len(), JsonStyle::Canal, &mut out)))?;
    String::from_utf8(out).map_err(|_| malformed_document())
}

/// Checks that the text is a document. Raises `ValueMalformed`.
pub fn prove(document: &str) -> Result<()> {
    Reader::of(document).document(&mut None)
}

/// A step of a path into a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A member of an object.
    Member(String),
    /// An element of an array, counted from 0.
    Element(usize),
}

/// Returns the value at a path: the content of a string, or the JSON text of any other value.
///
/// Returns `None` if the path does not exist or its value is null. Raises `ValueMalformed` if the part of the document
/// that is read is not valid JSON.
pub fn pick(document: &str, path: &[Step]) -> Result<Option<String>> {
    let mut reader = Reader::of(document);
    for step in path {
        let is_match = match step {
            Step::Member(name) => reader.seek_member(name)?,
            Step::Element(at) => reader.seek_element(*at)?,
        };
        if !is_match {
            return Ok(None);
        }
    }
    reader.space();
    if reader.rest.first() == Some(&b'"') {
        let _ = reader.next()?;
        return reader.escaped().map(Some);
    }
    let before = reader.rest;
    reader.value(path.len(), &mut None)?;
    let text = before.get(..before.len() - reader.rest.len()).unwrap_or_default();
    let text = std::str::from_utf8(text).map_err(|_| malformed_document())?;
    Ok((text != "null").then(|| text.to_owned()))
}

#[cold]
fn malformed_document() -> Error {
    value_malformed("text that is no JSON document")
}

/// Where to write the document; None if it is only validated.
type Out<'o> = Option<Writer<'o>>;

fn put(out: &mut Out<'_>, text: &[u8]) {
    if let Some(out) = out {
        out.put(text);
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn of(document: &'a str) -> Reader<'a> {
        Reader { rest: document.as_bytes() }
    }

    fn document(mut self, out: &mut Out<'_>) -> Result<()> {
        self.value(0, out)?;
        self.space();
        match self.rest {
            [] => Ok(()),
            _ => Err(malformed_document()),
        }
    }

    fn space(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    /// Reads the next byte that is not white space.
    fn next(&mut self) -> Result<u8> {
        self.space();
        let (first, rest) = self.rest.split_first().ok_or_else(malformed_document)?;
        self.rest = rest;
        Ok(*first)
    }

    fn value(&mut self, depth: usize, out: &mut Out<'_>) -> Result<()> {
        self.space();
        match self.rest.first() {
            Some(b'{') => self.container(depth, b'}', true, out),
            Some(b'[') => self.container(depth, b']', false, out),
            Some(b'"') => self.string(out),
            _ => self.plain(out),
        }
    }

    fn container(&mut self, depth: usize, end: u8, named: bool, out: &mut Out<'_>) -> Result<()> {
        let depth = deeper(depth)?;
        put(out, &[self.next()?]);
        self.space();
        if self.rest.first() == Some(&end) {
            put(out, &[self.next()?]);
            return Ok(());
        }
        loop {
            if named {
                self.space();
                self.string(out)?;
                if self.next()? != b':' {
                    return Err(malformed_document());
                }
                put(out, b": ");
            }
            self.value(depth, out)?;
            match self.next()? {
                b',' => put(out, b", "),
                last if last == end => {
                    put(out, &[last]);
                    return Ok(());
                }
                _ => return Err(malformed_document()),
            }
        }
    }

    /// Moves to the value of a member of the next object; false if there is none.
    fn seek_member(&mut self, name: &str) -> Result<bool> {
        if !self.enter(b'{', b'}')? {
            return Ok(false);
        }
        loop {
            if self.next()? != b'"' {
                return Err(malformed_document());
            }
            let is_match = self.escaped()? == name;
            if self.next()? != b':' {
                return Err(malformed_document());
            }
            if is_match {
                return Ok(true);
            }
            self.value(0, &mut None)?;
            match self.next()? {
                b',' => {}
                b'}' => return Ok(false),
                _ => return Err(malformed_document()),
            }
        }
    }

    /// Moves to an element of the next array; false if there is none.
    fn seek_element(&mut self, at: usize) -> Result<bool> {
        if !self.enter(b'[', b']')? {
            return Ok(false);
        }
        for _ in 0..at {
            self.value(0, &mut None)?;
            match self.next()? {
                b',' => {}
                b']' => return Ok(false),
                _ => return Err(malformed_document()),
            }
        }
        Ok(true)
    }

    /// Enters the next container; false if the next value is of another type, or empty.
    fn enter(&mut self, first: u8, last: u8) -> Result<bool> {
        self.space();
        if self.rest.first() != Some(&first) {
            return Ok(false);
        }
        let _ = self.next()?;
        self.space();
        Ok(self.rest.first() != Some(&last))
    }

    fn string(&mut self, out: &mut Out<'_>) -> Result<()> {
        if self.next()? != b'"' {
            return Err(malformed_document());
        }
        let stop = |byte: &u8| matches!(byte, b'"' | b'\\' | 0..=0x1f);
        let length = self.rest.iter().position(stop).ok_or_else(malformed_document)?;
        let (text, after) = self.rest.split_at_checked(length).ok_or_else(malformed_document)?;
        if let Some((b'"', after)) = after.split_first() {
            self.rest = after;
            return out.as_mut().map_or(Ok(()), |out| out.string(text));
        }
        let text = self.escaped()?;
        out.as_mut().map_or(Ok(()), |out| out.string(text.as_bytes()))
    }

    /// Reads the text of a string with escapes, up to its end.
    fn escaped(&mut self) -> Result<String> {
        let mut text = Vec::new();
        loop {
            let (first, rest) = self.rest.split_first().ok_or_else(malformed_document)?;
            self.rest = rest;
            match first {
                b'"' => return String::from_utf8(text).map_err(|_| malformed_document()),
                b'\\' => {
                    let character = self.escape()?;
                    text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                }
                0..=0x1f => return Err(malformed_document()),
                byte => text.push(*byte),
            }
        }
    }

    fn escape(&mut self) -> Result<char> {
        let (first, rest) = self.rest.split_first().ok_or_else(malformed_document)?;
        self.rest = rest;
        Ok(match first {
            b'"' | b'\\' | b'/' => char::from(*first),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let unit = self.unit()?;
                let units = match unit {
                    0xd800..=0xdbff => {
                        self.rest = self.rest.strip_prefix(b"\\u").ok_or_else(malformed_document)?;
                        vec![unit, self.unit()?]
                    }
                    _ => vec![unit],
                };
                match char::decode_utf16(units).next() {
                    Some(Ok(character)) => character,
                    _ => return Err(malformed_document()),
                }
            }
            _ => return Err(malformed_document()),
        })
    }

    /// Reads four hexadecimal digits.
    fn unit(&mut self) -> Result<u16> {
        let (digits, rest) = self.rest.split_at_checked(4).ok_or_else(malformed_document)?;
        self.rest = rest;
        let digit = |byte: &u8| char::from(*byte).to_digit(16).ok_or_else(malformed_document);
        let unit = digits.iter().try_fold(0, |unit, byte| Ok::<u32, Error>(unit << 4 | digit(byte)?))?;
        u16::try_from(unit).map_err(|_| malformed_document())
    }

    /// Reads a number or one of the three literals.
    fn plain(&mut self, out: &mut Out<'_>) -> Result<()> {
        let ends = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b':' | b'"') || byte.is_ascii_whitespace();
        let length = self.rest.iter().position(ends).unwrap_or(self.rest.len());
        let (token, rest) = self.rest.split_at_checked(length).ok_or_else(malformed_document)?;
        self.rest = rest;
        if !matches!(token, b"null" | b"true" | b"false") && !is_number(token) {
            return Err(malformed_document());
        }
        let Some(out) = out else { return Ok(()) };
        match double(token) {
            Some(value) => out.double(value),
            None => out.put(token),
        }
        Ok(())
    }
}

/// Whether a token is a valid JSON number.
fn is_number(token: &[u8]) -> bool {
    let digits = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let number = token.strip_prefix(b"-").unwrap_or(token);
    let exponent = number.iter().position(|byte| matches!(byte, b'e' | b'E'));
    let (number, exponent) = match exponent.and_then(|at| number.split_at_checked(at)) {
        Some((number, exponent)) => (number, exponent.get(1..)),
        None => (number, None),
    };
    let point = number.iter().position(|byte| *byte == b'.');
    let (whole, part) = match point.and_then(|at| number.split_at_checked(at)) {
        Some((whole, part)) => (whole, part.get(1..)),
        None => (number, None),
    };
    let is_exponent = |text: &[u8]| digits(text.strip_prefix(b"-").or(text.strip_prefix(b"+")).unwrap_or(text));
    digits(whole)
        && (whole.len() == 1 || whole.first() != Some(&b'0'))
        && part.is_none_or(digits)
        && exponent.is_none_or(is_exponent)
}

/// Returns the DOUBLE that the server shows as exactly this token; None for any other token.
fn double(token: &[u8]) -> Option<f64> {
    if !token.iter().any(|byte| matches!(byte, b'.' | b'e')) {
        return None;
    }
    let value: f64 = std::str::from_utf8(token).ok()?.parse().ok()?;
    let mut shown = Vec::new();
    match float::whole(value) {
        Some(_) => return token.ends_with(b".0").then_some(value),
        None => float::write_double(value, &mut shown),
    }
    (shown == token).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_written_in_canals_style() {
        let cases = [
            (r#"{"a": [1, 2.5, true, null], "é": {}}"#, r#"{"a": [1, 2.5, true, null], "é": {}}"#),
            (r#"{"a":1,"b":[]}"#, r#"{"a": 1, "b": []}"#),
            (r#""x\\y\/\u00e9\ud83d\ude00""#, "\"x\\\\y/é\u{1f600}\""),
            ("\"\u{80}\u{7f}\"", r#""\u0080\u007f""#),
            ("1.50", "1.50"),
            ("1e20", "1.0E20"),
            ("3.0", "3.0"),
            ("18446744073709551615", "18446744073709551615"),
            (" [ ] ", "[]"),
        ];
        for (text, expected) in cases {
            assert_eq!(restyle(text).unwrap(), expected, "{text}");
            prove(text).unwrap();
        }
    }

    #[test]
    fn a_path_leads_to_a_value_or_nowhere() {
        let document = r#"{"a": [1, {"b": "x\u00e9\"", "n": null}, [], "s"], "c": {"d": 1.50}, "": 7}"#;
        let member = |name: &str| Step::Member(name.to_owned());
        let cases = [
            (vec![member("a"), Step::Element(0)], Some("1")),
            (vec![member("a"), Step::Element(1), member("b")], Some("x\u{e9}\"")),
            (vec![member("a"), Step::Element(1), member("n")], None),
            (vec![member("a"), Step::Element(2), Step::Element(0)], None),
            (vec![member("a"), Step::Element(9)], None),
            (vec![member("c")], Some(r#"{"d": 1.50}"#)),
            (vec![member("c"), member("d")], Some("1.50")),
            (vec![member("c"), member("e")], None),
            (vec![member("")], Some("7")),
            (vec![Step::Element(0)], None),
        ];
        for (path, expected) in cases {
            assert_eq!(pick(document, &path).unwrap().as_deref(), expected, "{path:?}");
        }
        assert_eq!(pick(document, &[]).unwrap().as_deref(), Some(document));
        assert!(pick("{\"a\" 1}", &[member("a")]).is_err());
    }

    #[test]
    fn invalid_documents_are_rejected() {
        let deep = "[".repeat(200);
        let texts = [
            "",
            "{",
            "[1,]",
            "{\"a\"}",
            "{1: 2}",
            "\"",
            "\"\n\"",
            "\"\\u12\"",
            "\"\\ud800\"",
            "01",
            "1.",
            ".5",
            "--1",
            "1e",
            "nul",
        ];
        for text in texts.into_iter().chain(["1 2", "[1] x", "\"\\x\"", deep.as_str()]) {
            assert!(prove(text).is_err(), "{text}");
            assert!(restyle(text).is_err(), "{text}");
        }
    }
}
