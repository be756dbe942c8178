//! Bytes as hexadecimal digits.

const DIGITS: &[u8; 16] = b"0123456789abcdef";
const DIGITS_UPPER: &[u8; 16] = b"0123456789ABCDEF";

fn digit(table: &[u8; 16], nibble: u8) -> u8 {
    table.get(usize::from(nibble & 0xf)).copied().unwrap_or(b'?')
}

/// Writes two lower-case digits for each byte.
pub(crate) fn write_lower(bytes: &[u8], out: &mut Vec<u8>) {
    for byte in bytes {
        out.extend([digit(DIGITS, byte >> 4), digit(DIGITS, *byte)]);
    }
}

/// Writes the bytes as SQL's hexadecimal literal, `0xE4F6`, like the client with `--binary-as-hex`.
pub(crate) fn write_literal(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(b"0x");
    for byte in bytes {
        out.extend([digit(DIGITS_UPPER, byte >> 4), digit(DIGITS_UPPER, *byte)]);
    }
}

/// Parses a hexadecimal literal; None for other text.
pub(super) fn read_literal(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix("0x")?.as_bytes();
    let nibble = |byte: u8| char::from(byte).to_digit(16);
    let byte = |pair: &[u8]| match *pair {
        [high, low] => u8::try_from(nibble(high)? << 4 | nibble(low)?).ok(),
        _ => None,
    };
    digits.chunks(2).map(byte).collect()
}

/// Returns the bytes as SQL's hexadecimal literal.
#[cold]
pub(super) fn literal(bytes: &[u8]) -> String {
    let mut out = Vec::with_capacity(2 + bytes.len() * 2);
    write_literal(bytes, &mut out);
    String::from_utf8_lossy(&out).into_owned()
}
