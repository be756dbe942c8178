//! Derives bytes that occur in every row image with a given key value.

use crate::charset::Charset;
use crate::column::Kind;

/// The error for a text that is not a value of the column.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoValue;

/// Returns bytes that occur in every image whose column has the value; None if no such bytes exist.
pub(super) fn key_bytes(kind: &Kind, text: &str, mariadb: bool) -> Result<Option<Vec<u8>>, NoValue> {
    match kind {
        Kind::Integer { bytes, unsigned } => integer_bytes(text, *bytes, *unsigned).map(Some),
        Kind::Text { charset: Charset::Utf8mb4 | Charset::Utf8mb3, .. } => Ok(Some(text.into())),
        Kind::Text { charset: Charset::Ascii | Charset::Latin1, .. } if text.is_ascii() => Ok(Some(text.into())),
        // MariaDB logs UUID, INET4, INET6 and VECTOR as bytes, and shows them as text.
        Kind::Binary { .. } if !mariadb => Ok(binary_bytes(text)),
        _ => Ok(None),
    }
}

fn integer_bytes(text: &str, width: u8, unsigned: bool) -> Result<Vec<u8>, NoValue> {
    let value: i128 = text.parse().map_err(|_| NoValue)?;
    let bound = 1_i128 << (8 * u32::from(width) - u32::from(!unsigned));
    if text.starts_with('+') || value >= bound || value < if unsigned { 0 } else { -bound } {
        return Err(NoValue);
    }
    let mut bytes = value.to_le_bytes().to_vec();
    bytes.truncate(usize::from(width));
    Ok(bytes)
}

/// Returns bytes given as text or in hex, without trailing zeros. The server may have cut off such zeros.
fn binary_bytes(text: &str) -> Option<Vec<u8>> {
    let mut bytes = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => from_hex(digits.as_bytes())?,
        None => text.into(),
    };
    bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
    Some(bytes)
}

fn from_hex(digits: &[u8]) -> Option<Vec<u8>> {
    let nibble = |digit: u8| char::from(digit).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        [high, low] => u8::try_from(nibble(*high)? << 4 | nibble(*low)?).ok(),
        _ => None,
    };
    digits.chunks(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::column::Form;

    #[test]
    fn integers_are_searched_in_the_width_of_their_column() {
        let bytes = |text, bytes, unsigned| key_bytes(&Kind::Integer { bytes, unsigned }, text, false);
        assert_eq!(bytes("7", 4, false), Ok(Some(vec![7, 0, 0, 0])));
        assert_eq!(bytes("-2", 3, false), Ok(Some(vec![254, 255, 255])));
        assert_eq!(bytes("255", 1, true), Ok(Some(vec![255])));
        assert_eq!(bytes("18446744073709551615", 8, true), Ok(Some(vec![255; 8])));
        assert_eq!(bytes("-9223372036854775808", 8, false), Ok(Some(vec![0, 0, 0, 0, 0, 0, 0, 128])));
        for (text, width, unsigned) in
            [("128", 1, false), ("-129", 1, false), ("256", 1, true), ("-1", 8, true), ("+7", 4, false), ("", 4, false)]
        {
            assert_eq!(bytes(text, width, unsigned), Err(NoValue), "{text}");
        }
        assert_eq!(bytes("seven", 4, false), Err(NoValue));
    }

    #[test]
    fn texts_are_searched_only_in_character_sets_that_log_them_as_given() {
        let text = |charset, text| key_bytes(&Kind::Text { prefix: 1, form: Form::Varying(9), charset }, text, true);
        assert_eq!(text(Charset::Utf8mb4, "größe"), Ok(Some("größe".into())));
        assert_eq!(text(Charset::Latin1, "size"), Ok(Some("size".into())));
        assert_eq!(text(Charset::Latin1, "größe"), Ok(None));
        assert_eq!(text(Charset::Swe7, "a@b"), Ok(None));
        assert_eq!(text(Charset::Utf16, "size"), Ok(None));
    }

    #[test]
    fn bytes_are_searched_without_the_zeros_that_a_server_cuts_off() {
        let binary = Kind::Binary { prefix: 1, form: Form::Fixed(4) };
        assert_eq!(key_bytes(&binary, "0x41fF0000", false), Ok(Some(vec![0x41, 0xff])));
        assert_eq!(key_bytes(&binary, "ab", false), Ok(Some(b"ab".to_vec())));
        assert_eq!(key_bytes(&binary, "0x4", false), Ok(None));
        assert_eq!(key_bytes(&binary, "0x41", true), Ok(None));
    }
}
