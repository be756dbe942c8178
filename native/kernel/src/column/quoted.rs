//! Writes text as a JSON string: quotes, backslashes and control characters are escaped, everything else is copied.

use crate::error::Result;

#[inline(always)]
fn needs_escape(byte: u8) -> bool {
    byte < 0x20 || byte == b'"' || byte == b'\\'
}

/// Flags for whether a string needs UTF-8 validation and whether it needs escapes.
#[derive(Clone, Copy)]
pub(super) struct Look {
    pub(super) not_ascii: u64,
    escaped: u64,
}

impl Look {
    /// Reads eight bytes at a time. The last eight may overlap the previous eight; shorter strings are padded with
    /// spaces.
    #[inline(always)]
    pub(super) fn at(text: &[u8]) -> Look {
        let Some(last) = text.last_chunk::<8>() else {
            return Look::word(short_word(text) | SPACES << (text.len() * 8));
        };
        let words = text.chunks_exact(8).filter_map(<[u8]>::first_chunk::<8>);
        words.fold(Look::word(u64::from_le_bytes(*last)), |look, word| {
            let next = Look::word(u64::from_le_bytes(*word));
            Look { not_ascii: look.not_ascii | next.not_ascii, escaped: look.escaped | next.escaped }
        })
    }

    /// Inspects the eight bytes of a word at once. Subtracting a value from every byte sets the high bit of each byte
    /// that is less than the value. A byte equals a character if their XOR is less than 1.
    #[inline(always)]
    fn word(word: u64) -> Look {
        const EACH: u64 = 0x0101_0101_0101_0101;
        const HIGH: u64 = EACH << 7;
        let below = |word: u64, byte: u64| word.wrapping_sub(EACH * byte) & !word & HIGH;
        let quotes = below(word ^ (EACH * u64::from(b'"')), 1);
        let backslashes = below(word ^ (EACH * u64::from(b'\\')), 1);
        Look { not_ascii: word & HIGH, escaped: below(word, 0x20) | quotes | backslashes }
    }
}

const SPACES: u64 = 0x2020_2020_2020_2020;

/// Loads a string of fewer than eight bytes into the low bytes of a word. The other bytes are 0.
#[inline(always)]
fn short_word(text: &[u8]) -> u64 {
    let end = text.len() * 8;
    if let (Some(first), Some(last)) = (text.first_chunk::<4>(), text.last_chunk::<4>()) {
        return u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << (end - 32);
    }
    let (Some(first), Some(last)) = (text.first(), text.last()) else { return 0 };
    let middle = text.get(text.len() / 2).unwrap_or(last);
    u64::from(*first) | u64::from(*middle) << (text.len() / 2 * 8) | u64::from(*last) << (end - 8)
}

/// The longest string that fits into a word with its quotes.
const SHORT_BYTES_MAX: usize = 6;

/// Writes a short string in quotes, as one word. Returns false if the string is longer, or needs UTF-8 validation or
/// escapes; then nothing is written.
#[inline(always)]
pub(super) fn write_short(text: &[u8], out: &mut Vec<u8>) -> bool {
    const QUOTE: u64 = b'"' as u64;
    if text.len() > SHORT_BYTES_MAX {
        return false;
    }
    let (word, end) = (short_word(text), text.len() * 8);
    let look = Look::word(word | SPACES << end);
    if look.not_ascii | look.escaped != 0 {
        return false;
    }
    let quoted = QUOTE | word << 8 | QUOTE << (end + 8);
    let length = out.len() + text.len() + 2;
    out.extend_from_slice(&quoted.to_le_bytes());
    out.truncate(length);
    true
}

/// Writes UTF-8 text in quotes.
#[inline]
pub(crate) fn write(text: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    write_looked(Look::at(text), text, out);
    out.push(b'"');
}

/// Writes the text between the quotes, for text that was already inspected.
#[inline]
pub(super) fn write_looked(look: Look, text: &[u8], out: &mut Vec<u8>) {
    if look.escaped == 0 {
        out.extend_from_slice(text);
    } else {
        write_escaped(text, out);
    }
}

/// Escapes the text in `out` after `start`.
#[inline]
pub(crate) fn escape_from(start: usize, out: &mut Vec<u8>) {
    let written = out.get(start..).unwrap_or_default();
    if Look::at(written).escaped != 0 {
        let text = written.to_vec();
        out.truncate(start);
        write_escaped(&text, out);
    }
}

/// Writes the output of `write` in quotes, escaped.
#[inline]
pub(crate) fn within(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> Result<()>) -> Result<()> {
    out.push(b'"');
    let start = out.len();
    write(out)?;
    escape_from(start, out);
    out.push(b'"');
    Ok(())
}

/// Writes the output of `write` in quotes. The output must not need escapes.
#[inline]
pub(crate) fn plain(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    out.push(b'"');
    write(out);
    out.push(b'"');
}

fn write_escaped(text: &[u8], out: &mut Vec<u8>) {
    let mut rest = text;
    while let Some(plain) = rest.iter().position(|byte| needs_escape(*byte)) {
        let (before, after) = rest.split_at_checked(plain).unwrap_or((rest, &[]));
        out.extend_from_slice(before);
        let Some((byte, after)) = after.split_first() else { break };
        write_escape(*byte, out);
        rest = after;
    }
    out.extend_from_slice(rest);
}

fn write_escape(byte: u8, out: &mut Vec<u8>) {
    match byte {
        b'"' => out.extend_from_slice(b"\\\""),
        b'\\' => out.extend_from_slice(b"\\\\"),
        0x08 => out.extend_from_slice(b"\\b"),
        0x0c => out.extend_from_slice(b"\\f"),
        b'\n' => out.extend_from_slice(b"\\n"),
        b'\r' => out.extend_from_slice(b"\\r"),
        b'\t' => out.extend_from_slice(b"\\t"),
        control => out.extend_from_slice(format!("\\u{control:04x}").as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_seen_wherever_it_stands() {
        for length in 0..40 {
            for at in 0..length {
                for byte in 0..=255u8 {
                    let mut text = vec![b'a'; length];
                    text[at] = byte;
                    let look = Look::at(&text);
                    assert_eq!(look.not_ascii != 0, !byte.is_ascii(), "{byte} at {at} of {length}");
                    assert_eq!(look.escaped != 0, needs_escape(byte), "{byte} at {at} of {length}");
                }
            }
        }
        assert_eq!(Look::at(b"").escaped, 0);
    }

    #[test]
    fn short_strings_equal_those_written_by_the_general_path() {
        let mut state = 1u64;
        let mut written = 0;
        for round in 0..100_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let mask = if round % 8 == 0 { u64::MAX } else { 0x7f7f_7f7f_7f7f_7f7f };
            let bytes = (state & mask).to_le_bytes();
            let text = bytes.get(..round % 9).unwrap();
            let (mut short, mut general) = (b"kept".to_vec(), b"kept".to_vec());
            let look = Look::at(text);
            assert_eq!(look.not_ascii != 0, !text.is_ascii());
            let is_plain = text.iter().all(|byte| byte.is_ascii() && !needs_escape(*byte));
            assert_eq!(write_short(text, &mut short), is_plain && text.len() <= SHORT_BYTES_MAX);
            if short.len() > 4 {
                write(text, &mut general);
                written += 1;
            }
            assert_eq!(short, general);
        }
        assert!(written > 10_000, "{written}");
    }

    #[test]
    fn quotes_backslashes_and_control_characters_are_escaped() {
        let mut out = Vec::new();
        write("a\"b\\c\n\u{1}\u{7f}é".as_bytes(), &mut out);
        let expected = "\"a\\\"b\\\\c\\n\\u0001\u{7f}é\"";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let mut out = b"kept\"".to_vec();
        let start = out.len();
        out.extend_from_slice(b"say \"yes\"");
        escape_from(start, &mut out);
        assert_eq!(out, b"kept\"say \\\"yes\\\"");
    }
}
