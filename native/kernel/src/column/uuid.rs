//! MariaDB's UUID: sixteen bytes in the order of the text; row images omit trailing zero bytes.

use super::binary::read_fixed;
use super::hex;
use super::store::{Appended, Runs};
use crate::cursor::Cursor;
use crate::error::Result;

#[inline(always)]
pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<[u8; 16]> {
    read_fixed(cursor)
}

pub(super) fn append(bytes: &[u8; 16], runs: &mut Runs<u8>) -> Appended {
    write_text(bytes, &mut runs.items);
    runs.close()?;
    Ok(None)
}

/// Writes the five groups of lower-case digits.
pub(crate) fn write_text(bytes: &[u8; 16], out: &mut Vec<u8>) {
    for (slot, byte) in bytes.iter().enumerate() {
        if matches!(slot, 4 | 6 | 8 | 10) {
            out.push(b'-');
        }
        hex::write_lower(&[*byte], out);
    }
}

/// Parses the text; None if it is not a UUID.
pub(super) fn parse(text: &str) -> Option<[u8; 16]> {
    let mut digits = text.bytes().filter(|byte| *byte != b'-');
    let mut bytes = [0; 16];
    for byte in &mut bytes {
        let nibble = |digit: Option<u8>| char::from(digit?).to_digit(16);
        let pair = nibble(digits.next())? << 4 | nibble(digits.next())?;
        *byte = u8::try_from(pair).ok()?;
    }
    digits.next().is_none().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_shows_in_five_groups() {
        let image = b"\x0f\x01\x23\x45\x67\x89\xab\x4d\xef\x81\x23\x45\x67\x89\xab\xcd";
        let value = read(&mut Cursor::new(image)).unwrap();
        let mut out = Vec::new();
        write_text(&value, &mut out);
        assert_eq!(out, b"01234567-89ab-4def-8123-456789abcd00");
        assert_eq!(parse("01234567-89AB-4def-8123-456789abcd00"), Some(value));
        assert_eq!(["", "0", "01234567-89ab-4def-8123-456789abcd0g"].map(parse), [None; 3]);
    }
}
