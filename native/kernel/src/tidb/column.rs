//! Columns of TiDB: which of MySQL's types they have, and what a row that lacks them means.

use std::sync::Arc;

use serde_json::Value as Json;

use super::table_info::{invalid, items, name};
use crate::charset::Charset;
use crate::column::{Form, Kind, Layout};
use crate::error::{Error, ErrorKind, Result};
use crate::event::table_map::code;
use crate::write::table::{WrittenColumn, COLLATION_BINARY};
use crate::write::text::pack_text;

/// Types that table maps do not use, and TiDB does.
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

/// The longest VARCHAR that a table map can describe.
const VARYING_BYTES_MAX: usize = 65_535;

/// Since this version of a column's definition, its default TIMESTAMP is in UTC.
const UTC_DEFAULTS_VERSION: i64 = 1;

/// A column as TiDB's rows have it.
#[derive(Debug)]
pub struct TidbColumn {
    /// TiDB's number of the column.
    pub id: i64,
    /// What a row that lacks the column has in it.
    pub missing: Missing,
}

/// The value of a column in rows that were written before the column was added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missing {
    /// NULL.
    Null,
    /// The default that the column was added with, as in a row image.
    Default(Vec<u8>),
    /// No row lacks the column.
    Never,
    /// The default cannot be read, so that rows without the column cannot either: why.
    Unreadable(Error),
}

/// Reads a column, and how it is written.
///
/// Raises `EventUnsupported` for a type that MySQL lacks, `SchemaInvalid` for an incomplete definition.
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
    /// Characters or digits; None if the type has no length.
    length: Option<usize>,
    /// Digits of the fraction; None if the type has none.
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

    /// TiDB keeps text of every character set as UTF-8, so that is what columns are declared as. A VARCHAR of another
    /// character set that would then be too long for a table map is declared as a MEDIUMTEXT.
    fn string(&self, form: fn(u16) -> Form) -> Kind {
        let bytes_each = if self.is_binary() { 1 } else { 4 };
        let bytes = self.length.unwrap_or(1).saturating_mul(bytes_each);
        match u16::try_from(bytes) {
            Ok(bytes) => self.text(if bytes > 255 { 2 } else { 1 }, form(bytes)),
            Err(_) if bytes > VARYING_BYTES_MAX => self.large(3),
            Err(_) => self.large(2),
        }
    }

    /// Text of a character set with shorter characters than UTF-8's may need a longer type.
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

    /// Returns MySQL's number of the utf8mb4 collation that compares like the column's.
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

/// Reads the default that a column was added with.
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

/// Returns the number that the bytes of a BIT are.
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
