//! Binary documents: valid, randomly changed and crafted.

use super::{apply_partial, write_text};
use crate::error::{ErrorKind, Result};

fn text(document: &[u8]) -> Result<String> {
    let mut out = Vec::new();
    write_text(document, &mut out).map(|()| String::from_utf8(out).unwrap())
}

/// A small array of inlined 16-bit integers.
fn numbers(values: &[i16]) -> Vec<u8> {
    let entries: Vec<(u8, Vec<u8>)> = values.iter().map(|value| (0x05, value.to_le_bytes().to_vec())).collect();
    container(0x02, &[], &entries)
}

/// A small container: the keys of an object, then the type and bytes of each value. Up to two bytes are inlined.
fn container(code: u8, keys: &[&str], values: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut offset = 4 + keys.len() * 4 + values.len() * 3;
    let (mut key_entries, mut value_entries, mut data) = (Vec::new(), Vec::new(), Vec::new());
    let word = |number: usize| u16::try_from(number).unwrap().to_le_bytes();
    for key in keys {
        key_entries.extend([word(offset), word(key.len())].concat());
        data.extend_from_slice(key.as_bytes());
        offset += key.len();
    }
    for (code, value) in values {
        value_entries.push(*code);
        if matches!(code, 0x04..=0x06) {
            value_entries.extend([value.clone(), vec![0; 2]].concat().get(..2).unwrap());
        } else {
            value_entries.extend(word(offset));
            data.extend_from_slice(value);
            offset += value.len();
        }
    }
    [vec![code], word(values.len()).to_vec(), word(offset).to_vec(), key_entries, value_entries, data].concat()
}

/// Splits a document into its type byte and its value.
fn value(document: &[u8]) -> (u8, Vec<u8>) {
    let (code, bytes) = document.split_first().unwrap();
    (*code, bytes.to_vec())
}

fn string(text: &str) -> (u8, Vec<u8>) {
    (0x0c, [vec![u8::try_from(text.len()).unwrap()], text.as_bytes().to_vec()].concat())
}

/// `{"a": 1, "b": [1, 2], "cc": "x"}`
fn sample() -> Vec<u8> {
    container(0x00, &["a", "b", "cc"], &[(0x05, vec![1, 0]), value(&numbers(&[1, 2])), string("x")])
}

fn change(operation: u8, path: &str, value: Option<&[u8]>) -> Vec<u8> {
    let sized = |bytes: &[u8]| [vec![u8::try_from(bytes.len()).unwrap()], bytes.to_vec()].concat();
    [vec![operation], sized(path.as_bytes()), value.map(sized).unwrap_or_default()].concat()
}

#[test]
fn scalars_show_as_the_server_prints_them() {
    let cases: [(&[u8], &str); 9] = [
        (b"", "null"),
        (b"\x04\x00", "null"),
        (b"\x04\x01", "true"),
        (b"\x05\xff\xff", "-1"),
        (b"\x06\xff\xff", "65535"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff", "18446744073709551615"),
        (b"\x0b\0\0\0\0\0\0\xf0\x3f", "1.0"),
        (b"\x0c\x07a\"\\\x01\n\x7f\x08", "\"a\\\"\\\\\\u0001\\n\x7f\\b\""),
        (b"\x0f\xf6\x04\x02\x01\x81\x05", "1.5"),
    ];
    for (document, expected) in cases {
        assert_eq!(text(document).unwrap(), expected);
    }
}

/// An opaque DECIMAL with all digits 9: the bytes of its groups.
fn nines(precision: u8, scale: u8, groups: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x0f, 0xf6];
    let mut value = vec![precision, scale];
    for digits in groups {
        let group = 10_u32.pow(u32::from(*digits)) - 1;
        let width = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4][usize::from(*digits)];
        value.extend(&group.to_be_bytes()[4 - width..]);
    }
    value[2] ^= 0x80;
    bytes.push(value.len() as u8);
    bytes.extend(value);
    bytes
}

#[test]
fn a_decimal_has_as_many_digits_as_nine_groups_hold() {
    assert_eq!(text(&nines(81, 0, &[9; 9])).unwrap(), "9".repeat(81));
    let groups = [9, 9, 9, 9, 9, 9, 9, 9, 1];
    assert_eq!(text(&nines(73, 1, &groups)).unwrap(), format!("{}.9", "9".repeat(72)));
    assert_eq!(
        text(&nines(66, 30, &[9, 9, 9, 9, 9, 9, 9, 3])).unwrap(),
        format!("{0}.{1}", "9".repeat(36), "9".repeat(30))
    );
    for document in [nines(82, 0, &[1, 9, 9, 9, 9, 9, 9, 9, 9, 9]), nines(74, 2, &[1, 9, 9, 9, 9, 9, 9, 9, 9, 2])] {
        assert_eq!(text(&document).unwrap_err().kind(), ErrorKind::ValueMalformed);
    }
}

#[test]
fn a_decimal_has_the_bytes_of_its_digits_and_no_more() {
    let fitting = nines(10, 2, &[8, 2]);
    assert_eq!(text(&fitting).unwrap(), "99999999.99");
    for length in [fitting[2] - 1, fitting[2] + 1] {
        let mut document = fitting.clone();
        document.push(0);
        document[2] = length;
        assert_eq!(text(&document).unwrap_err().kind(), ErrorKind::ValueMalformed, "{length}");
    }
}

#[test]
fn containers_show_with_spaces_in_their_stored_order() {
    assert_eq!(text(&sample()).unwrap(), r#"{"a": 1, "b": [1, 2], "cc": "x"}"#);
    assert_eq!(text(&container(0x02, &[], &[])).unwrap(), "[]");
    assert_eq!(text(&container(0x00, &[], &[])).unwrap(), "{}");
}

#[test]
fn bytes_that_json_lacks_show_as_base64_in_lines() {
    let mut document = vec![0x0f, 15, 58];
    document.extend([0xab; 58]);
    let line = "q6ur".repeat(19);
    assert_eq!(text(&document).unwrap(), format!("\"base64:type15:{line}\\nqw==\""));
}

#[test]
fn changes_apply_in_their_order() {
    let seven = b"\x05\x07\x00".as_slice();
    let diffs = [
        change(0, "$.a", Some(&numbers(&[9]))),
        change(1, "$.b[1]", Some(seven)),
        change(1, "$.bb", Some(seven)),
        change(1, "$.\"c d\"", Some(b"\x04\x00")),
        change(2, "$.cc", None),
        change(0, "$.a[0]", Some(seven)),
        change(1, "$.b[99]", Some(seven)),
        change(2, "$.b[0]", None),
    ]
    .concat();
    let after = apply_partial(&sample(), &diffs).unwrap();
    assert_eq!(after, r#"{"a": [7], "b": [7, 2, 7], "bb": 7, "c d": null}"#);
    assert_eq!(apply_partial(&sample(), b"").unwrap(), text(&sample()).unwrap());
}

#[test]
fn changes_that_lead_nowhere_are_malformed() {
    let seven = Some(b"\x05\x07\x00".as_slice());
    let diffs = [
        change(0, "$.zz", seven),
        change(0, "$.a.b", seven),
        change(1, "$.a", seven),
        change(2, "$.b[5]", None),
        change(2, "$", None),
        change(0, "a", seven),
        change(0, "$.\"open", seven),
        change(0, "$[x]", seven),
        change(9, "$.a", seven),
        vec![0, 200],
    ];
    for diff in diffs {
        assert!(apply_partial(&sample(), &diff).is_err(), "{diff:?}");
    }
}

#[test]
fn overlapping_entries_do_not_multiply() {
    // Every level has 100 entries that all point at the next level, so the text would repeat the innermost value 100^30
    // times.
    let mut document = numbers(&[1; 100]);
    for _ in 0..30 {
        let (code, inner) = value(&document);
        let offset = 4 + 100 * 3;
        let size = u16::try_from(offset + inner.len()).unwrap();
        let mut outer = vec![0x02];
        outer.extend(100u16.to_le_bytes());
        outer.extend(size.to_le_bytes());
        for _ in 0..100 {
            outer.push(code);
            outer.extend(u16::try_from(offset).unwrap().to_le_bytes());
        }
        outer.extend(inner);
        document = outer;
    }
    assert_eq!(text(&document).unwrap_err().kind(), ErrorKind::ValueMalformed);
}

#[test]
fn a_container_inside_itself_and_deep_nesting_end() {
    // An entry that points back to offset 0, and one that points to its own entries.
    for offset in [0, 4] {
        assert!(text(&[0x02, 1, 0, 7, 0, 0x02, offset, 0]).is_err());
    }
    let mut document = numbers(&[]);
    for _ in 0..99 {
        document = container(0x02, &[], &[value(&document)]);
    }
    assert_eq!(text(&document).unwrap(), format!("{}{}", "[".repeat(100), "]".repeat(100)));
    let deeper = container(0x02, &[], &[value(&document)]);
    assert_eq!(text(&deeper).unwrap_err().kind(), ErrorKind::LimitExceeded);
}

#[test]
fn broken_documents_are_errors() {
    let documents: [&[u8]; 9] = [
        b"\x03",
        b"\x0d\0\0",
        b"\x04\x03",
        b"\x0c\x05ab",
        b"\x0c\xff\xff\xff\xff\xffa",
        b"\x0c\x01\xff",
        b"\x02\xff\xff\x04\x00",
        b"\x02\x00\x00\xff\xff",
        b"\x0b\0\0\0\0\0\0\xf0\x7f",
    ];
    for document in documents {
        assert!(text(document).is_err(), "{document:?}");
    }
}
