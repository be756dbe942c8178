//! Writes table maps with the metadata of `binlog_row_metadata=FULL`.

use super::events::length_encoded;
use crate::column::{Form, Kind};
use crate::error::{Error, ErrorKind, Result};
use crate::event::table_map::code;

/// The number of the collation of binary columns.
pub const COLLATION_BINARY: u16 = 63;

/// A column of a table that is written.
#[derive(Debug, Clone)]
pub struct WrittenColumn {
    /// The name in UTF-8.
    pub name: String,
    /// The type. Text is written unchanged, in the character set of the type.
    pub kind: Kind,
    /// Whether the column may be null.
    pub nullable: bool,
    /// The collation of a text, an ENUM or a SET, by MySQL's number.
    pub collation: u16,
}

/// A part of a primary key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyPart {
    /// The index of the column.
    pub column: usize,
    /// Number of characters of the column that the key contains; 0 for the whole value.
    pub prefix: u32,
}

/// A table that is written.
#[derive(Debug, Clone)]
pub struct WrittenTable {
    /// The number that rows events use for the table.
    pub id: u64,
    /// The database in UTF-8.
    pub database: String,
    /// The table in UTF-8.
    pub table: String,
    /// The columns in table order.
    pub columns: Vec<WrittenColumn>,
    /// The primary key; empty if there is none.
    pub primary_key: Vec<KeyPart>,
}

/// Fields of the optional metadata (`Table_map_event::Optional_metadata_field_type`).
mod field {
    pub const SIGNS: u8 = 1;
    pub const CHARSETS: u8 = 3;
    pub const NAMES: u8 = 4;
    pub const SET_MEMBERS: u8 = 5;
    pub const ENUM_MEMBERS: u8 = 6;
    pub const PRIMARY_KEY: u8 = 8;
    pub const PRIMARY_KEY_PREFIXES: u8 = 9;
    pub const ENUMERATED_CHARSETS: u8 = 11;
    pub const VISIBILITY: u8 = 12;
}

/// The type code of a column and its metadata (`Field::do_save_field_metadata`).
struct Layout {
    code: u8,
    metadata: Vec<u8>,
}

fn layout(kind: &Kind) -> Result<Layout> {
    let (code, metadata) = match kind {
        Kind::Integer { bytes: 1, .. } => (code::TINY, vec![]),
        Kind::Integer { bytes: 2, .. } => (code::SHORT, vec![]),
        Kind::Integer { bytes: 3, .. } => (code::INT24, vec![]),
        Kind::Integer { bytes: 4, .. } => (code::LONG, vec![]),
        Kind::Integer { .. } => (code::LONGLONG, vec![]),
        Kind::Float => (code::FLOAT, vec![4]),
        Kind::Double => (code::DOUBLE, vec![8]),
        Kind::Decimal { precision, scale } => (code::NEWDECIMAL, vec![*precision, *scale]),
        Kind::Bit { bits } => (code::BIT, vec![bits % 8, bits / 8]),
        Kind::Year => (code::YEAR, vec![]),
        Kind::Date => (code::DATE, vec![]),
        Kind::Time { fsp, .. } => (code::TIME2, vec![*fsp]),
        Kind::DateTime { fsp, .. } => (code::DATETIME2, vec![*fsp]),
        Kind::Timestamp { fsp, .. } => (code::TIMESTAMP2, vec![*fsp]),
        Kind::Text { prefix, form, .. } | Kind::Binary { prefix, form } => match form {
            // The two high bits of a length over 255 are stored in the type byte, inverted.
            Form::Fixed(bytes) => {
                let [low, high] = bytes.to_le_bytes();
                (code::STRING, vec![code::STRING ^ (high & 3) << 4, low])
            }
            Form::Varying(bytes) => (code::VARCHAR, bytes.to_le_bytes().to_vec()),
            Form::Large => (code::BLOB, vec![*prefix]),
        },
        Kind::Enumeration { bytes, .. } => (code::STRING, vec![code::ENUM, *bytes]),
        Kind::Set { bytes, .. } => (code::STRING, vec![code::SET, *bytes]),
        Kind::Json { prefix } => (code::JSON, vec![*prefix]),
        Kind::Null
        | Kind::CompressedText { .. }
        | Kind::CompressedBinary { .. }
        | Kind::Geometry { .. }
        | Kind::Vector { .. }
        | Kind::Uuid
        | Kind::Inet4
        | Kind::Inet6 => {
            let message = format!("a column of {} cannot be written to a binlog", kind.type_text());
            return Err(Error::new(ErrorKind::EventUnsupported, message));
        }
    };
    Ok(Layout { code, metadata })
}

/// The class of a column in the optional metadata.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Number { unsigned: bool },
    Text,
    Enumeration,
    Set,
    Other,
}

fn class(kind: &Kind) -> Class {
    match kind {
        Kind::Integer { unsigned, .. } => Class::Number { unsigned: *unsigned },
        Kind::Float | Kind::Double | Kind::Decimal { .. } => Class::Number { unsigned: false },
        Kind::Year => Class::Number { unsigned: true },
        Kind::Text { .. } | Kind::Binary { .. } => Class::Text,
        Kind::Enumeration { .. } => Class::Enumeration,
        Kind::Set { .. } => Class::Set,
        _ => Class::Other,
    }
}

impl WrittenTable {
    /// Appends the body of a table map.
    ///
    /// Raises `EventUnsupported` for a column whose type only MariaDB has, `LimitExceeded` for a name of over 255 bytes.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        out.extend_from_slice(self.id.to_le_bytes().get(..6).unwrap_or_default());
        // The server sets the lowest bit in every table map.
        out.extend_from_slice(&1u16.to_le_bytes());
        for name in [&self.database, &self.table] {
            if name.len() > 250 {
                let message = format!("`{name}` has {} bytes, too many for a table map", name.len());
                return Err(Error::new(ErrorKind::LimitExceeded, message));
            }
            length_encoded(name.len() as u64, out);
            out.extend_from_slice(name.as_bytes());
            out.push(0);
        }
        length_encoded(self.columns.len() as u64, out);
        let mut metadata = Vec::new();
        for column in &self.columns {
            let layout = layout(&column.kind).map_err(|error| error.within(&format!("column `{}`", column.name)))?;
            out.push(layout.code);
            metadata.extend_from_slice(&layout.metadata);
        }
        length_encoded(metadata.len() as u64, out);
        out.extend_from_slice(&metadata);
        let mut nulls = vec![0u8; self.columns.len().div_ceil(8)];
        for (index, _) in self.columns.iter().enumerate().filter(|(_, column)| column.nullable) {
            if let Some(byte) = nulls.get_mut(index / 8) {
                *byte |= 1 << (index % 8);
            }
        }
        out.extend_from_slice(&nulls);
        self.write_optional(out);
        Ok(())
    }

    fn write_optional(&self, out: &mut Vec<u8>) {
        let signs = self.columns.iter().filter_map(|column| match class(&column.kind) {
            Class::Number { unsigned } => Some(unsigned),
            _ => None,
        });
        optional(field::SIGNS, &high_bits(signs), out);
        optional(field::CHARSETS, &self.collations(|class| class == Class::Text), out);
        let mut names = Vec::new();
        for column in &self.columns {
            text(&column.name, &mut names);
        }
        optional(field::NAMES, &names, out);
        optional(field::SET_MEMBERS, &self.members(Class::Set), out);
        optional(field::ENUM_MEMBERS, &self.members(Class::Enumeration), out);
        let mut key = Vec::new();
        let has_prefixes = self.primary_key.iter().any(|part| part.prefix > 0);
        for part in &self.primary_key {
            length_encoded(part.column as u64, &mut key);
            if has_prefixes {
                length_encoded(part.prefix.into(), &mut key);
            }
        }
        optional(if has_prefixes { field::PRIMARY_KEY_PREFIXES } else { field::PRIMARY_KEY }, &key, out);
        let enumerated = |class| matches!(class, Class::Enumeration | Class::Set);
        optional(field::ENUMERATED_CHARSETS, &self.collations(enumerated), out);
        optional(field::VISIBILITY, &high_bits(self.columns.iter().map(|_| true)), out);
    }

    fn collations(&self, selected: impl Fn(Class) -> bool) -> Vec<u8> {
        let mut collations = Vec::new();
        for column in self.columns.iter().filter(|column| selected(class(&column.kind))) {
            length_encoded(column.collation.into(), &mut collations);
        }
        collations
    }

    fn members(&self, selected: Class) -> Vec<u8> {
        let mut members = Vec::new();
        for column in self.columns.iter().filter(|column| class(&column.kind) == selected) {
            if let Kind::Enumeration { values, .. } | Kind::Set { values, .. } = &column.kind {
                length_encoded(values.len() as u64, &mut members);
                for value in values.iter() {
                    text(value, &mut members);
                }
            }
        }
        members
    }
}

/// Appends a field, unless it is empty.
fn optional(field: u8, value: &[u8], out: &mut Vec<u8>) {
    if !value.is_empty() {
        out.push(field);
        length_encoded(value.len() as u64, out);
        out.extend_from_slice(value);
    }
}

fn text(value: &str, out: &mut Vec<u8>) {
    length_encoded(value.len() as u64, out);
    out.extend_from_slice(value.as_bytes());
}

/// Packs flags as bits, starting with the highest bit of the first byte.
fn high_bits(values: impl Iterator<Item = bool>) -> Vec<u8> {
    let mut bits: Vec<u8> = Vec::new();
    for (index, value) in values.enumerate() {
        if index % 8 == 0 {
            bits.push(0);
        }
        if let Some(byte) = bits.last_mut() {
            *byte |= u8::from(value) << (7 - index % 8);
        }
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charset::Charset;
    use crate::event::format_description::Format;
    use crate::event::table_map::TableMap;

    const TYPES: [&str; 38] = [
        "tinyint",
        "tinyint unsigned",
        "smallint",
        "mediumint unsigned",
        "int",
        "bigint unsigned",
        "float",
        "double",
        "decimal(65,30)",
        "decimal(1,0)",
        "bit(1)",
        "bit(10)",
        "bit(64)",
        "year",
        "date",
        "time",
        "time(6)",
        "datetime",
        "datetime(3)",
        "timestamp(1)",
        "char(1)",
        "char(63)",
        "char(64)",
        "char(255)",
        "varchar(63)",
        "varchar(16383)",
        "tinytext",
        "longtext",
        "binary(255)",
        "varbinary(65535)",
        "blob",
        "mediumblob",
        "enum('x','y')",
        "set('a')",
        "set('a','b','c','d','e','f','g','h','i')",
        "json",
        "int unsigned",
        "text",
    ];

    fn table() -> WrittenTable {
        let column = |(index, type_text): (usize, &&str)| {
            let kind = Kind::declared(type_text, Some(Charset::Utf8mb4), false).unwrap();
            let collation = if matches!(kind, Kind::Binary { .. }) { COLLATION_BINARY } else { 46 };
            WrittenColumn { name: format!("c{index}"), kind, nullable: index % 3 == 0, collation }
        };
        WrittenTable {
            id: 0x7f_0000_0001,
            database: "shop".to_owned(),
            table: "types".to_owned(),
            columns: TYPES.iter().enumerate().map(column).collect(),
            primary_key: vec![KeyPart { column: 4, prefix: 0 }, KeyPart { column: 20, prefix: 3 }],
        }
    }

    #[test]
    fn a_table_map_is_read_as_it_was_written() {
        let written = table();
        let mut body = Vec::new();
        written.write(&mut body).unwrap();
        let head = crate::write::file::head(1, 2).unwrap();
        let format = Format::read(head.get(23..head.len() - 31).unwrap()).unwrap();
        let map = TableMap::read(&body, &format).unwrap();
        assert_eq!((map.table_id, &*map.database, &*map.table), (0x7f_0000_0001, "shop", "types"));
        assert_eq!(map.primary_key.iter().map(|name| &**name).collect::<Vec<_>>(), ["c4", "c20"]);
        for (column, written) in map.columns.iter().zip(&written.columns) {
            let kind = Kind::from_wire(column.wire, &column.hints).unwrap();
            assert_eq!((column.name.as_deref(), &kind), (Some(written.name.as_str()), &written.kind));
            assert_eq!(column.nullable, written.nullable);
        }
    }

    #[test]
    fn types_of_mariadb_are_refused_by_column() {
        let mut written = table();
        written.columns[3].kind = Kind::Uuid;
        let error = written.write(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::EventUnsupported);
        assert!(error.message().starts_with("column `c3`"), "{error}");
    }
}
