//! Helpers of the JSON dialects: precomputed column names, and objects of name-value pairs.

use crate::column::quoted;

/// Returns the quoted name with a comma before and a colon after it, computed once for a table.
pub(super) fn key(name: &str) -> Box<[u8]> {
    let mut key = vec![b','];
    quoted::write(name.as_bytes(), &mut key);
    key.push(b':');
    key.into()
}

/// Turns the pairs after `start`, each with a leading comma, into an object.
#[inline]
pub(super) fn close(start: usize, out: &mut Vec<u8>) {
    match out.get_mut(start) {
        Some(first) => *first = b'{',
        None => out.push(b'{'),
    }
    out.push(b'}');
}

/// Writes the text in quotes, or null if it is empty.
pub(super) fn text_or_null(text: &str, out: &mut Vec<u8>) {
    match text {
        "" => out.extend_from_slice(b"null"),
        text => quoted::write(text.as_bytes(), out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_become_an_object() {
        let mut out = b"x".to_vec();
        close(1, &mut out);
        let start = out.len();
        out.extend_from_slice(&key("a\"b"));
        out.push(b'1');
        out.extend_from_slice(&key("c"));
        out.push(b'2');
        close(start, &mut out);
        assert_eq!(out, br#"x{}{"a\"b":1,"c":2}"#);
    }
}
