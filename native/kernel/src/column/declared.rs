//! Parses and writes SQL types: `information_schema.COLUMNS.COLUMN_TYPE` as both servers print it. The file of each
//! type defines the meaning of the words and numbers in the type's declaration.

use crate::charset::Charset;
use crate::error::{Error, ErrorKind, Result};

use super::parsed::Parsed;
use super::{binary, bit, compressed, decimal, enumeration, float, fraction, integer, members, set, text, vector};
use super::{Form, Kind, Layout};

/// A column declaration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredColumn {
    /// The name of the column.
    pub name: String,
    /// The SQL type, as information_schema.COLUMNS.COLUMN_TYPE prints it.
    pub type_text: String,
    /// The name of the character set of a text column.
    pub charset: Option<String>,
    /// Whether the column may be null.
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

/// Returns the kind of a type. Fails for an unknown name, and for arguments that the type does not accept.
fn kind_of(parsed: &Parsed<'_>, charset: Option<Charset>, mariadb: bool) -> Result<Kind> {
    let layout = Layout::Packed;
    let integer = |bytes| Kind::Integer { bytes, unsigned: integer::declared_unsigned(parsed) };
    let fsp = || fraction::declared(parsed);
    let text = |declared: fn(&Parsed<'_>, Charset) -> Result<(u8, Form)>| {
        let charset = charset.ok_or_else(|| parsed.invalid("a text column without its character set"))?;
        declared(parsed, charset).map(|(prefix, form)| text_kind(parsed, prefix, form, charset))
    };
    let bytes = |declared: fn(&Parsed<'_>, Charset) -> Result<(u8, Form)>| {
        let (prefix, form) = declared(parsed, Charset::Binary)?;
        Ok::<Kind, Error>(text_kind(parsed, prefix, form, Charset::Binary))
    };
    Ok(match parsed.name() {
        "tinyint" | "bool" | "boolean" => integer(1),
        "smallint" => integer(2),
        "mediumint" => integer(3),
        "int" | "integer" => integer(4),
        "bigint" => integer(8),
        "float" if !float::declared_double(parsed) => Kind::Float,
        "float" | "double" | "real" => Kind::Double,
        "decimal" | "numeric" | "dec" | "fixed" => {
            let (precision, scale) = decimal::declared(parsed)?;
            Kind::Decimal { precision, scale }
        }
        "bit" => Kind::Bit { bits: bit::declared(parsed)? },
        "year" => Kind::Year,
        "date" => Kind::Date,
        "time" => Kind::Time { fsp: fsp()?, layout },
        "datetime" => Kind::DateTime { fsp: fsp()?, layout },
        "timestamp" => Kind::Timestamp { fsp: fsp()?, layout },
        "char" => text(text::declared_fixed)?,
        "varchar" => text(text::declared_varying)?,
        "tinytext" | "text" | "mediumtext" | "longtext" => text(text::declared_large)?,
        "binary" => bytes(text::declared_fixed)?,
        "varbinary" => bytes(text::declared_varying)?,
        "tinyblob" | "blob" | "mediumblob" | "longblob" => bytes(text::declared_large)?,
        "enum" => {
            let (bytes, values) = enumeration::declared(parsed)?;
            Kind::Enumeration { bytes, values }
        }
        "set" => {
            let (bytes, values) = set::declared(parsed)?;
            Kind::Set { bytes, values }
        }
        "json" if mariadb => Kind::Text { prefix: 4, form: Form::Large, charset: charset.unwrap_or(Charset::Utf8mb4) },
        "json" => Kind::Json { prefix: 4 },
        "geometry" | "point" | "linestring" | "polygon" | "multipoint" | "multilinestring" | "multipolygon"
        | "geometrycollection" | "geomcollection" => Kind::Geometry { prefix: 4 },
        "vector" => {
            let (prefix, dimensions) = vector::declared(parsed, mariadb)?;
            Kind::Vector { prefix, dimensions }
        }
        "uuid" => Kind::Uuid,
        "inet4" => Kind::Inet4,
        "inet6" => Kind::Inet6,
        "null" => Kind::Null,
        _ => return Err(parsed.invalid("no such type")),
    })
}

/// Returns the kind of a text column, which is a binary kind for the character set `binary`.
fn text_kind(parsed: &Parsed<'_>, prefix: u8, form: Form, charset: Charset) -> Kind {
    match (charset.is_binary(), parsed.has("compressed")) {
        (true, false) => Kind::Binary { prefix, form },
        (false, false) => Kind::Text { prefix, form, charset },
        (true, true) => Kind::CompressedBinary { prefix, form },
        (false, true) => Kind::CompressedText { prefix, form, charset },
    }
}

impl Kind {
    /// Parses a type as `information_schema.COLUMNS.COLUMN_TYPE` prints it, with the column's charset.
    ///
    /// Raises `SchemaInvalid` for an unknown type, and for text columns without a charset.
    pub fn declared(type_text: &str, charset: Option<Charset>, mariadb: bool) -> Result<Kind> {
        let parsed = Parsed::parse(type_text)?;
        kind_of(&parsed, charset, mariadb).map_err(|error| match error.kind() {
            ErrorKind::SchemaInvalid => error,
            _ => parsed.invalid(error.message()),
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
