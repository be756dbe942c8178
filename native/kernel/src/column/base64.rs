//! Base64 (RFC 4648) with padding and without line breaks.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

#[inline(always)]
fn digit(bits: u32) -> u8 {
    DIGITS.get(usize::try_from(bits & 0x3f).unwrap_or(0)).copied().unwrap_or(b'=')
}

#[inline(always)]
fn digits(bits: u32) -> [u8; 4] {
    [digit(bits >> 18), digit(bits >> 12), digit(bits >> 6), digit(bits)]
}

/// Writes the base64 of the bytes.
pub(crate) fn write(data: &[u8], out: &mut Vec<u8>) {
    out.reserve(data.len().div_ceil(3) * 4);
    let mut groups = data.chunks_exact(3);
    for group in groups.by_ref() {
        if let [a, b, c] = *group {
            out.extend_from_slice(&digits(u32::from_be_bytes([0, a, b, c])));
        }
    }
    match *groups.remainder() {
        [a] => {
            let [first, second, ..] = digits(u32::from_be_bytes([0, a, 0, 0]));
            out.extend_from_slice(&[first, second, b'=', b'=']);
        }
        [a, b] => {
            let [first, second, third, _] = digits(u32::from_be_bytes([0, a, b, 0]));
            out.extend_from_slice(&[first, second, third, b'=']);
        }
        _ => {}
    }
}

/// Writes the base64 of the bytes as a JSON string.
pub(crate) fn write_quoted(data: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    write(data, out);
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_rfc_are_encoded() {
        let cases: [(&[u8], &str); 8] = [
            (b"", ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foob", "Zm9vYg=="),
            (b"fooba", "Zm9vYmE="),
            (b"foobar", "Zm9vYmFy"),
            (b"\xff\xfe\xfb", "//77"),
        ];
        for (data, text) in cases {
            let mut out = Vec::new();
            write(data, &mut out);
            assert_eq!(out, text.as_bytes());
        }
    }
}
