//! Parses and writes SQL types: `information_schema.COLUMNS.COLUMN_TYPE` as both servers print it.
//!
//! Members of ENUM and SET are quoted as by the server's `append_unescaped`: quotes are doubled, and `\\`, `\n`,
//! `\r`, `\0` are escaped in every SQL mode.

use std::iter::Peekable;
use std::str::Chars;
use std::sync::Arc;

use crate::charset::Charset;
use crate::error::{Error, ErrorKind, Result};

use super::wire::prefix_of;
use super::{binary, bit, compressed, decimal, enumeration, fraction, integer, members, set, text, vector};
use super::{Form, Kind, Layout};

/// Default number of digits of DECIMAL.
const DECIMAL_DIGITS_DEFAULT: u64 = 10;

/// A column declaration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredColumn {
    /// The name of the column.
    pub name: String,
    /// The SQL type, as information_schema.COLUMNS.COLUMN_TYPE prints it.
    pub type_text: String,
    /// The name of the character set of a text column.
    pub charset: Option<String>,
    /// Whether it may be null.
    pub nullable: bool,
}

impl DeclaredColumn {
    /// Returns the declared kind.
    pub fn kind(&self, mariadb: bool) -> Result<Kind> {
        let charset =
            match &self.charset {
                None => None,
                Some(name) => Some(Charset::from_name(name).ok_or_else(|| {
                    Error::new(ErrorKind::SchemaInvalid, format!("character set `{name}` is not known"))
                })?),
            };
        Kind::declared(&self.type_text, charset, mariadb)
            .map_err(|error| error.within(&format!("column `{}`", self.name)))
    }
}

/// A parsed type: `decimal(10,2) unsigned` has the words `decimal` and `unsigned` and the numbers 10 and 2.
struct Parsed<'a> {
    text: &'a str,
    name: String,
    numbers: Vec<u64>,
    members: Vec<Arc<str>>,
    attributes: Vec<String>,
}

fn invalid(text: &str, why: &str) -> Error {
    Error::new(ErrorKind::SchemaInvalid, format!("the column type \"{text}\": {why}"))
        .hint("Give types as information_schema.COLUMNS.COLUMN_TYPE does.")
}

/// Removes plain comments, and unwraps those that MariaDB and MySQL execute, such as `/*M!100301 COMPRESSED*/`.
fn without_comments(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("/*") {
        let (comment, after) = after.split_once("*/").unwrap_or((after, ""));
        plain.push_str(before);
        plain.push(' ');
        if let Some(words) = comment.strip_prefix("M!").or_else(|| comment.strip_prefix('!')) {
            plain.push_str(words.trim_start_matches(|letter: char| letter.is_ascii_digit()));
        }
        rest = after;
    }
    plain.push_str(rest);
    plain
}

/// Parses the rest of a quoted member, in which quotes are doubled and backslashes escape.
fn quoted(letters: &mut Peekable<Chars<'_>>) -> Option<Arc<str>> {
    let mut member = String::new();
    loop {
        match letters.next()? {
            '\'' if letters.next_if_eq(&'\'').is_some() => member.push('\''),
            '\'' => return Some(member.into()),
            '\\' => member.push(match letters.next()? {
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                '0' => '\0',
                character => character,
            }),
            letter => member.push(letter),
        }
    }
}

fn word(letters: &mut Peekable<Chars<'_>>) -> String {
    let mut word = String::new();
    while let Some(letter) = letters.next_if(|letter| letter.is_ascii_alphanumeric() || *letter == '_') {
        word.push(letter.to_ascii_lowercase());
    }
    word
}

fn spaces(letters: &mut Peekable<Chars<'_>>) {
    while letters.next_if(|letter| letter.is_ascii_whitespace()).is_some() {}
}

impl<'a> Parsed<'a> {
    fn parse(text: &'a str) -> Result<Parsed<'a>> {
        let members = Vec::new();
        let mut parsed = Parsed { text, name: String::new(), numbers: Vec::new(), members, attributes: Vec::new() };
        // Only the part after the members may contain comments; a member may contain anything.
        let (head, tail) = text.split_at(text.rfind(')').unwrap_or(0));
        let plain = format!("{head}{}", without_comments(tail));
        let mut letters = plain.chars().peekable();
        spaces(&mut letters);
        parsed.name = word(&mut letters);
        spaces(&mut letters);
        if letters.next_if_eq(&'(').is_some() {
            parsed.arguments(&mut letters)?;
        }
        loop {
            spaces(&mut letters);
            let attribute = word(&mut letters);
            match (attribute.is_empty(), letters.peek()) {
                (false, _) => parsed.attributes.push(attribute),
                (true, None) => break,
                (true, Some(letter)) => return Err(invalid(text, &format!("unexpected {letter:?}"))),
            }
        }
        match parsed.name.is_empty() {
            true => Err(invalid(text, "no name")),
            false => Ok(parsed),
        }
    }

    fn arguments(&mut self, letters: &mut Peekable<Chars<'_>>) -> Result<()> {
        loop {
            spaces(letters);
            if letters.next_if_eq(&'\'').is_some() {
                let member = quoted(letters).ok_or_else(|| invalid(self.text, "a quote that does not end"))?;
                self.members.push(member);
            } else {
                let number = word(letters).parse().map_err(|_| invalid(self.text, "a number expected"))?;
                self.numbers.push(number);
            }
            spaces(letters);
            match letters.next() {
                Some(',') => {}
                Some(')') => return Ok(()),
                _ => return Err(invalid(self.text, "',' or ')' expected")),
            }
        }
    }

    fn has(&self, attribute: &str) -> bool {
        self.attributes.iter().any(|word| word == attribute)
    }

    /// Returns the argument at this index, or the default if it is missing. Fails above the maximum.
    fn number(&self, slot: usize, default: u64, max: u64) -> Result<u64> {
        let number = self.numbers.get(slot).copied().unwrap_or(default);
        if number > max {
            return Err(invalid(self.text, &format!("{number} where at most {max} is allowed")));
        }
        Ok(number)
    }

    fn small(&self, slot: usize, default: u64, max: u8) -> Result<u8> {
        let number = self.number(slot, default, max.into())?;
        u8::try_from(number).map_err(|_| invalid(self.text, "a number out of range"))
    }

    fn integer(&self, bytes: u8) -> Kind {
        Kind::Integer { bytes, unsigned: self.has("unsigned") || self.has("zerofill") }
    }

    /// FLOAT(p) is a DOUBLE for more than 24 bits; FLOAT(m,d) is not.
    fn float(&self) -> Kind {
        match self.numbers.as_slice() {
            [bits] if *bits > 24 => Kind::Double,
            _ => Kind::Float,
        }
    }

    fn decimal(&self) -> Result<Kind> {
        let precision = match self.small(0, DECIMAL_DIGITS_DEFAULT, 65)? {
            0 => 10,
            digits => digits,
        };
        let scale = self.small(1, 0, 38)?;
        match scale <= precision {
            true => Ok(Kind::Decimal { precision, scale }),
            false => Err(invalid(self.text, "more digits behind the point than in all")),
        }
    }

    fn bit(&self) -> Result<Kind> {
        match self.small(0, 1, 64)? {
            0 => Err(invalid(self.text, "no bits")),
            bits => Ok(Kind::Bit { bits }),
        }
    }

    /// CHAR and VARCHAR count characters, while row images count bytes.
    fn characters(&self, charset: Option<Charset>, default: Option<u64>) -> Result<(u16, Charset)> {
        let charset = self.charset(charset)?;
        let characters = match (self.numbers.first(), default) {
            (Some(characters), _) => *characters,
            (None, Some(characters)) => characters,
            (None, None) => return Err(invalid(self.text, "no length")),
        };
        let bytes =
            usize::try_from(characters).ok().and_then(|count| count.checked_mul(charset.bytes_per_character_max()));
        match bytes.and_then(|bytes| u16::try_from(bytes).ok()) {
            Some(bytes) => Ok((bytes, charset)),
            None => Err(invalid(self.text, "more than 65535 bytes")),
        }
    }

    fn charset(&self, charset: Option<Charset>) -> Result<Charset> {
        charset.ok_or_else(|| invalid(self.text, "a text column without its character set"))
    }

    fn string(&self, form: Form, charset: Charset) -> Result<Kind> {
        let (form, compressed) = match (form, self.has("compressed")) {
            // The header byte of a compressed value counts toward the column's length.
            (Form::Varying(bytes), true) => match bytes.checked_add(1) {
                Some(bytes) => (Form::Varying(bytes), true),
                None => return Err(invalid(self.text, "more than 65535 bytes")),
            },
            (form, compressed) => (form, compressed),
        };
        let prefix = match form {
            Form::Fixed(bytes) | Form::Varying(bytes) => prefix_of(bytes),
            Form::Large => large_prefix(&self.name),
        };
        Ok(match (charset.is_binary(), compressed) {
            (true, false) => Kind::Binary { prefix, form },
            (false, false) => Kind::Text { prefix, form, charset },
            (true, true) => Kind::CompressedBinary { prefix, form },
            (false, true) => Kind::CompressedText { prefix, form, charset },
        })
    }

    fn vector(&self, mariadb: bool) -> Result<Kind> {
        let dimensions = match self.numbers.first() {
            Some(_) => u16::try_from(self.number(0, 0, 16_383)?).ok(),
            None => None,
        };
        Ok(match (mariadb, dimensions) {
            (false, _) => Kind::Vector { prefix: 4, dimensions },
            (true, Some(count)) => Kind::Vector { prefix: prefix_of(count * 4), dimensions },
            (true, None) => return Err(invalid(self.text, "a vector without its dimensions")),
        })
    }

    fn kind(&self, charset: Option<Charset>, mariadb: bool) -> Result<Kind> {
        let layout = Layout::Packed;
        let fsp = || self.small(0, 0, 6);
        let members = || Arc::from(self.members.clone());
        Ok(match self.name.as_str() {
            "tinyint" | "bool" | "boolean" => self.integer(1),
            "smallint" => self.integer(2),
            "mediumint" => self.integer(3),
            "int" | "integer" => self.integer(4),
            "bigint" => self.integer(8),
            "float" => self.float(),
            "double" | "real" => Kind::Double,
            "decimal" | "numeric" | "dec" | "fixed" => self.decimal()?,
            "bit" => self.bit()?,
            "year" => Kind::Year,
            "date" => Kind::Date,
            "time" => Kind::Time { fsp: fsp()?, layout },
            "datetime" => Kind::DateTime { fsp: fsp()?, layout },
            "timestamp" => Kind::Timestamp { fsp: fsp()?, layout },
            "char" => {
                let (bytes, charset) = self.characters(charset, Some(1))?;
                self.string(Form::Fixed(bytes), charset)?
            }
            "varchar" => {
                let (bytes, charset) = self.characters(charset, None)?;
                self.string(Form::Varying(bytes), charset)?
            }
            "binary" => {
                self.string(Form::Fixed(self.characters(Some(Charset::Binary), Some(1))?.0), Charset::Binary)?
            }
            "varbinary" => {
                self.string(Form::Varying(self.characters(Some(Charset::Binary), None)?.0), Charset::Binary)?
            }
            "tinytext" | "text" | "mediumtext" | "longtext" => self.string(Form::Large, self.charset(charset)?)?,
            "tinyblob" | "blob" | "mediumblob" | "longblob" => self.string(Form::Large, Charset::Binary)?,
            "enum" => {
                let bytes = enumeration::width(self.members.len());
                Kind::Enumeration { bytes, values: enumeration::members(bytes, members())? }
            }
            "set" => {
                let bytes = set::width(self.members.len());
                Kind::Set { bytes, values: set::members(bytes, members())? }
            }
            "json" if mariadb => {
                Kind::Text { prefix: 4, form: Form::Large, charset: charset.unwrap_or(Charset::Utf8mb4) }
            }
            "json" => Kind::Json { prefix: 4 },
            "geometry" | "point" | "linestring" | "polygon" | "multipoint" | "multilinestring" | "multipolygon"
            | "geometrycollection" | "geomcollection" => Kind::Geometry { prefix: 4 },
            "vector" => self.vector(mariadb)?,
            "uuid" => Kind::Uuid,
            "inet4" => Kind::Inet4,
            "inet6" => Kind::Inet6,
            "null" => Kind::Null,
            _ => return Err(invalid(self.text, "no such type")),
        })
    }
}

fn large_prefix(name: &str) -> u8 {
    match name {
        "tinytext" | "tinyblob" => 1,
        "mediumtext" | "mediumblob" => 3,
        "longtext" | "longblob" => 4,
        _ => 2,
    }
}

impl Kind {
    /// Parses a type as `information_schema.COLUMNS.COLUMN_TYPE` prints it, with the column's charset.
    ///
    /// Raises `SchemaInvalid` for an unknown type, and for text columns without a charset.
    pub fn declared(type_text: &str, charset: Option<Charset>, mariadb: bool) -> Result<Kind> {
        let kind = Parsed::parse(type_text)?.kind(charset, mariadb);
        kind.map_err(|error| match error.kind() {
            ErrorKind::SchemaInvalid => error,
            _ => invalid(type_text, error.message()),
        })
    }

    /// Returns the type in SQL, in a form that `Kind::declared` parses.
    pub fn type_text(&self) -> String {
        match self {
            Kind::Null => "null".to_owned(),
            Kind::Integer { bytes, unsigned } => integer::type_text(*bytes, *unsigned),
            Kind::Float => "float".to_owned(),
            Kind::Double => "double".to_owned(),
            Kind::Decimal { precision, scale } => decimal::type_text(*precision, *scale),
            Kind::Bit { bits } => bit::type_text(*bits),
            Kind::Year => "year".to_owned(),
            Kind::Date => "date".to_owned(),
            Kind::Time { fsp, .. } => fraction::type_text("time", *fsp),
            Kind::DateTime { fsp, .. } => fraction::type_text("datetime", *fsp),
            Kind::Timestamp { fsp, .. } => fraction::type_text("timestamp", *fsp),
            Kind::Text { prefix, form, charset } => text::type_text(*prefix, *form, *charset),
            Kind::Binary { prefix, form } => binary::type_text(*prefix, *form),
            Kind::CompressedText { prefix, form, charset } => {
                compressed::type_text(text::type_text(*prefix, compressed::plain_form(*form), *charset))
            }
            Kind::CompressedBinary { prefix, form } => {
                compressed::type_text(binary::type_text(*prefix, compressed::plain_form(*form)))
            }
            Kind::Enumeration { values, .. } => members::type_text("enum", values),
            Kind::Set { values, .. } => members::type_text("set", values),
            Kind::Json { .. } => "json".to_owned(),
            Kind::Geometry { .. } => "geometry".to_owned(),
            Kind::Vector { dimensions, .. } => vector::type_text(*dimensions),
            Kind::Uuid => "uuid".to_owned(),
            Kind::Inet4 => "inet4".to_owned(),
            Kind::Inet6 => "inet6".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(text: &str) -> Kind {
        Kind::declared(text, Some(Charset::Utf8mb4), true).unwrap()
    }

    #[test]
    fn types_round_trip() {
        let texts = [
            "tinyint",
            "int unsigned",
            "bigint",
            "float",
            "double",
            "decimal(65,30)",
            "bit(64)",
            "year",
            "date",
            "time(6)",
            "datetime",
            "timestamp(3)",
            "char(0)",
            "char(255)",
            "varchar(16383)",
            "tinytext",
            "text",
            "mediumtext",
            "longtext",
            "binary(16)",
            "varbinary(65535)",
            "longblob",
            "varchar(63) /*M!100301 COMPRESSED*/",
            "blob /*M!100301 COMPRESSED*/",
            r"enum('it''s','b\\c','d\ne','(''',',')",
            "set('x','Ä')",
            "geometry",
            "vector(3)",
            "uuid",
            "inet4",
            "inet6",
        ];
        for text in texts {
            let kind = declared(text);
            assert_eq!(kind.type_text(), text);
            assert_eq!(declared(&kind.type_text()), kind);
        }
        assert_eq!(Kind::declared("json", None, false).unwrap().type_text(), "json");
    }

    #[test]
    fn synonyms_of_a_type_are_equal() {
        let pairs = [
            ("int(10) unsigned zerofill", "int unsigned"),
            ("INT(5) ZEROFILL", "int unsigned"),
            ("tinyint(1)", "tinyint"),
            ("year(4)", "year"),
            ("numeric", "decimal(10,0)"),
            ("decimal(5)", "decimal(5,0)"),
            ("float(30)", "double"),
            ("float(7,4) unsigned", "float"),
            ("bit", "bit(1)"),
            ("geomcollection", "geometry"),
            ("datetime(3) /* mariadb-5.3 */", "datetime(3)"),
            ("json", "longtext"),
            ("  varchar ( 10 )  ", "varchar(10)"),
        ];
        for (text, same) in pairs {
            assert_eq!(declared(text), declared(same), "{text}");
        }
    }

    #[test]
    fn members_keep_every_character() {
        let Kind::Enumeration { values, .. } = declared(r"enum('it''s','b\\c','d\ne','z\0y',' /* no comment */ ')")
        else {
            panic!("an ENUM");
        };
        let members: Vec<&str> = values.iter().map(AsRef::as_ref).collect();
        assert_eq!(members, ["it's", "b\\c", "d\ne", "z\0y", " /* no comment */ "]);
    }

    #[test]
    fn lengths_are_characters_of_the_charset() {
        let latin1 = Kind::declared("varchar(255)", Some(Charset::Latin1), false).unwrap();
        assert_eq!(latin1, Kind::Text { prefix: 1, form: Form::Varying(255), charset: Charset::Latin1 });
        assert_eq!(
            declared("varchar(64)"),
            Kind::Text { prefix: 2, form: Form::Varying(256), charset: Charset::Utf8mb4 }
        );
        let compressed = Kind::declared("varchar(255) /*M!100301 COMPRESSED*/", Some(Charset::Latin1), true).unwrap();
        let form = Form::Varying(256);
        assert_eq!(compressed, Kind::CompressedText { prefix: 2, form, charset: Charset::Latin1 });
    }

    #[test]
    fn unknown_types_are_rejected_by_name() {
        let texts = [
            "",
            "()",
            "strange",
            "int(",
            "int(x)",
            "varchar",
            "varchar(70000)",
            "varchar(99999999999999999999)",
            "decimal(66,0)",
            "decimal(5,6)",
            "bit(65)",
            "time(7)",
            "enum()",
            "enum('a",
            "enum('a\\",
            "int; drop",
            "vector",
            "ä",
        ];
        for text in texts {
            let error = Kind::declared(text, Some(Charset::Utf8mb4), true).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::SchemaInvalid, "{text}");
        }
        assert_eq!(Kind::declared("text", None, false).unwrap_err().kind(), ErrorKind::SchemaInvalid);
        let many = format!("set({})", vec!["'a'"; 65].join(","));
        assert_eq!(Kind::declared(&many, None, false).unwrap_err().kind(), ErrorKind::SchemaInvalid);
    }
}
