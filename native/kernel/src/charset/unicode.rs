//! Encodings of Unicode, which are computed instead of looked up.
//!
//! A lone surrogate is not a character. MySQL can store a lone surrogate in `ucs2`, and MariaDB also in `utf8mb3`,
//! `utf8mb4` and `utf32`. UTF-8 cannot encode it, so a text that contains one is treated as invalid here.

use super::sets::InvalidText;
use super::writer::Writer;

/// Append `bytes`, which must be valid UTF-8.
pub(super) fn decode_utf8mb4(bytes: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidText> {
    if simdutf8::basic::from_utf8(bytes).is_err() {
        let valid = std::str::from_utf8(bytes).map_or_else(|error| error.valid_up_to(), str::len);
        return Err(InvalidText { offset: valid });
    }
    out.extend_from_slice(bytes);
    Ok(())
}

/// Append `bytes`, which must be valid UTF-8 without four-byte characters.
pub(super) fn decode_utf8mb3(bytes: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidText> {
    // The compiler vectorizes this loop because the loop has no early exit. A search for the first byte of a four-byte
    // character would have one.
    let highest = bytes.iter().fold(0, |highest, &byte| byte.max(highest));
    if highest < 0xF0 {
        return decode_utf8mb4(bytes, out);
    }
    let four_byte_start = bytes.iter().position(|&byte| byte >= 0xF0).unwrap_or(bytes.len());
    let valid = std::str::from_utf8(bytes).map_or_else(|error| error.valid_up_to(), str::len);
    Err(InvalidText { offset: four_byte_start.min(valid) })
}

/// Append `bytes`, which must be ASCII.
pub(super) fn decode_ascii(bytes: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidText> {
    if !bytes.is_ascii() {
        let run = bytes.iter().take_while(|byte| byte.is_ascii()).count();
        return Err(InvalidText { offset: run });
    }
    out.extend_from_slice(bytes);
    Ok(())
}

/// Append UTF-16 `bytes`, read with `unit` one unit at a time. Without `pairs`, surrogates are invalid (`ucs2`).
pub(super) fn decode_utf16(
    bytes: &[u8],
    unit: fn([u8; 2]) -> u16,
    pairs: bool,
    out: &mut Vec<u8>,
) -> Result<(), InvalidText> {
    let mut writer = Writer::new(out);
    let mut rest = bytes;
    while let Some((&first, after)) = rest.split_first_chunk::<2>() {
        let high = u32::from(unit(first));
        let low = after.first_chunk::<2>().map_or(0, |&second| u32::from(unit(second)));
        let (character, length) = match (high, low) {
            (0xD800..=0xDBFF, 0xDC00..=0xDFFF) if pairs => (0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF), 4),
            (0xD800..=0xDFFF, _) => break,
            _ => (high, 2),
        };
        writer.push(character);
        rest = rest.get(length..).unwrap_or(&[]);
    }
    writer.finish();
    require_complete(bytes, rest)
}

/// Append `bytes` of UTF-32, big endian.
pub(super) fn decode_utf32(bytes: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidText> {
    let mut writer = Writer::new(out);
    let mut rest = bytes;
    while let Some((&first, after)) = rest.split_first_chunk::<4>() {
        let Some(character) = char::from_u32(u32::from_be_bytes(first)) else {
            break;
        };
        writer.push(u32::from(character));
        rest = after;
    }
    writer.finish();
    require_complete(bytes, rest)
}

/// Fail if `rest` is not empty: no valid character starts there.
fn require_complete(bytes: &[u8], rest: &[u8]) -> Result<(), InvalidText> {
    if rest.is_empty() {
        Ok(())
    } else {
        Err(InvalidText { offset: bytes.len() - rest.len() })
    }
}
