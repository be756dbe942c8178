//! Writes documents in MySQL's binary form.
//!
//! Source: the comment at the top of the server's `json_binary.h`. Containers are written in the large form, which
//! holds documents of any size.

use std::borrow::Cow;

use crate::error::{value_malformed, Error, ErrorKind, Result};
use crate::limits::JSON_DEPTH_MAX;

/// Type bytes.
pub mod code {
    #![allow(missing_docs)]
    pub const OBJECT: u8 = 0x01;
    pub const ARRAY: u8 = 0x03;
    pub const LITERAL: u8 = 0x04;
    pub const INT64: u8 = 0x09;
    pub const UINT64: u8 = 0x0a;
    pub const DOUBLE: u8 = 0x0b;
    pub const STRING: u8 = 0x0c;
    pub const OPAQUE: u8 = 0x0f;
}

/// Size in bytes of a container's count and size fields.
const HEAD_BYTES: usize = 8;
/// Size in bytes of a key's entry: offset and length.
const KEY_ENTRY_BYTES: usize = 6;
/// Size in bytes of a value's entry: type, and offset or literal.
const VALUE_ENTRY_BYTES: usize = 5;

/// A value of a document.
#[derive(Debug, Clone, PartialEq)]
pub enum Element<'a> {
    /// null.
    Null,
    /// A truth value.
    Bool(bool),
    /// Any other value that is not a container: its type byte, and its bytes in MySQL's format.
    Scalar(u8, Cow<'a, [u8]>),
    /// An array.
    Array(Vec<Element<'a>>),
    /// An object, with members in any order.
    Object(Vec<(Cow<'a, [u8]>, Element<'a>)>),
}

/// Appends a document. Raises `LimitExceeded` for nesting deeper than the server allows, `ValueMalformed` for a key of
/// over 65,535 bytes.
pub fn write_document(document: &Element<'_>, out: &mut Vec<u8>) -> Result<()> {
    out.push(document.code());
    document.write(0, out)
}

impl Element<'_> {
    fn code(&self) -> u8 {
        match self {
            Element::Null | Element::Bool(_) => code::LITERAL,
            Element::Scalar(code, _) => *code,
            Element::Array(_) => code::ARRAY,
            Element::Object(_) => code::OBJECT,
        }
    }

    fn literal(&self) -> Option<u8> {
        match self {
            Element::Null => Some(0),
            Element::Bool(true) => Some(1),
            Element::Bool(false) => Some(2),
            Element::Scalar(..) | Element::Array(_) | Element::Object(_) => None,
        }
    }

    fn write(&self, depth: usize, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Element::Null | Element::Bool(_) => {
                out.extend(self.literal());
                Ok(())
            }
            Element::Scalar(_, bytes) => {
                out.extend_from_slice(bytes);
                Ok(())
            }
            Element::Array(elements) => write_container(&[], elements.iter(), elements.len(), depth, out),
            Element::Object(members) => {
                // MySQL searches members by the length of their key, then by its bytes.
                let mut sorted: Vec<&(Cow<'_, [u8]>, Element<'_>)> = members.iter().collect();
                sorted.sort_by(|(first, _), (second, _)| (first.len(), first).cmp(&(second.len(), second)));
                let keys: Vec<&[u8]> = sorted.iter().map(|(key, _)| key.as_ref()).collect();
                write_container(&keys, sorted.iter().map(|(_, value)| value), sorted.len(), depth, out)
            }
        }
    }
}

fn write_container<'e, 'a: 'e>(
    keys: &[&[u8]],
    values: impl Iterator<Item = &'e Element<'a>>,
    count: usize,
    depth: usize,
    out: &mut Vec<u8>,
) -> Result<()> {
    if depth >= JSON_DEPTH_MAX {
        return Err(Error::new(ErrorKind::LimitExceeded, "a JSON document that is nested too deeply"));
    }
    let start = out.len();
    let entries = start + HEAD_BYTES;
    let value_entries = entries + keys.len() * KEY_ENTRY_BYTES;
    out.resize(value_entries + count * VALUE_ENTRY_BYTES, 0);
    for (index, key) in keys.iter().enumerate() {
        let length = u16::try_from(key.len()).map_err(|_| value_malformed("a JSON key of over 65535 bytes"))?;
        let entry = [&offset_of(out, start)?[..], &length.to_le_bytes()].concat();
        replace(out, entries + index * KEY_ENTRY_BYTES, &entry);
        out.extend_from_slice(key);
    }
    for (index, value) in values.enumerate() {
        let place = match value.literal() {
            Some(literal) => [literal, 0, 0, 0],
            None => {
                let place = offset_of(out, start)?;
                value.write(depth + 1, out)?;
                place
            }
        };
        let entry = [&[value.code()][..], &place].concat();
        replace(out, value_entries + index * VALUE_ENTRY_BYTES, &entry);
    }
    let size = offset_of(out, start)?;
    replace(out, start, &(count as u32).to_le_bytes());
    replace(out, start + 4, &size);
    Ok(())
}

/// Returns the end of the output as an offset from the container's start, in four bytes.
fn offset_of(out: &[u8], start: usize) -> Result<[u8; 4]> {
    match u32::try_from(out.len() - start) {
        Ok(offset) => Ok(offset.to_le_bytes()),
        Err(_) => Err(Error::new(ErrorKind::LimitExceeded, "a JSON document of over 4 GiB")),
    }
}

fn replace(out: &mut [u8], start: usize, bytes: &[u8]) {
    if let Some(space) = out.get_mut(start..start + bytes.len()) {
        space.copy_from_slice(bytes);
    }
}

/// Returns a scalar that is stored with its length in front.
pub fn sized<'a>(code: u8, head: &[u8], bytes: &[u8]) -> Element<'a> {
    let mut stored = head.to_vec();
    let mut length = bytes.len();
    while length >= 0x80 {
        stored.push(length as u8 | 0x80);
        length >>= 7;
    }
    stored.push(length as u8);
    stored.extend_from_slice(bytes);
    Element::Scalar(code, Cow::Owned(stored))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::column::json::write_text;

    fn shown(document: &Element<'_>) -> String {
        let (mut bytes, mut text) = (Vec::new(), Vec::new());
        write_document(document, &mut bytes).unwrap();
        write_text(&bytes, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    fn number(value: i64) -> Element<'static> {
        Element::Scalar(code::INT64, Cow::Owned(value.to_le_bytes().to_vec()))
    }

    fn key(name: &str) -> Cow<'_, [u8]> {
        Cow::Borrowed(name.as_bytes())
    }

    #[test]
    fn documents_are_read_as_they_were_written() {
        let inner = Element::Array(vec![number(-1), Element::Null, Element::Bool(true), Element::Bool(false)]);
        let text = sized(code::STRING, &[], "h\u{e9}".repeat(100).as_bytes());
        let document = Element::Object(vec![
            (key("bb"), inner),
            (key("c"), Element::Object(vec![])),
            (key("a"), text),
            (key(""), Element::Scalar(code::DOUBLE, Cow::Owned(2.5f64.to_le_bytes().to_vec()))),
        ]);
        let long = "h\u{e9}".repeat(100);
        let expected = format!(r#"{{"": 2.5, "a": "{long}", "c": {{}}, "bb": [-1, null, true, false]}}"#);
        assert_eq!(shown(&document), expected);
        assert_eq!(shown(&Element::Null), "null");
        assert_eq!(shown(&Element::Array(vec![])), "[]");
    }

    #[test]
    fn nesting_ends_where_the_servers_does() {
        let nested = |depth: usize| (1..depth).fold(Element::Array(vec![]), |inner, _| Element::Array(vec![inner]));
        assert_eq!(shown(&nested(JSON_DEPTH_MAX)).len(), 2 * JSON_DEPTH_MAX);
        let error = write_document(&nested(JSON_DEPTH_MAX + 1), &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    }
}
