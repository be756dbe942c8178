//! Derives a [`Kind`] from a table map's type byte and metadata, or checks that a declared kind fits them.
//!
//! Source: `enum_field_types` of the server and each field's `do_save_field_metadata`.

use std::sync::Arc;

use crate::charset::Charset;
use crate::error::{Error, ErrorKind, Result};

use super::layout::prefix_of;
use super::{enumeration, set, Form, Kind, Layout};

/// A column as a table map describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wire {
    /// The server's type number.
    pub code: u8,
    /// The metadata bytes: the first in the low half, the second in the high half.
    pub metadata: u16,
}

/// Information that a [`Wire`] lacks, from a table map's optional metadata or a declared schema.
#[derive(Debug, Clone, Default)]
pub struct Hints {
    /// The integer is unsigned.
    pub unsigned: bool,
    /// The character set of a text column; `binary` for a column of bytes.
    pub charset: Option<Charset>,
    /// The members of an ENUM or SET in their order; empty for a column that is only skipped.
    pub values: Option<Arc<[Arc<str>]>>,
    /// The actual type of a column that MariaDB logs as a plain string.
    pub special: Option<Special>,
    /// Whether the log is from MariaDB.
    pub mariadb: bool,
}

/// MariaDB's types that are logged as plain strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Special {
    Uuid,
    Inet4,
    Inet6,
    Vector,
}

const NULL: u8 = 6;
const STRING: u8 = 254;
const ENUM: u8 = 247;
const SET: u8 = 248;

/// Returns the name of a type number, for messages.
fn code_name(code: u8) -> &'static str {
    match code {
        0 => "DECIMAL of before 5.0",
        1 => "TINY",
        2 => "SHORT",
        3 => "LONG",
        4 => "FLOAT",
        5 => "DOUBLE",
        NULL => "NULL",
        7 => "TIMESTAMP",
        8 => "LONGLONG",
        9 => "INT24",
        10 => "DATE",
        11 => "TIME",
        12 => "DATETIME",
        13 => "YEAR",
        14 => "NEWDATE",
        15 => "VARCHAR",
        16 => "BIT",
        17 => "TIMESTAMP2",
        18 => "DATETIME2",
        19 => "TIME2",
        20 => "TYPED_ARRAY",
        140 => "BLOB_COMPRESSED",
        141 => "VARCHAR_COMPRESSED",
        242 => "VECTOR",
        243 => "INVALID",
        244 => "BOOL",
        245 => "JSON",
        246 => "NEWDECIMAL",
        ENUM => "ENUM",
        SET => "SET",
        249 => "TINY_BLOB",
        250 => "MEDIUM_BLOB",
        251 => "LONG_BLOB",
        252 => "BLOB",
        253 => "VAR_STRING",
        STRING => "STRING",
        255 => "GEOMETRY",
        _ => "unknown",
    }
}

/// A wire type with parsed metadata, before signs, charsets and members are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Plain(Plain),
    Decimal { precision: u8, scale: u8 },
    Bit { bits: u8 },
    Temporal { family: Family, fsp: u8, packed: bool },
    String { form: Form, prefix: u8 },
    Compressed { form: Form, prefix: u8 },
    Enumeration { bytes: u8 },
    Set { bytes: u8 },
    Json { prefix: u8 },
    Geometry { prefix: u8 },
    Vector { prefix: u8 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plain {
    Null,
    Integer(u8),
    Float,
    Double,
    Year,
    Date,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Time,
    DateTime,
    Timestamp,
}

fn unknown(wire: Wire, why: &str) -> Error {
    let Wire { code, metadata } = wire;
    let message = format!("column type {code} ({}) with metadata {metadata:#06x}: {why}", code_name(code));
    Error::new(ErrorKind::EventUnknown, message)
}

fn string_shape(wire: Wire) -> Result<Shape> {
    let [first, second] = wire.metadata.to_le_bytes();
    // A CHAR of over 255 bytes stores the two high bits of its length, inverted, in the type byte.
    let (real, length) = if first & 0x30 == 0x30 {
        (first, u16::from(second))
    } else {
        (first | 0x30, u16::from(second) | u16::from((first & 0x30) ^ 0x30) << 4)
    };
    match real {
        STRING | 253 => Ok(Shape::String { form: Form::Fixed(length), prefix: prefix_of(length) }),
        ENUM => enumeration_shape(wire, second),
        SET => set_shape(wire, second),
        _ => Err(unknown(wire, "a string of an unknown real type")),
    }
}

fn enumeration_shape(wire: Wire, bytes: u8) -> Result<Shape> {
    match bytes {
        1 | 2 => Ok(Shape::Enumeration { bytes }),
        _ => Err(unknown(wire, "an ENUM takes 1 or 2 bytes")),
    }
}

fn set_shape(wire: Wire, bytes: u8) -> Result<Shape> {
    match bytes {
        1..=4 | 8 => Ok(Shape::Set { bytes }),
        _ => Err(unknown(wire, "a SET takes 1, 2, 3, 4 or 8 bytes")),
    }
}

fn shape(wire: Wire) -> Result<Shape> {
    let [first, second] = wire.metadata.to_le_bytes();
    let fsp = || if first <= 6 { Ok(first) } else { Err(unknown(wire, "more than 6 fractional digits")) };
    let prefix = || if (1..=4).contains(&first) { Ok(first) } else { Err(unknown(wire, "a length of 1 to 4 bytes")) };
    let varying = Form::Varying(wire.metadata);
    Ok(match wire.code {
        1 => Shape::Plain(Plain::Integer(1)),
        2 => Shape::Plain(Plain::Integer(2)),
        9 => Shape::Plain(Plain::Integer(3)),
        3 => Shape::Plain(Plain::Integer(4)),
        8 => Shape::Plain(Plain::Integer(8)),
        4 => Shape::Plain(Plain::Float),
        5 => Shape::Plain(Plain::Double),
        NULL => Shape::Plain(Plain::Null),
        13 => Shape::Plain(Plain::Year),
        10 | 14 => Shape::Plain(Plain::Date),
        7 => Shape::Temporal { family: Family::Timestamp, fsp: 0, packed: false },
        11 => Shape::Temporal { family: Family::Time, fsp: 0, packed: false },
        12 => Shape::Temporal { family: Family::DateTime, fsp: 0, packed: false },
        17 => Shape::Temporal { family: Family::Timestamp, fsp: fsp()?, packed: true },
        18 => Shape::Temporal { family: Family::DateTime, fsp: fsp()?, packed: true },
        19 => Shape::Temporal { family: Family::Time, fsp: fsp()?, packed: true },
        15 | 253 => Shape::String { form: varying, prefix: prefix_of(wire.metadata) },
        16 => match u16::from(first) + 8 * u16::from(second) {
            bits @ 1..=64 if first < 8 => Shape::Bit { bits: bits as u8 },
            _ => return Err(unknown(wire, "a BIT has 1 to 64 bits")),
        },
        140 => Shape::Compressed { form: Form::Large, prefix: prefix()? },
        141 => Shape::Compressed { form: varying, prefix: prefix_of(wire.metadata) },
        242 => Shape::Vector { prefix: prefix()? },
        245 => Shape::Json { prefix: prefix()? },
        246 => match (first, second) {
            (1..=65, 0..=38) if second <= first => Shape::Decimal { precision: first, scale: second },
            _ => return Err(unknown(wire, "a DECIMAL has 1 to 65 digits, up to 38 of them behind the point")),
        },
        ENUM => enumeration_shape(wire, second)?,
        SET => set_shape(wire, second)?,
        249..=252 => Shape::String { form: Form::Large, prefix: prefix()? },
        STRING => string_shape(wire)?,
        255 => Shape::Geometry { prefix: prefix()? },
        20 => return Err(unknown(wire, "arrays stand only in indexes, never in rows")),
        _ => return Err(unknown(wire, "no type that a row can hold")),
    })
}

fn schema_unknown(what: &str) -> Error {
    Error::new(ErrorKind::SchemaUnknown, format!("the log does not say {what}"))
        .hint("Run SET GLOBAL binlog_row_metadata='FULL' on the server, or give the table's schema.")
}

/// MariaDB never logs the number of fractional digits of its old temporal types, whatever the metadata setting.
fn fraction_unknown() -> Error {
    let message = "the log does not say how many fractional digits a column of an old temporal type has";
    Error::new(ErrorKind::SchemaUnknown, message)
        .hint("Give the table's schema, or rebuild the table by ALTER TABLE ... FORCE with mysql56_temporal_format=ON.")
}

impl Family {
    fn kind(self, fsp: u8, layout: Layout) -> Kind {
        match self {
            Family::Time => Kind::Time { fsp, layout },
            Family::DateTime => Kind::DateTime { fsp, layout },
            Family::Timestamp => Kind::Timestamp { fsp, layout },
        }
    }
}

impl Plain {
    fn kind(self, unsigned: bool) -> Kind {
        match self {
            Plain::Null => Kind::Null,
            Plain::Integer(bytes) => Kind::Integer { bytes, unsigned },
            Plain::Float => Kind::Float,
            Plain::Double => Kind::Double,
            Plain::Year => Kind::Year,
            Plain::Date => Kind::Date,
        }
    }
}

fn string_kind(form: Form, prefix: u8, charset: Charset, compressed: bool) -> Kind {
    match (charset.is_binary(), compressed) {
        (true, false) => Kind::Binary { prefix, form },
        (false, false) => Kind::Text { prefix, form, charset },
        (true, true) => Kind::CompressedBinary { prefix, form },
        (false, true) => Kind::CompressedText { prefix, form, charset },
    }
}

impl Kind {
    /// Returns the kind of a column that the log describes completely.
    ///
    /// Raises `EventUnknown` for a type that rows cannot have, `SchemaUnknown` if necessary information is not in the
    /// log: the charset of a string, the members of an ENUM or SET, or the fractional digits of MariaDB's old temporal
    /// types.
    pub fn from_wire(wire: Wire, hints: &Hints) -> Result<Kind> {
        let values = || hints.values.clone().ok_or_else(|| schema_unknown("the members of an ENUM or SET"));
        let charset = || hints.charset.ok_or_else(|| schema_unknown("the character set of a string column"));
        Ok(match shape(wire)? {
            Shape::Plain(plain) => plain.kind(hints.unsigned),
            Shape::Decimal { precision, scale } => Kind::Decimal { precision, scale },
            Shape::Bit { bits } => Kind::Bit { bits },
            Shape::Temporal { family, fsp, packed: true } => family.kind(fsp, Layout::Packed),
            Shape::Temporal { packed: false, .. } if hints.mariadb => return Err(fraction_unknown()),
            Shape::Temporal { family, fsp, packed: false } => family.kind(fsp, Layout::Classic),
            Shape::String { form, prefix } => match (hints.special, form) {
                (Some(Special::Uuid), Form::Fixed(16)) => Kind::Uuid,
                (Some(Special::Inet6), Form::Fixed(16)) => Kind::Inet6,
                (Some(Special::Inet4), Form::Fixed(4)) => Kind::Inet4,
                (Some(Special::Vector), Form::Varying(bytes)) if bytes % 4 == 0 => {
                    Kind::Vector { prefix, dimensions: Some(bytes / 4) }
                }
                (Some(_), _) => return Err(unknown(wire, "not the length of the type it is said to be")),
                (None, _) => string_kind(form, prefix, charset()?, false),
            },
            Shape::Compressed { form, prefix } => string_kind(form, prefix, charset()?, true),
            Shape::Enumeration { bytes } => match values()? {
                values if values.is_empty() => Kind::Enumeration { bytes, values },
                values => Kind::Enumeration { bytes, values: enumeration::members(bytes, values)? },
            },
            Shape::Set { bytes } => match values()? {
                values if values.is_empty() => Kind::Set { bytes, values },
                values => Kind::Set { bytes, values: set::members(bytes, values)? },
            },
            Shape::Json { prefix } => Kind::Json { prefix },
            Shape::Geometry { prefix } => Kind::Geometry { prefix },
            Shape::Vector { prefix } => Kind::Vector { prefix, dimensions: None },
        })
    }

    /// Returns a kind that has the column's width but not its meaning.
    ///
    /// It is enough to skip a column that was not selected, or to copy it as raw bytes. Raises `EventUnknown` for a
    /// type that rows cannot have, and for the old temporal types of MariaDB, whose width is not logged.
    pub fn opaque(wire: Wire, mariadb: bool) -> Result<Kind> {
        let empty = || Arc::from(Vec::new());
        Ok(match shape(wire)? {
            Shape::Enumeration { bytes } => Kind::Enumeration { bytes, values: empty() },
            Shape::Set { bytes } => Kind::Set { bytes, values: empty() },
            Shape::String { form, prefix } => Kind::Binary { prefix, form },
            Shape::Compressed { form, prefix } => Kind::CompressedBinary { prefix, form },
            _ => Kind::from_wire(wire, &Hints { mariadb, ..Hints::default() })?,
        })
    }

    /// Checks a declared kind against the table map, and returns the kind for reading values.
    ///
    /// The type's family, length class, precision, scale, fractional digits and storage width must match. Information
    /// that the table map does not contain (sign, charset, members) is taken from the declared kind. Raises
    /// `SchemaMismatch`, which names both types, `EventUnknown` for a type that rows cannot have.
    pub fn fit(&self, wire: Wire) -> Result<Kind> {
        let mismatch = || {
            let Wire { code, metadata } = wire;
            let name = code_name(code);
            let declared = self.type_text();
            let message = format!("declared as {declared}, but the log holds {name} with metadata {metadata:#06x}");
            Error::new(ErrorKind::SchemaMismatch, message)
        };
        self.fit_shape(shape(wire)?).ok_or_else(mismatch)
    }

    fn fit_shape(&self, logged: Shape) -> Option<Kind> {
        let fits = match self {
            Kind::Null => logged == Shape::Plain(Plain::Null),
            Kind::Integer { bytes, .. } => logged == Shape::Plain(Plain::Integer(*bytes)),
            Kind::Float => logged == Shape::Plain(Plain::Float),
            Kind::Double => logged == Shape::Plain(Plain::Double),
            Kind::Year => logged == Shape::Plain(Plain::Year),
            Kind::Date => logged == Shape::Plain(Plain::Date),
            Kind::Decimal { precision, scale } => logged == Shape::Decimal { precision: *precision, scale: *scale },
            Kind::Bit { bits } => logged == Shape::Bit { bits: *bits },
            Kind::Time { fsp, .. } => return fit_temporal(Family::Time, *fsp, logged),
            Kind::DateTime { fsp, .. } => return fit_temporal(Family::DateTime, *fsp, logged),
            Kind::Timestamp { fsp, .. } => return fit_temporal(Family::Timestamp, *fsp, logged),
            Kind::Enumeration { bytes, .. } => logged == Shape::Enumeration { bytes: *bytes },
            Kind::Set { bytes, .. } => logged == Shape::Set { bytes: *bytes },
            Kind::Json { prefix } => logged == Shape::Json { prefix: *prefix },
            Kind::Geometry { prefix } => logged == Shape::Geometry { prefix: *prefix },
            Kind::Vector { prefix, dimensions } => fits_vector(*prefix, *dimensions, logged),
            Kind::Uuid | Kind::Inet6 => matches!(logged, Shape::String { form: Form::Fixed(16), .. }),
            Kind::Inet4 => matches!(logged, Shape::String { form: Form::Fixed(4), .. }),
            Kind::Text { prefix, form, charset } => {
                let form = fit_string(*prefix, *form, logged, false)?;
                return Some(Kind::Text { prefix: *prefix, form, charset: *charset });
            }
            Kind::Binary { prefix, form } => {
                let form = fit_string(*prefix, *form, logged, false)?;
                return Some(Kind::Binary { prefix: *prefix, form });
            }
            Kind::CompressedText { prefix, form, charset } => {
                let form = fit_string(*prefix, *form, logged, true)?;
                return Some(Kind::CompressedText { prefix: *prefix, form, charset: *charset });
            }
            Kind::CompressedBinary { prefix, form } => {
                let form = fit_string(*prefix, *form, logged, true)?;
                return Some(Kind::CompressedBinary { prefix: *prefix, form });
            }
        };
        fits.then(|| self.clone())
    }
}

fn fit_temporal(declared: Family, digits: u8, logged: Shape) -> Option<Kind> {
    let Shape::Temporal { family, fsp, packed } = logged else { return None };
    match (packed, digits) {
        _ if declared != family => None,
        (true, _) => (digits == fsp).then(|| family.kind(fsp, Layout::Packed)),
        (false, 0) => Some(family.kind(0, Layout::Classic)),
        // Only MariaDB stores a fraction in a column with the old type number.
        (false, _) => Some(family.kind(digits, Layout::Counted)),
    }
}

/// MariaDB logs vectors as plain strings, whereas MySQL has a separate type for them.
fn fits_vector(declared: u8, dimensions: Option<u16>, logged: Shape) -> bool {
    match logged {
        Shape::Vector { prefix } => prefix == declared,
        Shape::String { form: Form::Varying(bytes), prefix } => {
            prefix == declared && dimensions.is_none_or(|count| u32::from(count) * 4 == u32::from(bytes))
        }
        _ => false,
    }
}

/// Returns the logged length, if the log describes a string with the same length class and the same prefix.
fn fit_string(declared: u8, length: Form, logged: Shape, compressed: bool) -> Option<Form> {
    let (form, prefix, packed) = match logged {
        Shape::String { form, prefix } => (form, prefix, false),
        Shape::Compressed { form, prefix } => (form, prefix, true),
        _ => return None,
    };
    let same_class = match (length, form) {
        (Form::Fixed(_), Form::Fixed(_)) | (Form::Varying(_), Form::Varying(_)) => true,
        (declared, logged) => declared == logged,
    };
    (prefix == declared && packed == compressed && same_class).then_some(form)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(code: u8, first: u8, second: u8) -> Wire {
        Wire { code, metadata: u16::from_le_bytes([first, second]) }
    }

    fn described(wire: Wire, hints: &Hints) -> String {
        Kind::from_wire(wire, hints).unwrap().type_text()
    }

    #[test]
    fn the_log_alone_names_the_types() {
        let plain = Hints { charset: Some(Charset::Latin1), ..Hints::default() };
        let bytes = Hints { charset: Some(Charset::Binary), ..Hints::default() };
        let cases = [
            (wire(1, 0, 0), "tinyint"),
            (wire(9, 0, 0), "mediumint"),
            (wire(246, 10, 2), "decimal(10,2)"),
            (wire(16, 1, 8), "bit(65)"),
            (wire(16, 3, 1), "bit(11)"),
            (wire(15, 0x2c, 0x01), "varchar(300)"),
            (wire(254, 254, 10), "char(10)"),
            // CHAR(255) of utf8mb4: 1020 bytes, whose high bits are stored inverted in the type byte.
            (wire(254, 0xce, 0xfc), "char(1020)"),
            (wire(252, 3, 0), "mediumtext"),
            (wire(18, 6, 0), "datetime(6)"),
            (wire(12, 0, 0), "datetime"),
            (wire(245, 4, 0), "json"),
            (wire(141, 0, 1), "varchar(255) /*M!100301 COMPRESSED*/"),
        ];
        for (wire, text) in cases {
            match text {
                "bit(65)" => assert_eq!(Kind::from_wire(wire, &plain).unwrap_err().kind(), ErrorKind::EventUnknown),
                text => assert_eq!(described(wire, &plain), text),
            }
        }
        assert_eq!(described(wire(252, 2, 0), &bytes), "blob");
        assert_eq!(described(wire(254, 254, 16), &bytes), "binary(16)");
        let uuid = Hints { special: Some(Special::Uuid), ..bytes };
        assert_eq!(described(wire(254, 254, 16), &uuid), "uuid");
        assert!(Kind::from_wire(wire(254, 254, 15), &uuid).is_err());
    }

    #[test]
    fn missing_information_is_named() {
        let none = Hints::default();
        for open in [wire(15, 10, 0), wire(252, 2, 0), wire(254, 247, 1), wire(254, 248, 8)] {
            assert_eq!(Kind::from_wire(open, &none).unwrap_err().kind(), ErrorKind::SchemaUnknown);
            assert!(Kind::opaque(open, true).is_ok());
        }
        let mariadb = Hints { mariadb: true, ..none };
        for old in [7, 11, 12] {
            assert_eq!(Kind::from_wire(wire(old, 0, 0), &mariadb).unwrap_err().kind(), ErrorKind::SchemaUnknown);
            assert!(Kind::from_wire(wire(old, 0, 0), &Hints::default()).is_ok());
        }
    }

    #[test]
    fn impossible_types_are_rejected_by_number() {
        let refused =
            [wire(0, 0, 0), wire(20, 0, 0), wire(243, 0, 0), wire(244, 0, 0), wire(100, 0, 0), wire(17, 7, 0)];
        for wire in refused.into_iter().chain([wire(246, 66, 0), wire(252, 5, 0), wire(254, 0, 0), wire(247, 247, 3)]) {
            let error = Kind::from_wire(wire, &Hints::default()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::EventUnknown);
            assert!(error.message().contains(&wire.code.to_string()));
        }
    }

    #[test]
    fn a_declared_type_has_to_agree_with_the_log() {
        let declared = |text: &str| Kind::declared(text, Some(Charset::Utf8mb4), true).unwrap();
        let agree = [
            ("int unsigned", wire(3, 0, 0)),
            ("varchar(10)", wire(15, 40, 0)),
            ("varchar(10)", wire(15, 200, 0)),
            ("char(10)", wire(254, 254, 40)),
            ("text", wire(252, 2, 0)),
            ("decimal(10,2)", wire(246, 10, 2)),
            ("enum('a','b')", wire(254, 247, 1)),
            ("uuid", wire(254, 254, 16)),
            ("vector(3)", wire(15, 12, 0)),
            ("timestamp(3)", wire(17, 3, 0)),
            ("time", wire(11, 0, 0)),
            ("text /*M!100301 COMPRESSED*/", wire(140, 2, 0)),
        ];
        for (text, wire) in agree {
            assert!(declared(text).fit(wire).is_ok(), "{text}");
        }
        let differ = [
            ("int", wire(8, 0, 0)),
            ("varchar(10)", wire(15, 0x2c, 1)),
            ("varchar(10)", wire(254, 254, 40)),
            ("text", wire(252, 3, 0)),
            ("text", wire(140, 2, 0)),
            ("decimal(10,2)", wire(246, 10, 3)),
            ("enum('a','b')", wire(254, 247, 2)),
            ("uuid", wire(254, 254, 4)),
            ("vector(3)", wire(15, 16, 0)),
            ("timestamp(3)", wire(17, 0, 0)),
            ("datetime(3)", wire(17, 3, 0)),
            ("date", wire(13, 0, 0)),
            ("float", wire(5, 8, 0)),
        ];
        for (text, wire) in differ {
            let error = declared(text).fit(wire).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::SchemaMismatch);
            assert!(error.message().contains(text), "{error}");
        }
    }

    #[test]
    fn an_old_type_number_with_a_declared_fraction_is_mariadbs() {
        let kind = Kind::DateTime { fsp: 3, layout: Layout::Packed }.fit(wire(12, 0, 0)).unwrap();
        assert_eq!(kind, Kind::DateTime { fsp: 3, layout: Layout::Counted });
        let kind = Kind::DateTime { fsp: 0, layout: Layout::Packed }.fit(wire(12, 0, 0)).unwrap();
        assert_eq!(kind, Kind::DateTime { fsp: 0, layout: Layout::Classic });
    }
}
