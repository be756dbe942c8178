//! TiDB's columns: their MySQL types, and the values that they have in rows from which they are missing.

use std::sync::Arc;

use serde_json::Value as Json;

use super::table_info::{invalid, items, name};
use crate::charset::Charset;
use crate::column::{Form, Kind, Layout};
use crate::error::{Error, ErrorKind, Result};
use crate::event::table_map::code;
use crate::write::table::{WrittenColumn, COLLATION_BINARY};
use crate::write::text::pack_text;

/// TiDB's types that do not occur in table maps.
mod tidb_code {
    pub const TIMESTAMP: u8 = 7;
    pub const DURATION: u8 = 11;
    pub const DATETIME: u8 = 12;
    pub const NEW_DATE: u8 = 14;
    pub const TINY_BLOB: u8 = 249;
    pub const MEDIUM_BLOB: u8 = 250;
    pub const LONG_BLOB: u8 = 251;
}

const NOT_NULL_FLAG: u64 = 1;
const UNSIGNED_FLAG: u64 = 32;

/// utf8mb4_bin, the default of TiDB.
const COLLATION_UTF8MB4_BIN: u16 = 46;

/// In column definitions of this version or later, a TIMESTAMP default is in UTC.
const UTC_DEFAULTS_VERSION: i64 = 1;

/// A column as TiDB's rows store it.
#[derive(Debug)]
pub struct TidbColumn {
    /// TiDB's number of the column.
    pub id: i64,
    /// The value of the column in a row that lacks it.
    pub missing: Missing,
}

/// The value of a column in rows that were written before the column was added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missing {
    /// NULL.
    Null,
    /// The column's original default, as in a row image.
    Default(Vec<u8>),
    /// Every row contains the column.
    Never,
    /// The error in reading the default. Rows without the column cannot be read either.
    Unreadable(Error),
}

/// Reads a column, and determines the form in which it is written.
///
/// Raises `EventUnsupported` for a type that MySQL does not have, `SchemaInvalid` for an incomplete definition.
pub fn read(json: &Json) -> Result<(TidbColumn, WrittenColumn)> {
    let name = name(json.get("name").unwrap_or(&Json::Null))?.to_owned();
    let read = || -> Result<(TidbColumn, Kind, bool, u16)> {
        let id = json.get("id").and_then(Json::as_i64).ok_or_else(|| invalid("has a column without a number"))?;
        let field = FieldType::read(json.get("type").unwrap_or(&Json::Null))?;
        let kind = field.kind()?;
        let nullable = field.flags & NOT_NULL_FLAG == 0;
        let missing = missing(json, &kind, nullable);
        Ok((TidbColumn { id, missing }, kind, nullable, field.collation()))
    };
    let (column, kind, nullable, collation) = read().map_err(|error| error.within(&format!("column `{name}`")))?;
    Ok((column, WrittenColumn { name, kind, nullable, collation }))
}

/// The fields of TiDB's `FieldType`.
struct FieldType<'a> {
    code: u8,
    flags: u64,
    /// Number of characters or digits; None if the type has no length.
    length: Option<usize>,
    /// Number of fractional digits; None if the type has no fraction.
    decimals: Option<u8>,
    charset: &'a str,
    collation: &'a str,
    members: Vec<Arc<str>>,
}

impl FieldType<'_> {
    fn read(json: &Json) -> Result<FieldType<'_>> {
        let number = |field: &str| json.get(field).and_then(Json::as_i64);
        let text = |field: &str| json.get(field).and_then(Json::as_str).unwrap_or_default();
        let code = number("Tp").and_then(|code| u8::try_from(code).ok());
        let flags = json.get("Flag").and_then(Json::as_u64);
        let (Some(code), Some(flags)) = (code, flags) else { return Err(invalid("has a column without a type")) };
        Ok(FieldType {
            code,
            flags,
            length: number("Flen").and_then(|length| usize::try_from(length).ok()),
            decimals: number("Decimal").and_then(|decimals| u8::try_from(decimals).ok()),
            charset: text("Charset"),
            collation: text("Collate"),
            members: items(json, "Elems").iter().filter_map(Json::as_str).map(Arc::from).collect(),
        })
    }

    fn kind(&self) -> Result<Kind> {
        let integer = |bytes| Kind::Integer { bytes, unsigned: self.flags & UNSIGNED_FLAG != 0 };
        let fsp = self.decimals.unwrap_or(0).min(6);
        let layout = Layout::Packed;
        Ok(match self.code {
            code::TINY => integer(1),
            code::SHORT => integer(2),
            code::INT24 => integer(3),
            code::LONG => integer(4),
            code::LONGLONG => integer(8),
            code::FLOAT => Kind::Float,
            code::DOUBLE => Kind::Double,
            code::NEWDECIMAL => self.decimal()?,
            code::YEAR => Kind::Year,
            code::DATE | tidb_code::NEW_DATE => Kind::Date,
            tidb_code::TIMESTAMP => Kind::Timestamp { fsp, layout },
            tidb_code::DATETIME => Kind::DateTime { fsp, layout },
            tidb_code::DURATION => Kind::Time { fsp, layout },
            code::BIT => match self.length.unwrap_or(1) {
                bits @ 1..=64 => Kind::Bit { bits: bits as u8 },
                bits => return Err(invalid(&format!("has a BIT({bits})"))),
            },
            code::VARCHAR | code::VAR_STRING => self.string(Form::Varying),
            code::STRING => self.string(Form::Fixed),
            tidb_code::TINY_BLOB => self.large(1),
            code::BLOB => self.large(2),
            tidb_code::MEDIUM_BLOB => self.large(3),
            tidb_code::LONG_BLOB => self.large(4),
            code::ENUM => {
                let bytes = if self.members.len() < 256 { 1 } else { 2 };
                Kind::Enumeration { bytes, values: self.members.clone().into() }
            }
            code::SET => {
                let bytes = match self.members.len().div_ceil(8) {
                    bytes @ 0..=4 => bytes.max(1),
                    _ => 8,
                };
                Kind::Set { bytes: bytes as u8, values: self.members.clone().into() }
            }
            code::JSON => Kind::Json { prefix: 4 },
            unknown => {
                let message = format!("TiDB's column type {unknown} has no equivalent in MySQL's binlog");
                return Err(Error::new(ErrorKind::EventUnsupported, message));
            }
        })
    }

    fn decimal(&self) -> Result<Kind> {
        let precision = self.length.and_then(|length| u8::try_from(length).ok()).unwrap_or(10);
        let scale = self.decimals.unwrap_or(0);
        match (precision, scale) {
            (1..=65, 0..=30) if scale <= precision => Ok(Kind::Decimal { precision, scale }),
            _ => Err(invalid(&format!("has a DECIMAL({precision},{scale})"))),
        }
    }

    fn is_binary(&self) -> bool {
        self.charset == "binary"
    }

    /// TiDB stores text of every character set as UTF-8, so columns are declared as UTF-8. A VARCHAR whose length in
    /// UTF-8 does not fit into a table map is declared as a MEDIUMTEXT.
    fn string(&self, form: fn(u16) -> Form) -> Kind {
        let bytes_each = if self.is_binary() { 1 } else { 4 };
        let bytes = self.length.unwrap_or(1).saturating_mul(bytes_each);
        match u16::try_from(bytes) {
            Ok(bytes) => self.text(if bytes > 255 { 2 } else { 1 }, form(bytes)),
            Err(_) => self.text(3, Form::Large),
        }
    }

    /// Text from a character set with shorter characters may need a longer type in UTF-8.
    fn large(&self, prefix: u8) -> Kind {
        let grows = !matches!(self.charset, "binary" | "utf8" | "utf8mb3" | "utf8mb4" | "ascii");
        self.text(if grows { (prefix + 1).min(4) } else { prefix }, Form::Large)
    }

    fn text(&self, prefix: u8, form: Form) -> Kind {
        match self.is_binary() {
            true => Kind::Binary { prefix, form },
            false => Kind::Text { prefix, form, charset: Charset::Utf8mb4 },
        }
    }

    /// Returns MySQL's number of the utf8mb4 collation that compares in the same way as the column's collation.
    fn collation(&self) -> u16 {
        if self.is_binary() {
            return COLLATION_BINARY;
        }
        match self.collation.split_once('_').map(|(_, order)| order) {
            Some("general_ci" | "chinese_ci") => 45,
            Some("unicode_ci") => 224,
            Some("0900_ai_ci") => 255,
            Some("0900_bin") => 309,
            _ => COLLATION_UTF8MB4_BIN,
        }
    }
}

/// Reads the original default of a column.
fn missing(json: &Json, kind: &Kind, nullable: bool) -> Missing {
    let bits = json.get("origin_default_bit").and_then(Json::as_str);
    let text = match (bits, json.get("origin_default")) {
        (Some(bits), _) if matches!(kind, Kind::Bit { .. }) => bits_text(bits),
        (_, None | Some(Json::Null)) if nullable => return Missing::Null,
        (_, None | Some(Json::Null)) => return Missing::Never,
        (_, Some(value)) => Ok(value.as_str().map_or_else(|| value.to_string(), str::to_owned)),
    };
    let version = json.get("version").and_then(Json::as_i64).unwrap_or(0);
    let packed = text.and_then(|text| {
        if matches!(kind, Kind::Timestamp { .. }) && version < UTC_DEFAULTS_VERSION && !text.starts_with("0000") {
            return Err(invalid("has a default of TIMESTAMP in the time zone of an unknown server")
                .hint("ALTER TABLE ... MODIFY the column, so that TiDB stores the default anew"));
        }
        let mut default = Vec::new();
        pack_text(kind, text.as_bytes(), &mut default)?;
        Ok(default)
    });
    match packed {
        Ok(default) => Missing::Default(default),
        Err(error) => Missing::Unreadable(error),
    }
}

/// Returns the number that the bytes of a BIT represent.
fn bits_text(base64: &str) -> Result<String> {
    let bytes = from_base64(base64).ok_or_else(|| invalid("has a default of BIT that is no base64"))?;
    Ok(bytes.iter().fold(0u64, |value, byte| value << 8 | u64::from(*byte)).to_string())
}

/// Decodes base64 with padding.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let (mut bits, mut count) = (0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let digit = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the JSON of a column, from the fields of TiDB's `FieldType` and further fields of the column.
    fn column(kind: &str, others: &str) -> Result<(TidbColumn, WrittenColumn)> {
        let json = format!(r#"{{"id": 3, "name": {{"O": "C", "L": "c"}}, "version": 2, "type": {{{kind}}} {others}}}"#);
        read(&serde_json::from_str(&json).unwrap())
    }

    fn type_of(kind: &str) -> String {
        column(kind, "").unwrap().1.kind.type_text()
    }

    #[test]
    fn types_of_tidb_are_mysqls() {
        const UTF8: &str = r#""Charset": "utf8mb4", "Collate": "utf8mb4_bin""#;
        const BINARY: &str = r#""Charset": "binary", "Collate": "binary""#;
        for (code, flags, others, expected) in [
            (1, 32, r#""Flen": 3"#, "tinyint unsigned"),
            (2, 0, r#""Flen": 6"#, "smallint"),
            (9, 0, r#""Flen": 9"#, "mediumint"),
            (3, 0, r#""Flen": 11"#, "int"),
            (8, 32, r#""Flen": 20"#, "bigint unsigned"),
            (4, 0, r#""Flen": 12, "Decimal": -1"#, "float"),
            (5, 0, r#""Flen": 22, "Decimal": -1"#, "double"),
            (246, 0, r#""Flen": 65, "Decimal": 30"#, "decimal(65,30)"),
            (16, 0, r#""Flen": 64"#, "bit(64)"),
            (13, 96, r#""Flen": 4"#, "year"),
            (10, 0, r#""Flen": 10"#, "date"),
            (7, 0, r#""Flen": 23, "Decimal": 3"#, "timestamp(3)"),
            (12, 0, r#""Flen": 19, "Decimal": 0"#, "datetime"),
            (11, 0, r#""Flen": 17, "Decimal": 6"#, "time(6)"),
            (245, 128, BINARY, "json"),
        ] {
            assert_eq!(type_of(&format!(r#""Tp": {code}, "Flag": {flags}, {others}"#)), expected);
        }
        for (code, length, charset, expected) in [
            (254, 255u64, UTF8, "char(255)"),
            (254, 16, BINARY, "binary(16)"),
            (15, 16_383, UTF8, "varchar(16383)"),
            (253, 65_535, BINARY, "varbinary(65535)"),
            (249, 255, UTF8, "tinytext"),
            (252, 65_535, BINARY, "blob"),
            (250, 16_777_215, UTF8, "mediumtext"),
            (251, 4_294_967_295, BINARY, "longblob"),
        ] {
            assert_eq!(type_of(&format!(r#""Tp": {code}, "Flag": 0, "Flen": {length}, {charset}"#)), expected);
        }
        assert_eq!(type_of(&format!(r#""Tp": 247, "Flag": 0, "Elems": ["x", "y"], {UTF8}"#)), "enum('x','y')");
        let set = format!(r#""Tp": 248, "Flag": 0, "Elems": ["a","b","c","d","e","f","g","h","i"], {UTF8}"#);
        assert!(matches!(column(&set, "").unwrap().1.kind, Kind::Set { bytes: 2, .. }));
    }

    #[test]
    fn text_of_other_charsets_has_room_as_utf8() {
        for (code, length, charset, expected) in [
            (15, 10u64, "gbk", "varchar(10)"),
            (15, 16_384, "latin1", "mediumtext"),
            (249, 255, "gbk", "text"),
            (252, 65_535, "latin1", "mediumtext"),
            (251, 4_294_967_295, "gbk", "longtext"),
        ] {
            let kind = format!(r#""Tp": {code}, "Flag": 0, "Flen": {length}, "Charset": "{charset}""#);
            assert_eq!(type_of(&kind), expected, "{charset}");
        }
    }

    #[test]
    fn collations_are_utf8mb4s_of_the_same_kind() {
        for (charset, collation, expected) in [
            ("utf8mb4", "utf8mb4_bin", 46),
            ("utf8mb4", "utf8mb4_general_ci", 45),
            ("utf8", "utf8_unicode_ci", 224),
            ("utf8mb4", "utf8mb4_0900_ai_ci", 255),
            ("gbk", "gbk_chinese_ci", 45),
            ("latin1", "latin1_bin", 46),
            ("binary", "binary", 63),
        ] {
            let kind = format!(r#""Tp": 15, "Flag": 0, "Flen": 9, "Charset": "{charset}", "Collate": "{collation}""#);
            assert_eq!(column(&kind, "").unwrap().1.collation, expected, "{collation}");
        }
    }

    #[test]
    fn rows_without_a_column_have_the_default_that_it_was_added_with() {
        const INT: &str = r#""Tp": 3, "Flag": 0"#;
        const NOT_NULL: &str = r#""Tp": 3, "Flag": 1"#;
        const TIMESTAMP: &str = r#""Tp": 7, "Flag": 0"#;
        let missing = |kind: &str, others: &str| column(kind, others).unwrap().0.missing;
        assert_eq!(missing(INT, ""), Missing::Null);
        assert_eq!(missing(INT, r#", "origin_default": null"#), Missing::Null);
        assert_eq!(missing(NOT_NULL, ""), Missing::Never);
        assert_eq!(missing(NOT_NULL, r#", "origin_default": "42""#), Missing::Default(vec![42, 0, 0, 0]));
        assert_eq!(missing(INT, r#", "origin_default": 42"#), Missing::Default(vec![42, 0, 0, 0]));
        let bit = missing(r#""Tp": 16, "Flag": 0, "Flen": 10"#, r#", "origin_default_bit": "Aqo=""#);
        assert_eq!(bit, Missing::Default(vec![2, 0xaa]));
        let utc = missing(TIMESTAMP, r#", "origin_default": "1970-01-01 00:00:07""#);
        assert_eq!(utc, Missing::Default(vec![0, 0, 0, 7]));
        let local = missing(TIMESTAMP, r#", "origin_default": "1970-01-01 00:00:07", "version": 0"#);
        assert!(matches!(local, Missing::Unreadable(_)), "of an unknown time zone");
        assert!(matches!(missing(INT, r#", "origin_default": "x""#), Missing::Unreadable(_)));
    }

    #[test]
    fn types_and_fields_that_mysql_lacks_are_refused_by_column() {
        let error = column(r#""Tp": 225, "Flag": 0"#, "").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::EventUnsupported);
        assert!(error.message().starts_with("column `C`"), "{error}");
        for kind in ["", r#""Tp": 3"#, r#""Tp": 16, "Flag": 0, "Flen": 65"#, r#""Tp": 246, "Flag": 0, "Flen": 66"#] {
            assert_eq!(column(kind, "").unwrap_err().kind(), ErrorKind::SchemaInvalid, "{kind}");
        }
    }
}
