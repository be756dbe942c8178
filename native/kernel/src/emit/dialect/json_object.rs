//! What the JSON dialects share: names of columns as they stand in front of values, and objects of such pairs.

use crate::column::quoted;

/// The name with the comma before and the colon behind it, made once for a table.
pub(super) fn key(name: &str) -> Box<[u8]> {
    let mut key = vec![b','];
    quoted::write(name.as_bytes(), &mut key);
    key.push(b':');
    key.into()
}

/// Makes an object of the pairs written behind `start`, each of which began with a comma.
#[inline]
pub(super) fn close(start: usize, out: &mut Vec<u8>) {
    match out.get_mut(start) {
        Some(first) => *first = b'{',
        None => out.push(b'{'),
    }
    out.push(b'}');
}

/// Adds the text in quotes, or null where it is empty.
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
