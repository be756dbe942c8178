//! Folds texts so that texts that are equal under any collation become the same bytes.
//!
//! The caller does not know the collation, and collations differ: in some, `é` equals `e`, `w` equals `v`, `aa` equals
//! `å`, all emoji are equal, or trailing blanks are ignored. The folding combines all of these rules. Different texts
//! may therefore fold to the same bytes, which costs some parallelism when grouping but never breaks the order.

use unicode_normalization::UnicodeNormalization;

/// Appends the folded text; false if the text may equal any other text.
pub(super) fn fold(text: &str, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    if text.is_ascii() {
        for byte in text.bytes() {
            fold_ascii(byte, start, out);
        }
    } else {
        if text.chars().any(is_ambiguous) {
            return false;
        }
        for letter in text.nfkd().flat_map(char::to_lowercase) {
            if !fold_letter(letter, start, out) {
                return false;
            }
        }
    }
    while out.len() > start && out.last() == Some(&b' ') {
        out.pop();
    }
    true
}

/// Old collations treat all letters of the supplementary planes as equal. Other collations treat all radicals as equal,
/// or treat `⅍` and `℁` as equal.
fn is_ambiguous(letter: char) -> bool {
    let radical = ('\u{2e80}'..='\u{2fdf}').contains(&letter);
    radical || letter == '⅍' || (letter >= '\u{10000}' && std::iter::once(letter).nfkd().ne([letter]))
}

/// Folds letters that some collation treats as equal to other letters, or as part of the previous letter: Danish `aa`
/// and `å`, German `ae` and `ä`, Swedish `w` and `v`.
#[inline]
fn fold_ascii(byte: u8, start: usize, out: &mut Vec<u8>) {
    let byte = match byte.to_ascii_lowercase() {
        // Control characters are ignored.
        0..=31 | 127 => return,
        b'j' | b'y' | b'u' | b'v' | b'w' => b'i',
        b'q' => b'k',
        b'e' if out.len() > start && matches!(out.last(), Some(b'a' | b'o' | b'i' | b'e')) => return,
        byte => byte,
    };
    let doubled = matches!(byte, b'a' | b's' | b'i' | b'e') && out.len() > start && out.last() == Some(&byte);
    if !doubled {
        out.push(byte);
    }
}

/// Folds any letter after decomposition, like `fold_ascii`.
fn fold_letter(letter: char, start: usize, out: &mut Vec<u8>) -> bool {
    let ascii_form = match letter {
        'ß' => "s",
        'æ' => "a",
        'œ' | 'ø' => "o",
        'đ' | 'ð' => "d",
        'ł' => "l",
        'þ' => "th",
        'ħ' => "h",
        'ŧ' => "t",
        'ı' => "i",
        'ĸ' => "k",
        'ŋ' => "n",
        'ς' => "σ",
        _ => "",
    };
    match letter {
        _ if !ascii_form.is_empty() => ascii_form.chars().for_each(|letter| push(letter, start, out)),
        _ if letter.is_ascii() => push(letter, start, out),
        // Greek, Cyrillic, Han and Hangul letters equal only themselves.
        'α'..='ω' | 'а'..='я' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{1100}'..='\u{11ff}' => {
            push(letter, start, out);
        }
        _ if letter.is_alphanumeric() => return false,
        // Marks, punctuation and invisible characters are significant only in some collations.
        _ => {}
    }
    true
}

fn push(letter: char, start: usize, out: &mut Vec<u8>) {
    if letter.is_ascii() {
        letter.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| fold_ascii(byte, start, out));
    } else {
        out.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(text: &str) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        fold(text, &mut out).then_some(out)
    }

    #[test]
    fn texts_equal_under_some_collation_fold_alike() {
        let pairs = [
            ("abc", "ABC "),
            ("café", "CAFE"),
            ("straße", "STRASSE"),
            ("Ångström", "AANGSTROEM"),
            ("vw", "WV"),
            ("Æ", "ae"),
            ("ﬁn", "FIN"),
            ("x\u{1}y", "xY"),
            ("a\u{301}", "á"),
            ("🚰", "💧"),
            ("水 ", "水"),
            ("ΟΔΟΣ", "οδος"),
        ];
        for (left, right) in pairs {
            assert_eq!(folded(left), folded(right), "{left} {right}");
            assert!(folded(left).is_some());
        }
    }

    #[test]
    fn different_keys_fold_differently() {
        for (left, right) in [("1", "2"), ("a", "b"), ("水", "火"), ("да", "нет"), ("550e8400", "550f8400")] {
            assert_ne!(folded(left), folded(right));
        }
    }

    #[test]
    fn unknown_scripts_are_ambiguous() {
        assert_eq!(folded("カ"), None);
        assert_eq!(folded("٣"), None);
    }
}
