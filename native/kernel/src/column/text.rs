//! CHAR, VARCHAR and the TEXT family: a length, then characters of the column's charset.

use super::layout::{large_prefix, prefix_of};
use super::parsed::Parsed;
use super::store::{Appended, Runs, BLOCK_BYTES};
use super::{hex, quoted, Form};
use crate::charset::Charset;
use crate::cursor::Cursor;
use crate::error::{Error, Result};

/// Returns the width of the length prefix in bytes, and the form of a declared CHAR or BINARY.
pub(super) fn declared_fixed(parsed: &Parsed<'_>, charset: Charset) -> Result<(u8, Form)> {
    let bytes = declared_bytes(Some(1), charset, parsed)?;
    Ok((prefix_of(bytes), Form::Fixed(bytes)))
}

/// Returns the width of the length prefix in bytes, and the form of a declared VARCHAR or VARBINARY.
pub(super) fn declared_varying(parsed: &Parsed<'_>, charset: Charset) -> Result<(u8, Form)> {
    // The header byte of a compressed value counts toward the column's length.
    let header = u16::from(parsed.has("compressed"));
    let bytes = declared_bytes(None, charset, parsed)?.checked_add(header);
    let bytes = bytes.ok_or_else(|| too_long(parsed))?;
    Ok((prefix_of(bytes), Form::Varying(bytes)))
}

/// Returns the width of the length prefix in bytes, and the form of a declared TEXT or BLOB type.
#[expect(clippy::unnecessary_wraps, reason = "like the other forms, which may fail")]
pub(super) fn declared_large(parsed: &Parsed<'_>, _charset: Charset) -> Result<(u8, Form)> {
    Ok((large_prefix(parsed.name()), Form::Large))
}

/// Converts a declared length in characters to bytes, the unit of row images.
fn declared_bytes(characters_default: Option<u64>, charset: Charset, parsed: &Parsed<'_>) -> Result<u16> {
    let characters = parsed.numbers().first().copied().or(characters_default);
    let characters = characters.ok_or_else(|| parsed.invalid("no length"))?;
    let bytes = usize::try_from(characters).ok().and_then(|count| count.checked_mul(charset.bytes_per_character_max()));
    bytes.and_then(|bytes| u16::try_from(bytes).ok()).ok_or_else(|| too_long(parsed))
}

#[cold]
fn too_long(parsed: &Parsed<'_>) -> Error {
    parsed.invalid("more than 65535 bytes")
}

#[inline(always)]
pub(super) fn read<'a>(prefix: u8, cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    cursor.prefixed(prefix)
}

/// Appends the text as UTF-8; bytes that are invalid in the charset are returned as a hexadecimal literal.
#[inline]
pub(super) fn append(bytes: &[u8], charset: Charset, runs: &mut Runs<u8>) -> Appended {
    append_block(bytes, None, charset, runs)
}

/// Reads and appends a value in one step.
#[inline(always)]
pub(super) fn append_read(prefix: u8, charset: Charset, cursor: &mut Cursor<'_>, runs: &mut Runs<u8>) -> Appended {
    let (bytes, block) = cursor.prefixed_block(prefix)?;
    append_block(bytes, block, charset, runs)
}

/// Appends the text, with a block that starts with it: see `Runs::append`.
#[inline(always)]
fn append_block(bytes: &[u8], block: Option<&[u8; BLOCK_BYTES]>, charset: Charset, runs: &mut Runs<u8>) -> Appended {
    // Most text is ASCII, which is already UTF-8 in these charsets.
    use Charset::{Ascii, Latin1, Utf8mb3, Utf8mb4};
    if matches!(charset, Utf8mb4 | Utf8mb3 | Latin1 | Ascii) && is_ascii(bytes) {
        runs.append(bytes, block)?;
        return Ok(None);
    }
    append_decoded(bytes, charset, runs)
}

fn append_decoded(bytes: &[u8], charset: Charset, runs: &mut Runs<u8>) -> Appended {
    match charset.decode_into(bytes, &mut runs.items) {
        Ok(()) => {
            runs.close()?;
            Ok(None)
        }
        Err(_) => {
            runs.take_back();
            Ok(Some(hex::literal(bytes)))
        }
    }
}

/// Reads blocks of 32 bytes, which the compiler vectorizes, then eight bytes at a time. The last eight bytes may overlap
/// the previous eight. The standard library handles the remainder byte by byte, which is slower for texts of typical
/// length.
#[inline(always)]
fn is_ascii(bytes: &[u8]) -> bool {
    const HIGH_BITS: u64 = 0x8080_8080_8080_8080;
    let Some(last) = bytes.last_chunk::<8>() else {
        return bytes.iter().fold(0, |all, byte| all | byte) < 0x80;
    };
    let word = |bytes: &[u8]| bytes.first_chunk::<8>().map_or(HIGH_BITS, |bytes| u64::from_ne_bytes(*bytes));
    let blocks = bytes.chunks_exact(32);
    let words = blocks.remainder().chunks_exact(8);
    let mut lanes = [0; 4];
    for block in blocks {
        for (lane, bytes) in lanes.iter_mut().zip(block.chunks_exact(8)) {
            *lane |= word(bytes);
        }
    }
    let all = lanes.iter().fold(u64::from_ne_bytes(*last), |all, lane| all | lane);
    words.fold(all, |all, bytes| all | word(bytes)) & HIGH_BITS == 0
}

/// Appends text that is already UTF-8.
pub(super) fn append_plain(text: &str, runs: &mut Runs<u8>) -> Appended {
    runs.items.extend_from_slice(text.as_bytes());
    runs.close()?;
    Ok(None)
}

pub(crate) fn write_text(bytes: &[u8], charset: Charset, out: &mut Vec<u8>) {
    let start = out.len();
    if charset.decode_into(bytes, out).is_err() {
        out.truncate(start);
        hex::write_literal(bytes, out);
    }
}

/// The replacement character for invalid bytes, which other binlog readers also use.
const REPLACEMENT: &str = "\u{fffd}";

/// Writes the text, with replacement characters for invalid bytes.
#[inline]
pub(crate) fn write_lossy(bytes: &[u8], charset: Charset, out: &mut Vec<u8>) {
    use Charset::{Ascii, Latin1, Utf8mb3, Utf8mb4};
    if matches!(charset, Utf8mb4 | Utf8mb3 | Latin1 | Ascii) && is_ascii(bytes) {
        return out.extend_from_slice(bytes);
    }
    let start = out.len();
    if charset.decode_into(bytes, out).is_err() {
        out.truncate(start);
        decode_lossy(bytes, charset, out);
    }
}

/// Writes the text as a JSON string, with replacement characters for invalid bytes.
#[inline]
pub(crate) fn write_json(bytes: &[u8], charset: Charset, out: &mut Vec<u8>) {
    use Charset::{Ascii, Latin1, Utf8mb3, Utf8mb4};
    if matches!(charset, Utf8mb4 | Utf8mb3 | Latin1 | Ascii) && is_ascii(bytes) {
        return quoted::write(bytes, out);
    }
    out.push(b'"');
    let start = out.len();
    if charset.decode_into(bytes, out).is_err() {
        out.truncate(start);
        decode_lossy(bytes, charset, out);
    }
    quoted::escape_from(start, out);
    out.push(b'"');
}

/// Decodes character by character, so that only invalid bytes are lost.
#[cold]
fn decode_lossy(bytes: &[u8], charset: Charset, out: &mut Vec<u8>) {
    let unit = match charset {
        Charset::Ucs2 | Charset::Utf16 | Charset::Utf16le => 2,
        Charset::Utf32 => 4,
        _ => 1,
    };
    let mut rest = bytes;
    while !rest.is_empty() {
        let widths = (unit..=charset.bytes_per_character_max().max(unit)).step_by(unit);
        let split = widths.filter_map(|width| rest.split_at_checked(width));
        let character_split = split.into_iter().find(|(character, _)| charset.decode_into(character, out).is_ok());
        rest = match character_split {
            Some((_, after)) => after,
            None => {
                out.extend_from_slice(REPLACEMENT.as_bytes());
                rest.get(unit..).unwrap_or_default()
            }
        };
    }
}

/// Returns the type in SQL.
pub(super) fn type_text(prefix: u8, form: Form, charset: Charset) -> String {
    form.type_text(["char", "varchar", "text"], prefix, charset.bytes_per_character_max())
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;
    use arrow_array::Array;

    use super::*;
    use crate::column::{ColumnBuilder, Form, Kind, Value};

    fn varchar(name: &str) -> Kind {
        Kind::Text { prefix: 1, form: Form::Varying(40), charset: Charset::from_name(name).unwrap() }
    }

    #[test]
    fn text_of_any_charset_becomes_utf8() {
        for (charset, image) in
            [("utf8mb4", &b"\x03\xc3\xa4b"[..]), ("latin1", b"\x02\xe4b"), ("utf16", b"\x04\0\xe4\0b")]
        {
            let kind = varchar(charset);
            let mut builder = ColumnBuilder::new(&kind);
            assert_eq!(builder.append_from(&kind, &mut Cursor::new(image)).unwrap(), None);
            assert_eq!(builder.finish().as_string::<i32>().value(0), "äb", "{charset}");
        }
    }

    #[test]
    fn invalid_text_is_written_with_replacement_characters() {
        let cases: [(&str, &[u8], &str); 4] = [
            ("utf8mb4", b"a\xffb", "a\u{fffd}b"),
            ("utf8mb4", b"plain", "plain"),
            ("latin1", b"\xe4", "\u{e4}"),
            ("utf16", &[0, b'a', 0xd8, 0, 0, b'b'], "a\u{fffd}b"),
        ];
        for (charset, bytes, text) in cases {
            let mut out = b"x".to_vec();
            write_lossy(bytes, Charset::from_name(charset).unwrap(), &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), format!("x{text}"));
        }
    }

    #[test]
    fn non_ascii_bytes_are_detected_at_any_offset() {
        for length in 0..110 {
            let mut bytes = vec![b'a'; length];
            assert!(is_ascii(&bytes));
            for at in 0..length {
                bytes[at] = 0x80;
                assert!(!is_ascii(&bytes), "{at} of {length}");
                bytes[at] = 0x7f;
            }
        }
    }

    #[test]
    fn texts_of_any_length_before_any_bytes_equal_those_appended_alone() {
        let mut state = 1u64;
        let mut below = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % end
        };
        for charset in ["utf8mb4", "latin1", "utf16"] {
            let kind = varchar(charset);
            let (mut fused, mut stepwise) = (ColumnBuilder::new(&kind), ColumnBuilder::new(&kind));
            for _ in 0..5_000 {
                let length = below(80) as usize;
                let mut image = vec![length as u8];
                let highest = if below(4) == 0 { 256 } else { 128 };
                image.extend((0..length as u64 + below(50)).map(|_| below(highest) as u8));
                let (_, text) = image.split_at_checked(1).unwrap();
                let text = text.get(..length).unwrap();
                let mut cursor = Cursor::new(&image);
                let appended = fused.append_from(&kind, &mut cursor).unwrap();
                assert_eq!(cursor.remaining(), image.len() - 1 - length);
                assert_eq!(appended, stepwise.append(&kind, Value::Text(text)).unwrap());
            }
            let (fused, stepwise) = (fused.finish(), stepwise.finish());
            assert_eq!(&fused, &stepwise);
            fused.to_data().validate_full().unwrap();
        }
    }

    #[test]
    fn invalid_text_is_returned_next_to_a_null() {
        let kind = varchar("utf8mb4");
        let mut builder = ColumnBuilder::new(&kind);
        builder.append_from(&kind, &mut Cursor::new(b"\x01a")).unwrap();
        let refused = builder.append_from(&kind, &mut Cursor::new(b"\x02\xe4b")).unwrap();
        assert_eq!(refused.as_deref(), Some("0xE462"));
        let array = builder.finish();
        assert!(array.is_null(1));
        assert_eq!(array.as_string::<i32>().value(0), "a");
    }

    #[test]
    fn json_strings_keep_valid_text() {
        let shown = |bytes: &[u8], charset: &str| {
            let mut out = Vec::new();
            write_json(bytes, Charset::from_name(charset).unwrap(), &mut out);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(shown(b"a\"b", "utf8mb4"), r#""a\"b""#);
        assert_eq!(shown("ä\n€".as_bytes(), "utf8mb4"), r#""ä\n€""#);
        assert_eq!(shown(b"\xe4\\", "latin1"), r#""ä\\""#);
        assert_eq!(shown(b"a\xe4b\xc3\xa4", "utf8mb4"), "\"a\u{fffd}bä\"");
        assert_eq!(shown(b"\0a\xd8\0\0b", "utf16"), "\"a\u{fffd}b\"");
        assert_eq!(shown(b"\0a\0", "utf16"), "\"a\u{fffd}\"");
    }
}
