//! Known texts of each character set, as MySQL 9 stores and shows them, and properties that hold for all bytes.

use super::{tables, Charset, InvalidText};

/// A character set, bytes in it, and the text that a MySQL client shows for them.
const KNOWN: &[(Charset, &[u8], &str)] = &[
    (Charset::Armscii8, b"\xB4\xB3\xF1", "Բար"),
    (Charset::Ascii, b"plain\0", "plain\0"),
    (Charset::Big5, b"\xB8\xEA\xAE\xC6\xAE\x77\x20\x41\xF9\xD6", "資料庫 A碁"),
    (Charset::Binary, b"na\xC3\xAFve", "naïve"),
    (Charset::Cp1250, b"\x8E\x6C\x75\x9D\x6F\x75\xE8\x6B\xFD", "Žluťoučký"),
    (Charset::Cp1251, b"\xCF\xF0\xE8\xE2\xE5\xF2", "Привет"),
    (Charset::Cp1256, b"\xD3\xE1\xC7\xE3", "سلام"),
    (Charset::Cp1257, b"\xC0\xFE\x75\x6F\x6C\x61\x73", "Ąžuolas"),
    (Charset::Cp850, b"\x47\x72\x94\xE1\x65\x20\xAB", "Größe ½"),
    (Charset::Cp852, b"\x9D\xA2\x64\xAB", "Łódź"),
    (Charset::Cp866, b"\x8F\xE0\xA8\xA2\xA5\xE2", "Привет"),
    (Charset::Cp932, b"\x87\x40\x83\x65\x81\x5B\x83\x75\x83\x8B\x20\xB1\x81\x5F", "①テーブル ｱ＼"),
    (Charset::Dec8, b"\x47\x72\xF6\xDF\x65", "Größe"),
    (Charset::Eucjpms, b"\xAD\xA1\xC6\xFC\xCB\xDC\x20\x8F\xB0\xA1", "①日本 丂"),
    (Charset::Euckr, b"\xB5\xA5\xC0\xCC\xC5\xCD\x20\x8C\x63\xA2\xE6", "데이터 똠€"),
    (Charset::Gb18030, b"\xCA\xFD\xBE\xDD\xA2\xE3\x95\x32\x82\x36\x94\x39\xFC\x36", "数据€𠀀😀"),
    (Charset::Gb18030, b"\x84\x31\x82\x36a", "\u{FE10}a"),
    (Charset::Gb2312, b"\xCA\xFD\xBE\xDD\xBF\xE2", "数据库"),
    (Charset::Gbk, b"\xCA\xFD\xBE\xDD\x8E\xEC", "数据庫"),
    (Charset::Geostd8, b"\xC2\xC0\xCC\xC0\xD2\xE3\xCF\xC1\xC0", "გამარჯობა"),
    (Charset::Greek, b"\xCA\xE1\xEB\xE7\xEC\xDD\xF1\xE1", "Καλημέρα"),
    (Charset::Hebrew, b"\xF9\xEC\xE5\xED\xFD", "שלום\u{200E}"),
    (Charset::Hp8, b"\x47\x72\xCE\xDE\x65", "Größe"),
    (Charset::Keybcs2, b"\x92\x6C\x75\x9F\x6F\x75\x87\x6B\x98", "Žluťoučký"),
    (Charset::Koi8r, b"\xF0\xD2\xC9\xD7\xC5\xD4", "Привет"),
    (Charset::Koi8u, b"\xF0\xD2\xC9\xD7\xA6\xD4\x20\xBD", "Привіт Ґ"),
    (Charset::Latin1, b"\x6E\x61\xEF\x76\x65\x20\x80\x81", "naïve €\u{81}"),
    (Charset::Latin2, b"\xA3\xF3\x64\xBC", "Łódź"),
    (Charset::Latin5, b"\xDD\x73\x74\x61\x6E\x62\x75\x6C\x20\xFE", "İstanbul ş"),
    (Charset::Latin7, b"\xC0\xFE\x75\x6F\x6C\x61\x73", "Ąžuolas"),
    (Charset::Macce, b"\xEB\x6C\x75\xE9\x6F\x75\x8B\x6B\xF9", "Žluťoučký"),
    (Charset::Macroman, b"\x6E\x61\x95\x76\x65\x20\xB0", "naïve ∞"),
    (Charset::Sjis, b"\x83\x65\x81\x5B\x83\x75\x83\x8B\x20\xB1\x81\x5F\x7E\x5C", "テーブル ｱ\\~\\"),
    (Charset::Swe7, b"\x5D\x7B\x7C a[", "Åäö aÄ"),
    (Charset::Tis620, b"\xCA\xC7\xD1\xCA\xB4\xD5\xDB", "สวัสดี\u{FFFD}"),
    (Charset::Ucs2, b"\x30\xC7\x30\xFC\x30\xBF\0\0", "データ\0"),
    (Charset::Ujis, b"\xC6\xFC\xCB\xDC\x20\x8E\xB1\x20\x8F\xB0\xA1\x8F\xA2\xB7", "日本 ｱ 丂~"),
    (Charset::Utf16, b"\x00\xEB\xD8\x3D\xDE\x00", "ë😀"),
    (Charset::Utf16le, b"\xEB\x00\x3D\xD8\x00\xDE", "ë😀"),
    (Charset::Utf32, b"\x00\x00\x00\xEB\x00\x01\xF6\x00", "ë😀"),
    (Charset::Utf8mb3, b"\x6E\x61\xC3\xAF\x76\x65\x20\xE2\x82\xAC", "naïve €"),
    (Charset::Utf8mb4, b"\x6E\x61\xC3\xAF\x76\x65\x20\xF0\x9F\x98\x80", "naïve 😀"),
];

/// A character set, bytes that are invalid in it, and the offset of the first invalid sequence.
const INVALID: &[(Charset, &[u8], usize)] = &[
    (Charset::Ascii, b"ab\x80", 2),
    (Charset::Big5, b"a\xA1\x30", 1),
    (Charset::Binary, b"\xFF\xFE", 0),
    (Charset::Cp1251, b"\xCF\x98", 1),
    (Charset::Cp932, b"\x83\x65\x83", 2),
    (Charset::Eucjpms, b"\x8F\xB0", 0),
    (Charset::Euckr, b"\xB5\xA5\xFF", 2),
    (Charset::Gb18030, b"\x84\x31\x82", 0),
    (Charset::Gb18030, b"\xFE\x39\xFE\x39", 0),
    (Charset::Gb18030, b"a\x81\x3A\x81\x30", 1),
    (Charset::Gbk, b"ab\x80", 2),
    (Charset::Gbk, b"\xA2\xAB", 0),
    (Charset::Swe7, b"\x5D\x80", 1),
    (Charset::Ucs2, b"\0a\xD8\x3D\xDE\x00", 2),
    (Charset::Ucs2, b"\0a\0", 2),
    (Charset::Ujis, b"\xC6\xFC\x8F\x21\x21", 2),
    (Charset::Utf16, b"\xD8\x3D\0a", 0),
    (Charset::Utf16, b"\0a\xDE\x00", 2),
    (Charset::Utf16le, b"\x3D\xD8", 0),
    (Charset::Utf32, b"\0\0\0a\0\x11\0\0", 4),
    (Charset::Utf32, b"\0\0\xD8\0", 0),
    (Charset::Utf8mb3, b"a\xF0\x9F\x98\x80", 1),
    (Charset::Utf8mb3, b"\xFFa\xF0\x9F\x98\x80", 0),
    (Charset::Utf8mb3, b"\xED\xA0\x80", 0),
    (Charset::Utf8mb4, b"\xED\xA0\x80", 0),
    (Charset::Utf8mb4, b"abc\xE2\x82", 3),
];

fn decode(charset: Charset, bytes: &[u8]) -> Result<String, InvalidText> {
    let mut out = Vec::new();
    charset.decode_into(bytes, &mut out)?;
    Ok(String::from_utf8(out).expect("what was decoded is UTF-8"))
}

/// Pseudo-random bytes (xorshift, 64 bits), the same in every run.
fn noise(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

#[test]
fn every_charset_decodes_a_known_text() {
    for &(charset, bytes, text) in KNOWN {
        assert_eq!(decode(charset, bytes).as_deref(), Ok(text), "{charset:?}");
    }
    for charset in Charset::ALL {
        assert!(KNOWN.iter().any(|(known, _, _)| known == charset), "{charset:?} has no known text");
    }
}

#[test]
fn text_longer_than_one_block_keeps_its_order() {
    for &(charset, bytes, text) in KNOWN {
        assert_eq!(decode(charset, &bytes.repeat(50)), Ok(text.repeat(50)), "{charset:?}");
    }
}

#[test]
fn invalid_text_is_rejected_at_its_offset_and_appends_nothing() {
    for &(charset, bytes, offset) in INVALID {
        let mut out = b"before".to_vec();
        assert_eq!(charset.decode_into(bytes, &mut out), Err(InvalidText { offset }), "{charset:?} {bytes:x?}");
        assert_eq!(out, b"before", "{charset:?}");
    }
    let mut out = b"before".to_vec();
    let long = [b"a".repeat(1000), b"\xA2\xAB".to_vec()].concat();
    assert_eq!(Charset::Gbk.decode_into(&long, &mut out), Err(InvalidText { offset: 1000 }));
    assert_eq!(out, b"before");
}

#[test]
fn any_bytes_give_utf8_or_an_error_within_them() {
    let mut seed = 0x9E37_79B9_7F4A_7C15;
    for round in 0..20_000 {
        let length = (noise(&mut seed) % 40) as usize;
        let high = if round % 2 == 0 { 0x80 } else { 0 };
        let bytes: Vec<u8> = (0..length).map(|_| noise(&mut seed) as u8 | high).collect();
        for &charset in Charset::ALL {
            if let Err(InvalidText { offset }) = decode(charset, &bytes) {
                assert!(offset < length, "{charset:?}");
                assert!(decode(charset, &bytes[..offset]).is_ok(), "{charset:?} {bytes:x?}");
            }
        }
    }
}

#[test]
fn concatenated_texts_decode_to_the_concatenation() {
    for &(charset, bytes, text) in KNOWN {
        for &(_, more, _) in KNOWN {
            if let Ok(after) = decode(charset, more) {
                let both = [bytes, more].concat();
                assert_eq!(decode(charset, &both), Ok([text, &after].concat()), "{charset:?}");
            }
        }
    }
}

#[test]
fn the_pages_have_as_many_codes_as_the_server() {
    let count = |charset: Charset, prefix: &[u8]| {
        let codes = (0..=255).map(|last| [prefix, &[last]].concat());
        codes.filter(|code| decode(charset, code).is_ok_and(|text| text.chars().count() == 1)).count()
    };
    let single = |charset| count(charset, &[]);
    let double = |charset| (0x80..=0xFF).map(|first| count(charset, &[first])).sum::<usize>();
    let triple = |charset| (0x80..=0xFF).map(|second| count(charset, &[0x8F, second])).sum::<usize>();
    assert_eq!((single(Charset::Latin1), single(Charset::Swe7), single(Charset::Cp1257)), (256, 127, 244));
    assert_eq!(single(Charset::Gbk) + double(Charset::Gbk), 21_919);
    assert_eq!(single(Charset::Euckr) + double(Charset::Euckr), 17_176);
    assert_eq!(single(Charset::Ujis) + double(Charset::Ujis) + triple(Charset::Ujis), 15_017);
    assert_eq!(tables::GB18030_RANGES.iter().map(|&(_, _, count)| count).sum::<u32>(), 1_112_064 - 24_068);
}

#[test]
fn collation_ids_of_both_servers_map_to_charsets() {
    let known = [
        (8, Charset::Latin1),
        (28, Charset::Gbk),
        (33, Charset::Utf8mb3),
        (45, Charset::Utf8mb4),
        (63, Charset::Binary),
        (249, Charset::Gb18030),
        (255, Charset::Utf8mb4),
        (1025, Charset::Big5),
        (2048, Charset::Utf8mb3),
        (2304, Charset::Utf8mb4),
    ];
    for (id, charset) in known {
        assert_eq!(Charset::from_collation_id(id), Some(charset), "collation {id}");
    }
    for id in [0, 17, 100, 9999, u32::MAX] {
        assert_eq!(Charset::from_collation_id(id), None, "collation {id}");
    }
}

#[test]
fn names_ignore_case_and_utf8_is_utf8mb3() {
    for &charset in Charset::ALL {
        assert_eq!(Charset::from_name(charset.name()), Some(charset));
        assert_eq!(Charset::from_name(&charset.name().to_uppercase()), Some(charset));
    }
    assert_eq!(Charset::from_name("utf8"), Some(Charset::Utf8mb3));
    assert_eq!(Charset::from_name("utf-8"), None);
}
