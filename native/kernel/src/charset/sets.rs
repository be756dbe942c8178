//! The character sets, their names and properties.

use std::fmt;

/// A character set of MySQL 9, which includes all of MariaDB's.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Charset {
    Armscii8,
    Ascii,
    Big5,
    Binary,
    Cp1250,
    Cp1251,
    Cp1256,
    Cp1257,
    Cp850,
    Cp852,
    Cp866,
    Cp932,
    Dec8,
    Eucjpms,
    Euckr,
    Gb18030,
    Gb2312,
    Gbk,
    Geostd8,
    Greek,
    Hebrew,
    Hp8,
    Keybcs2,
    Koi8r,
    Koi8u,
    Latin1,
    Latin2,
    Latin5,
    Latin7,
    Macce,
    Macroman,
    Sjis,
    Swe7,
    Tis620,
    Ucs2,
    Ujis,
    Utf16,
    Utf16le,
    Utf32,
    Utf8mb3,
    Utf8mb4,
}

/// Bytes that are invalid in their character set, or that Unicode cannot represent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidText {
    /// Offset of the first byte that does not start a valid character.
    pub offset: usize,
}

impl fmt::Display for InvalidText {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "no character of the character set begins at byte {}", self.offset)
    }
}

impl std::error::Error for InvalidText {}

impl Charset {
    /// All character sets, in the order of their names.
    pub const ALL: &'static [Charset] = &[
        Charset::Armscii8,
        Charset::Ascii,
        Charset::Big5,
        Charset::Binary,
        Charset::Cp1250,
        Charset::Cp1251,
        Charset::Cp1256,
        Charset::Cp1257,
        Charset::Cp850,
        Charset::Cp852,
        Charset::Cp866,
        Charset::Cp932,
        Charset::Dec8,
        Charset::Eucjpms,
        Charset::Euckr,
        Charset::Gb18030,
        Charset::Gb2312,
        Charset::Gbk,
        Charset::Geostd8,
        Charset::Greek,
        Charset::Hebrew,
        Charset::Hp8,
        Charset::Keybcs2,
        Charset::Koi8r,
        Charset::Koi8u,
        Charset::Latin1,
        Charset::Latin2,
        Charset::Latin5,
        Charset::Latin7,
        Charset::Macce,
        Charset::Macroman,
        Charset::Sjis,
        Charset::Swe7,
        Charset::Tis620,
        Charset::Ucs2,
        Charset::Ujis,
        Charset::Utf16,
        Charset::Utf16le,
        Charset::Utf32,
        Charset::Utf8mb3,
        Charset::Utf8mb4,
    ];

    /// Find a character set by its name, ignoring case; `utf8` is `utf8mb3`.
    pub fn from_name(name: &str) -> Option<Charset> {
        if name.eq_ignore_ascii_case("utf8") {
            return Some(Charset::Utf8mb3);
        }
        Charset::ALL.iter().copied().find(|charset| charset.name().eq_ignore_ascii_case(name))
    }

    /// Return the name in `SHOW CHARACTER SET` of MySQL 9.
    pub fn name(self) -> &'static str {
        match self {
            Charset::Armscii8 => "armscii8",
            Charset::Ascii => "ascii",
            Charset::Big5 => "big5",
            Charset::Binary => "binary",
            Charset::Cp1250 => "cp1250",
            Charset::Cp1251 => "cp1251",
            Charset::Cp1256 => "cp1256",
            Charset::Cp1257 => "cp1257",
            Charset::Cp850 => "cp850",
            Charset::Cp852 => "cp852",
            Charset::Cp866 => "cp866",
            Charset::Cp932 => "cp932",
            Charset::Dec8 => "dec8",
            Charset::Eucjpms => "eucjpms",
            Charset::Euckr => "euckr",
            Charset::Gb18030 => "gb18030",
            Charset::Gb2312 => "gb2312",
            Charset::Gbk => "gbk",
            Charset::Geostd8 => "geostd8",
            Charset::Greek => "greek",
            Charset::Hebrew => "hebrew",
            Charset::Hp8 => "hp8",
            Charset::Keybcs2 => "keybcs2",
            Charset::Koi8r => "koi8r",
            Charset::Koi8u => "koi8u",
            Charset::Latin1 => "latin1",
            Charset::Latin2 => "latin2",
            Charset::Latin5 => "latin5",
            Charset::Latin7 => "latin7",
            Charset::Macce => "macce",
            Charset::Macroman => "macroman",
            Charset::Sjis => "sjis",
            Charset::Swe7 => "swe7",
            Charset::Tis620 => "tis620",
            Charset::Ucs2 => "ucs2",
            Charset::Ujis => "ujis",
            Charset::Utf16 => "utf16",
            Charset::Utf16le => "utf16le",
            Charset::Utf32 => "utf32",
            Charset::Utf8mb3 => "utf8mb3",
            Charset::Utf8mb4 => "utf8mb4",
        }
    }

    /// Return the maximum number of bytes of a character (`MAXLEN` of `information_schema.CHARACTER_SETS`).
    pub fn bytes_per_character_max(self) -> usize {
        use Charset::*;
        match self {
            Gb18030 | Utf16 | Utf16le | Utf32 | Utf8mb4 => 4,
            Eucjpms | Ujis | Utf8mb3 => 3,
            Big5 | Cp932 | Euckr | Gb2312 | Gbk | Sjis | Ucs2 => 2,
            _ => 1,
        }
    }

    /// Whether values are bytes instead of text.
    pub fn is_binary(self) -> bool {
        self == Charset::Binary
    }
}
