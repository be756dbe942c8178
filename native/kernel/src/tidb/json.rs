//! Converts TiDB's binary JSON documents to MySQL's binary format.
//!
//! Source: the comment at the top of TiDB's `types/json_binary.go`. TiDB's containers have MySQL's large form, but
//! members are sorted by the bytes of their keys, and there are separate types for dates and times.

use std::borrow::Cow;

use super::datum::{json_type, value_length};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, ErrorKind, Result};
use crate::limits::JSON_DEPTH_MAX;
use crate::write::json::{code, sized, write_document, Element};

/// MySQL's type numbers for values that a document stores as opaque.
mod opaque {
    pub const TIMESTAMP: u8 = 7;
    pub const DATE: u8 = 10;
    pub const TIME: u8 = 11;
    pub const DATETIME: u8 = 12;
}

/// Appends a document that begins with its type byte.
///
/// Raises `ValueMalformed` for a document that contradicts its own format, `LimitExceeded` for nesting deeper than the
/// server allows.
pub fn write(document: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let (kind, value) = document.split_first().ok_or_else(|| wrong("no type"))?;
    let mut reader = Reader { left: document.len() };
    let element = reader.element(*kind, value, 0)?;
    write_document(&element, out)
}

#[cold]
fn wrong(what: &str) -> Error {
    value_malformed(format!("a document of TiDB with {what}"))
}

/// Reads a document. Crafted offsets can point many entries at the same bytes, so the number of bytes read is limited
/// to the document's length.
struct Reader {
    left: usize,
}

impl Reader {
    fn spend(&mut self, bytes: usize) -> Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| wrong("entries that overlap"))?;
        Ok(())
    }

    /// Reads the value at the start of `bytes`.
    fn element<'a>(&mut self, kind: u8, bytes: &'a [u8], depth: usize) -> Result<Element<'a>> {
        if kind == json_type::OBJECT || kind == json_type::ARRAY {
            return self.container(kind == json_type::OBJECT, bytes, depth);
        }
        let value = bytes.get(..value_length(kind, bytes)?).ok_or_else(|| wrong("a value past its end"))?;
        self.spend(value.len())?;
        scalar(kind, value)
    }

    fn container<'a>(&mut self, object: bool, bytes: &'a [u8], depth: usize) -> Result<Element<'a>> {
        if depth >= JSON_DEPTH_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "a document of TiDB that is nested too deeply"));
        }
        let mut head = Cursor::new(bytes);
        let (count, size) = (head.u32()? as usize, head.u32()? as usize);
        let bytes = bytes.get(..size).ok_or_else(|| wrong("a container past its end"))?;
        let key_bytes = if object { 6 } else { 0 };
        self.spend(count.saturating_mul(key_bytes + 5).saturating_add(8))?;
        let from = |offset: u32| bytes.get(offset as usize..).filter(|_| offset >= 8).ok_or_else(|| wrong("an offset"));
        let mut keys = Cursor::new(from(8)?);
        let mut entries = keys;
        entries.skip(count.saturating_mul(key_bytes))?;
        let mut members = Vec::new();
        let mut elements = Vec::new();
        for _ in 0..count {
            let kind = entries.u8()?;
            let place = entries.u32()?;
            let element = match kind {
                json_type::LITERAL => literal(place.to_le_bytes().first())?,
                _ => self.element(kind, from(place)?, depth + 1)?,
            };
            if object {
                let offset = keys.u32()?;
                let length = usize::from(keys.u16()?);
                self.spend(length)?;
                members.push((Cow::Borrowed(Cursor::new(from(offset)?).take(length)?), element));
            } else {
                elements.push(element);
            }
        }
        Ok(if object { Element::Object(members) } else { Element::Array(elements) })
    }
}

fn literal(code: Option<&u8>) -> Result<Element<'static>> {
    match code {
        Some(0) => Ok(Element::Null),
        Some(1) => Ok(Element::Bool(true)),
        Some(2) => Ok(Element::Bool(false)),
        _ => Err(wrong("an unknown literal")),
    }
}

fn scalar(kind: u8, value: &[u8]) -> Result<Element<'_>> {
    let number = || Cursor::new(value).u64();
    Ok(match kind {
        json_type::LITERAL => literal(value.first())?,
        json_type::INT64 => Element::Scalar(code::INT64, Cow::Borrowed(value)),
        json_type::UINT64 => Element::Scalar(code::UINT64, Cow::Borrowed(value)),
        json_type::DOUBLE => Element::Scalar(code::DOUBLE, Cow::Borrowed(value)),
        json_type::STRING => Element::Scalar(code::STRING, Cow::Borrowed(value)),
        json_type::OPAQUE => Element::Scalar(code::OPAQUE, Cow::Borrowed(value)),
        json_type::DATE => packed(opaque::DATE, packed_date(number()?) & !CLOCK_BITS),
        json_type::DATETIME => packed(opaque::DATETIME, packed_date(number()?)),
        json_type::TIMESTAMP => packed(opaque::TIMESTAMP, packed_date(number()?)),
        json_type::DURATION => packed(opaque::TIME, packed_time(number()?)),
        _ => return Err(wrong("a value of an unknown type")),
    })
}

fn packed<'a>(field: u8, value: u64) -> Element<'a> {
    sized(code::OPAQUE, &[field], &value.to_le_bytes())
}

/// The bits of a packed date and time that hold the time of day and the microseconds.
const CLOCK_BITS: u64 = (1 << 41) - 1;

/// Converts the bit fields of TiDB's `CoreTime` to MySQL's packed form (`TIME_to_longlong_datetime_packed`).
fn packed_date(core: u64) -> u64 {
    let field = |start: u32, bits: u32| core >> start & ((1 << bits) - 1);
    let (year, month, day) = (field(50, 14), field(46, 4), field(41, 5));
    let (hour, minute, second, micros) = (field(36, 5), field(30, 6), field(24, 6), field(4, 20));
    let days = (year * 13 + month) << 5 | day;
    (days << 17 | hour << 12 | minute << 6 | second) << 24 | micros
}

/// Converts nanoseconds to MySQL's packed form (`TIME_to_longlong_time_packed`).
fn packed_time(nanos: u64) -> u64 {
    let nanos = i64::from_ne_bytes(nanos.to_ne_bytes());
    let micros = nanos.unsigned_abs() / 1_000;
    let seconds = micros / 1_000_000;
    let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
    let (second, part) = (seconds % 60, micros % 1_000_000);
    let packed = (hours << 12 | minutes << 6 | second) << 24 | part;
    if nanos < 0 {
        packed.wrapping_neg()
    } else {
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::column::json::write_text;

    fn shown(document: &[u8]) -> Result<String> {
        let (mut bytes, mut text) = (Vec::new(), Vec::new());
        write(document, &mut bytes)?;
        write_text(&bytes, &mut text)?;
        Ok(String::from_utf8(text).unwrap())
    }

    #[test]
    fn documents_of_tidb_are_shown_as_mysql_shows_them() {
        // {"a":[1,2.5,"x",null,true]} as TiDB 6.6 wrote it.
        let document = b"\x01\x01\0\0\0\x47\0\0\0\x13\0\0\0\x01\0\x03\x14\0\0\0a\x05\0\0\0\x33\0\0\0\
            \x09\x21\0\0\0\x0b\x29\0\0\0\x0c\x31\0\0\0\x04\0\0\0\0\x04\x01\0\0\0\
            \x01\0\0\0\0\0\0\0\0\0\0\0\0\0\x04\x40\x01x";
        assert_eq!(shown(document).unwrap(), r#"{"a": [1, 2.5, "x", null, true]}"#);
        let moment: u64 = 2026 << 50 | 11 << 46 | 22 << 41 | 11 << 36 | 15 << 30 | 59 << 24 | 123_456 << 4 | 0b1100;
        let of = |kind: u8, value: u64| [&[kind][..], &value.to_le_bytes()].concat();
        assert_eq!(shown(&of(json_type::DATE, moment)).unwrap(), r#""2026-11-22""#);
        assert_eq!(shown(&of(json_type::DATETIME, moment)).unwrap(), r#""2026-11-22 11:15:59.123456""#);
        assert_eq!(shown(&of(json_type::TIMESTAMP, moment)).unwrap(), r#""2026-11-22 11:15:59.123456""#);
        let mut span = of(json_type::DURATION, (-45_296_789_000_000i64) as u64);
        span.extend_from_slice(&[3, 0, 0, 0]);
        assert_eq!(shown(&span).unwrap(), r#""-12:34:56.789000""#);
        assert_eq!(shown(b"\x0d\xfe\x02ab").unwrap(), r#""base64:type254:YWI=""#);
    }

    #[test]
    fn entries_that_share_bytes_are_refused() {
        // An array of 200 entries, all of which point to the same array of 200 nulls. Written out, the document would
        // become a hundred times larger.
        let inner = [&200u32.to_le_bytes()[..], &1008u32.to_le_bytes(), &[4, 0, 0, 0, 0].repeat(200)].concat();
        let entries = [&[3u8][..], &1008u32.to_le_bytes()].concat().repeat(200);
        let size = (8 + entries.len() + inner.len()) as u32;
        let document = [&[3u8][..], &200u32.to_le_bytes(), &size.to_le_bytes(), &entries, &inner].concat();
        let error = shown(&document).unwrap_err();
        assert!(error.message().contains("overlap"), "{error}");
    }

    #[test]
    fn damaged_documents_are_refused() {
        for document in [&b""[..], b"\x02", b"\x04\x07", b"\x09\x01", b"\x03\xff\xff\xff\xff\x08\0\0\0", b"\x0c\x05ab"]
        {
            assert!(shown(document).is_err(), "{document:02x?}");
        }
    }
}
