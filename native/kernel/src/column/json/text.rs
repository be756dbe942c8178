//! Writes the text of a document as the server prints it.
//!
//! Source: `wrapper_to_string` in the server's `json_dom.cc`, checked against a running server.

use crate::column::quoted::{self, Look};
use crate::column::{base64, date, datetime, decimal, float, integer, time, Time};
use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, ErrorKind, Result};
use crate::limits::JSON_DEPTH_MAX;

use super::binary::{utf8, Container, Node};
use super::style::JsonStyle;

const DECIMAL: u64 = 246;
const DATE: u64 = 10;
const TIME: u64 = 11;
const DATETIME: u64 = 12;
const TIMESTAMP: u64 = 7;

/// Maximum ratio of the text's length to the document's size. A control character becomes six characters; an entry with
/// its separators grows by less.
const GROWTH_MAX: usize = 8;

/// Number of bytes that the text may have beyond the maximum ratio. Small documents need them.
const GROWTH_ROOM: usize = 256;

/// Fractional digits of times in JSON.
const FSP: u8 = 6;

/// The output, and the limit of its growth.
pub(super) struct Writer<'o> {
    out: &'o mut Vec<u8>,
    end: usize,
    style: JsonStyle,
}

/// Writes the text of a binary document.
///
/// Raises `ValueMalformed` for a malformed document, or if the text is longer than any valid document's,
/// `LimitExceeded` for nesting deeper than the server allows. Output written before an error stays in `out`.
pub fn write_text(document: &[u8], out: &mut Vec<u8>) -> Result<()> {
    write_text_in(document, JsonStyle::Server, out)
}

/// Writes the text in the given style. In Canal's style, an empty document has an empty text.
pub fn write_text_in(document: &[u8], style: JsonStyle, out: &mut Vec<u8>) -> Result<()> {
    if document.is_empty() && style == JsonStyle::Canal {
        return Ok(());
    }
    Writer::new(document.len(), style, out).node(Node::document(document)?, 0)
}

impl<'o> Writer<'o> {
    /// Writes the text of a document of `document_bytes` bytes into `out`.
    pub(super) fn new(document_bytes: usize, style: JsonStyle, out: &'o mut Vec<u8>) -> Writer<'o> {
        let room = document_bytes.saturating_mul(GROWTH_MAX).saturating_add(GROWTH_ROOM);
        let end = out.len().saturating_add(room);
        Writer { out, end, style }
    }

    /// Writes punctuation.
    pub(super) fn put(&mut self, text: &[u8]) {
        self.out.extend_from_slice(text);
    }

    fn check(&self, more: usize) -> Result<()> {
        if self.out.len().saturating_add(more) > self.end {
            return Err(value_malformed("a JSON document whose entries overlap"));
        }
        Ok(())
    }

    /// Writes a value; `depth` is the number of containers around it. Only containers need a call.
    #[inline(always)]
    pub(super) fn node(&mut self, node: Node<'_>, depth: usize) -> Result<()> {
        self.check(0)?;
        match node {
            Node::Null => self.put(b"null"),
            Node::True => self.put(b"true"),
            Node::False => self.put(b"false"),
            Node::Int(value) => integer::write_signed(value, self.out),
            Node::UInt(value) => integer::write_unsigned(value, self.out),
            Node::Double(value) => self.double(value),
            Node::String(text) => self.string(text)?,
            Node::Opaque(field, data) => self.opaque(field, data)?,
            Node::Array(array) => self.array(array, depth)?,
            Node::Object(object) => self.object(object, depth)?,
        }
        Ok(())
    }

    #[inline(never)]
    fn array(&mut self, array: Container<'_>, depth: usize) -> Result<()> {
        let depth = deeper(depth)?;
        self.put(b"[");
        for slot in 0..array.len() {
            if slot > 0 {
                self.put(b", ");
            }
            self.node(array.value(slot)?, depth)?;
        }
        self.put(b"]");
        Ok(())
    }

    #[inline(never)]
    fn object(&mut self, object: Container<'_>, depth: usize) -> Result<()> {
        let depth = deeper(depth)?;
        self.put(b"{");
        for slot in 0..object.len() {
            if slot > 0 {
                self.put(b", ");
            }
            self.string(object.key(slot)?)?;
            self.put(b": ");
            self.node(object.value(slot)?, depth)?;
        }
        self.put(b"}");
        Ok(())
    }

    /// Writes a quoted string. Only quotes, backslashes and control characters are escaped.
    ///
    /// Raises `ValueMalformed` if the string is not UTF-8.
    #[inline(always)]
    pub(super) fn string(&mut self, text: &[u8]) -> Result<()> {
        self.check(text.len())?;
        match self.style {
            JsonStyle::Server if quoted::write_short(text, self.out) => Ok(()),
            _ => self.long_string(text),
        }
    }

    #[inline(never)]
    fn long_string(&mut self, text: &[u8]) -> Result<()> {
        self.put(b"\"");
        // One branchless pass separates most strings from the few that need escapes or validation.
        let look = Look::at(text);
        if look.not_ascii != 0 {
            utf8(text)?;
        }
        match self.style {
            JsonStyle::Server => quoted::write_looked(look, text, self.out),
            JsonStyle::Canal => self.escaped_canal(text),
        }
        self.put(b"\"");
        Ok(())
    }

    /// Writes a number with a point or an exponent, so that it is not read as an integer.
    pub(super) fn double(&mut self, value: f64) {
        if self.style == JsonStyle::Canal {
            return float::write_java_double(value, self.out);
        }
        if let Some(integer) = float::whole(value) {
            integer::write_signed(integer, self.out);
            return self.put(b".0");
        }
        if float::write_fraction(value, self.out) {
            return;
        }
        let start = self.out.len();
        float::write_double(value, self.out);
        let written = self.out.get(start..).unwrap_or(&[]);
        if !written.iter().any(|byte| matches!(byte, b'.' | b'e')) {
            self.put(b".0");
        }
    }

    fn opaque(&mut self, field: u64, data: &[u8]) -> Result<()> {
        let mut cursor = Cursor::new(data);
        match field {
            DECIMAL => {
                let (precision, scale) = (cursor.u8()?, cursor.u8()?);
                if !decimal::fits_words(precision, scale) || decimal::width(precision, scale) != cursor.remaining() {
                    let message = format!(
                        "a JSON document has a DECIMAL({precision},{scale}) of {} bytes, which there cannot be",
                        cursor.remaining()
                    );
                    return Err(value_malformed(message));
                }
                return decimal::write_text(&decimal::read(precision, scale, &mut cursor)?, self.out);
            }
            DATE | TIME | DATETIME | TIMESTAMP if self.style == JsonStyle::Canal => {
                return self.opaque_canal(field, cursor.u64()?);
            }
            DATE => {
                let value = moment(cursor.u64()?)?;
                self.put(b"\"");
                date::write_text(value.date, self.out);
            }
            TIME => {
                let value = span(cursor.u64()?)?;
                self.put(b"\"");
                time::write_text(value, FSP, self.out);
            }
            DATETIME | TIMESTAMP => {
                let value = moment(cursor.u64()?)?;
                self.put(b"\"");
                datetime::write_text(value, FSP, self.out);
            }
            _ if self.style == JsonStyle::Canal => {
                self.check(data.len())?;
                self.put(b"\"");
                let text: String = data.iter().map(|byte| char::from(*byte)).collect();
                self.escaped_canal(text.as_bytes());
            }
            _ => {
                self.check(data.len() / 3 * 4)?;
                self.put(format!("\"base64:type{field}:").as_bytes());
                write_base64(data, self.out);
            }
        }
        self.put(b"\"");
        Ok(())
    }
}

impl Writer<'_> {
    /// Escapes characters as Canal does. Quotes and backslashes are escaped, and three control characters are written
    /// as a letter. All other control characters, including those of ISO-8859-1 and its no-break space, are written as
    /// their number.
    fn escaped_canal(&mut self, text: &[u8]) {
        let plain = |byte: u8| (0x20..0x7f).contains(&byte) && byte != b'"' && byte != b'\\';
        if text.iter().all(|byte| plain(*byte)) {
            return self.put(text);
        }
        for character in String::from_utf8_lossy(text).chars() {
            match character {
                '"' => self.put(b"\\\""),
                '\\' => self.put(b"\\\\"),
                '\n' => self.put(b"\\n"),
                '\r' => self.put(b"\\r"),
                '\t' => self.put(b"\\t"),
                '\0'..='\x1f' | '\x7f'..='\u{a0}' => {
                    self.put(format!("\\u{:04x}", u32::from(character)).as_bytes());
                }
                character => self.put(character.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }

    /// Writes a date or time like Canal, which shows a DATE with a time of day, and a zero value without a fraction.
    fn opaque_canal(&mut self, field: u64, packed: u64) -> Result<()> {
        self.put(b"\"");
        match (field, packed) {
            (TIME, 0) => self.put(b"00:00:00"),
            (TIME, packed) => time::write_text(span(packed)?, FSP, self.out),
            (_, 0) => self.put(b"0000-00-00 00:00:00"),
            (_, packed) => datetime::write_text(moment(packed)?, FSP, self.out),
        }
        self.put(b"\"");
        Ok(())
    }
}

/// Returns the depth of the values in a nested container, or fails if the nesting is too deep.
pub(super) fn deeper(depth: usize) -> Result<usize> {
    if depth >= JSON_DEPTH_MAX {
        let message = format!("a JSON document nested deeper than {JSON_DEPTH_MAX}");
        return Err(Error::new(ErrorKind::LimitExceeded, message));
    }
    Ok(depth + 1)
}

/// Unpacks a date and time that `TIME_to_longlong_datetime_packed` has packed: the bits of a DATETIME column, followed
/// by 24 bits of microseconds.
fn moment(packed: u64) -> Result<datetime::DateTime> {
    let bits = (packed >> 24) + (1 << 39);
    let micros = u32::try_from(packed & 0xff_ffff).unwrap_or(u32::MAX);
    if bits >> 40 != 0 || micros > 999_999 {
        return Err(value_malformed("a JSON document with an impossible DATETIME"));
    }
    Ok(datetime::DateTime { micros, ..datetime::unpack(bits)? })
}

/// Unpacks a time span packed by `TIME_to_longlong_time_packed`, in which a negative span is negated as a whole.
fn span(packed: u64) -> Result<Time> {
    time::unpack(i64::from_ne_bytes(packed.to_ne_bytes()))
}

/// Input bytes per line of base64: the server breaks lines after 76 characters.
const BASE64_LINE_BYTES: usize = 57;

/// Writes base64 like the server's `base64_encode`; its line breaks are escaped in the JSON string.
fn write_base64(data: &[u8], out: &mut Vec<u8>) {
    for (row, line) in data.chunks(BASE64_LINE_BYTES).enumerate() {
        if row > 0 {
            out.extend_from_slice(b"\\n");
        }
        base64::write(line, out);
    }
}
