//! Reads a binary document without copying: locates the bytes of each value.

use crate::cursor::Cursor;
use crate::error::{value_malformed, Result};

const SMALL_OBJECT: u8 = 0x00;
const LARGE_OBJECT: u8 = 0x01;
const SMALL_ARRAY: u8 = 0x02;
const LARGE_ARRAY: u8 = 0x03;
const LITERAL: u8 = 0x04;
const INT16: u8 = 0x05;
const UINT16: u8 = 0x06;
const INT32: u8 = 0x07;
const UINT32: u8 = 0x08;
const INT64: u8 = 0x09;
const UINT64: u8 = 0x0a;
const DOUBLE: u8 = 0x0b;
const STRING: u8 = 0x0c;
const OPAQUE: u8 = 0x0f;

/// Maximum size in bytes of a string's length field: seven bits per byte, at most 32 bits in all.
const LENGTH_BYTES_MAX: u32 = 5;

/// A value of a document. Every payload is as wide as a word, so that nodes are copied in whole words. Narrower
/// payloads would stall the processor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Node<'a> {
    Null,
    True,
    False,
    Int(i64),
    UInt(u64),
    Double(f64),
    /// The reader must check that the bytes are valid UTF-8.
    String(&'a [u8]),
    /// A value of a type that JSON does not have, with the server's type number.
    Opaque(u64, &'a [u8]),
    Array(Container<'a>),
    Object(Container<'a>),
}

/// An array or object: entries with the offsets of keys and values, relative to the container's start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Container<'a> {
    bytes: &'a [u8],
    count: usize,
    /// Number of bytes of an offset or a size: four in large containers, two in small containers.
    word: usize,
    /// Number of bytes of a key's entry (offset and length); 0 in arrays.
    key_entry: usize,
}

#[cold]
fn malformed_json(what: &str) -> crate::error::Error {
    value_malformed(format!("a JSON document with {what}"))
}

/// Returns the string. The server stores only UTF-8, so any other bytes are an error.
#[inline]
pub(super) fn utf8(bytes: &[u8]) -> Result<&str> {
    simdutf8::basic::from_utf8(bytes).map_err(|_| malformed_json("a string that is not UTF-8"))
}

impl<'a> Node<'a> {
    /// Parses a whole document: a type byte and the value. An empty document is the JSON null
    /// (`Field_json::val_json`).
    pub(super) fn document(bytes: &'a [u8]) -> Result<Node<'a>> {
        match bytes.split_first() {
            None => Ok(Node::Null),
            Some((code, value)) => Node::parse(*code, value),
        }
    }

    #[inline(always)]
    fn parse(code: u8, bytes: &'a [u8]) -> Result<Node<'a>> {
        let mut cursor = Cursor::new(bytes);
        Ok(match code {
            SMALL_OBJECT => Node::Object(Container::parse(bytes, false, true)?),
            LARGE_OBJECT => Node::Object(Container::parse(bytes, true, true)?),
            SMALL_ARRAY => Node::Array(Container::parse(bytes, false, false)?),
            LARGE_ARRAY => Node::Array(Container::parse(bytes, true, false)?),
            LITERAL => Node::literal(cursor.u8()?)?,
            INT16 => Node::Int(i16::from_ne_bytes(cursor.u16()?.to_ne_bytes()).into()),
            UINT16 => Node::UInt(cursor.u16()?.into()),
            INT32 => Node::Int(i32::from_ne_bytes(cursor.u32()?.to_ne_bytes()).into()),
            UINT32 => Node::UInt(cursor.u32()?.into()),
            INT64 => Node::Int(i64::from_ne_bytes(cursor.u64()?.to_ne_bytes())),
            UINT64 => Node::UInt(cursor.u64()?),
            DOUBLE => match f64::from_bits(cursor.u64()?) {
                double if double.is_finite() => Node::Double(double),
                _ => return Err(malformed_json("a number that is not finite")),
            },
            STRING => Node::String(sized(&mut cursor)?),
            OPAQUE => {
                let field = cursor.u8()?.into();
                Node::Opaque(field, sized(&mut cursor)?)
            }
            _ => return Err(malformed_json(&format!("the unknown type {code:#04x}"))),
        })
    }

    #[inline(always)]
    fn literal(code: u8) -> Result<Node<'a>> {
        match code {
            0 => Ok(Node::Null),
            1 => Ok(Node::True),
            2 => Ok(Node::False),
            _ => Err(malformed_json(&format!("the unknown literal {code:#04x}"))),
        }
    }
}

/// Reads a length, stored in groups of seven bits (lowest first), and returns that many bytes.
#[inline]
fn sized<'a>(cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    let mut length: u64 = 0;
    for group in 0..LENGTH_BYTES_MAX {
        let byte = cursor.u8()?;
        length |= u64::from(byte & 0x7f) << (7 * group);
        if byte & 0x80 == 0 {
            let length = usize::try_from(length).map_err(|_| malformed_json("a string over the address space"))?;
            return cursor.take(length);
        }
    }
    Err(malformed_json("a string length of more than five bytes"))
}

impl<'a> Container<'a> {
    #[inline(always)]
    fn parse(bytes: &'a [u8], large: bool, object: bool) -> Result<Container<'a>> {
        let mut cursor = Cursor::new(bytes);
        let mut number = || -> Result<usize> {
            let number = if large { cursor.u32()? } else { cursor.u16()?.into() };
            usize::try_from(number).map_err(|_| malformed_json("a size over the address space"))
        };
        let (count, size) = (number()?, number()?);
        let bytes = bytes.get(..size).ok_or_else(|| malformed_json("a container that reaches past its end"))?;
        let word = if large { 4 } else { 2 };
        let container = Container { bytes, count, word, key_entry: if object { word + 2 } else { 0 } };
        match container.entries_end() {
            Some(end) if end <= size => Ok(container),
            _ => Err(malformed_json("more entries than its container holds")),
        }
    }

    fn entries_end(self) -> Option<usize> {
        let entry = self.key_entry + 1 + self.word;
        self.count.checked_mul(entry)?.checked_add(2 * self.word)
    }

    fn is_large(self) -> bool {
        self.word == 4
    }

    /// Number of values.
    pub(super) fn len(self) -> usize {
        self.count
    }

    /// Returns the bytes from an offset on. Offsets must not point into the container's head. This ensures that each
    /// nested container is shorter than the container around it.
    #[inline(always)]
    fn from(self, offset: usize) -> Result<&'a [u8]> {
        if offset < 2 * self.word {
            return Err(malformed_json("an offset into its own header"));
        }
        self.bytes.get(offset..).ok_or_else(|| malformed_json("an offset past its container"))
    }

    #[inline(always)]
    fn offset(self, cursor: &mut Cursor<'_>) -> Result<usize> {
        let offset = if self.is_large() { cursor.u32()? } else { cursor.u16()?.into() };
        usize::try_from(offset).map_err(|_| malformed_json("an offset over the address space"))
    }

    /// Returns the key of the value at index `slot`, which is below `len`. The caller must check that it is UTF-8.
    #[inline(always)]
    pub(super) fn key(self, slot: usize) -> Result<&'a [u8]> {
        let mut cursor = Cursor::new(self.from(2 * self.word + slot * self.key_entry)?);
        let offset = self.offset(&mut cursor)?;
        let length = usize::from(cursor.u16()?);
        Cursor::new(self.from(offset)?).take(length)
    }

    /// Returns the value at index `slot`, which is below `len`.
    #[inline(always)]
    pub(super) fn value(self, slot: usize) -> Result<Node<'a>> {
        let start = 2 * self.word + self.count * self.key_entry + slot * (1 + self.word);
        let mut cursor = Cursor::new(self.from(start)?);
        let code = cursor.u8()?;
        match code {
            LITERAL | INT16 | UINT16 => Node::parse(code, cursor.take(self.word)?),
            INT32 | UINT32 if self.is_large() => Node::parse(code, cursor.take(4)?),
            _ => {
                let offset = self.offset(&mut cursor)?;
                Node::parse(code, self.from(offset)?)
            }
        }
    }
}
