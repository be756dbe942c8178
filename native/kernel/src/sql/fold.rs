//! Texts that some collation takes for the same fold to the same bytes.
//!
//! A collation is not known here, and they differ: to one `é` is `e`, to others `w` is `v`, `aa` is `å`, all emoji are
//! one, or trailing blanks are nothing. So this folds by all of them at once. Texts that differ may fold to the same
//! bytes, which costs those who group by them a little work side by side, and never a wrong order.

use unicode_normalization::UnicodeNormalization;

/// Adds what a text folds to; false where it may be equal with any other text.
pub(super) fn fold(text: &str, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    if text.is_ascii() {
        for byte in text.bytes() {
            ascii(byte, start, out);
        }
    } else {
        if text.chars().any(is_doubtful) {
            return false;
        }
        for letter in text.nfkd().flat_map(char::to_lowercase) {
            if !any(letter, start, out) {
                return false;
            }
        }
    }
    while out.len() > start && out.last() == Some(&b' ') {
        out.pop();
    }
    true
}

/// To old collations all letters of the upper planes are one, whatever they look like; to others radicals are one
/// another, and `⅍` is `℁`.
fn is_doubtful(letter: char) -> bool {
    let radical = ('\u{2e80}'..='\u{2fdf}').contains(&letter);
    radical || letter == '⅍' || (letter >= '\u{10000}' && std::iter::once(letter).nfkd().ne([letter]))
}

/// Letters that are one letter, or nothing behind another: Danish `aa` and `å`, German `ae` and `ä`, Swedish `w` and `v`.
#[inline]
fn ascii(byte: u8, start: usize, out: &mut Vec<u8>) {
    let byte = match byte.to_ascii_lowercase() {
        // Control characters are not seen.
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

/// As `ascii`, of any letter whose parts were taken asunder.
fn any(letter: char, start: usize, out: &mut Vec<u8>) -> bool {
    let plain = match letter {
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
        _ if !plain.is_empty() => plain.chars().for_each(|letter| push(letter, start, out)),
        _ if letter.is_ascii() => push(letter, start, out),
        // Greek, Cyrillic, Han and Hangul letters, each of which is its own.
        'α'..='ω' | 'а'..='я' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{1100}'..='\u{11ff}' => {
            push(letter, start, out);
        }
        _ if letter.is_alphanumeric() => return false,
        // Marks, signs and what is not seen count in some collations only.
        _ => {}
    }
    true
}

fn push(letter: char, start: usize, out: &mut Vec<u8>) {
    if letter.is_ascii() {
        letter.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| ascii(byte, start, out));
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
    fn what_some_collation_takes_for_the_same_folds_to_the_same() {
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
        for (one, other) in pairs {
            assert_eq!(folded(one), folded(other), "{one} {other}");
            assert!(folded(one).is_some());
        }
    }

    #[test]
    fn other_keys_stay_apart() {
        for (one, other) in [("1", "2"), ("a", "b"), ("水", "火"), ("да", "нет"), ("550e8400", "550f8400")] {
            assert_ne!(folded(one), folded(other));
        }
    }

    #[test]
    fn a_script_that_is_not_known_here_is_in_doubt() {
        assert_eq!(folded("カ"), None);
        assert_eq!(folded("٣"), None);
    }
}
