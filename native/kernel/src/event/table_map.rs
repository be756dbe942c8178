//! Table maps: table name, column types and optional metadata of the row images that follow.
//!
//! ```text
//! table id │ flags │ database │ table │ count │ types │ metadata │ nullable bits │ optional fields
//! ```
//!
//! The optional fields (`Table_map_event::Optional_metadata_field_type`) hold signs and character sets with
//! `binlog_row_metadata=MINIMAL`, and also names, members and keys with FULL. MariaDB with NO_LOG writes none.

use std::sync::Arc;

use crate::charset::Charset;
use crate::column::{Hints, Kind, Wire};
use crate::cursor::Cursor;
use crate::error::{malformed, Error, ErrorKind, Result};
use crate::event::format_description::Format;
use crate::limits::COLUMNS_MAX;

/// The server's type numbers.
pub(crate) mod code {
    pub const TINY: u8 = 1;
    pub const SHORT: u8 = 2;
    pub const LONG: u8 = 3;
    pub const FLOAT: u8 = 4;
    pub const DOUBLE: u8 = 5;
    pub const LONGLONG: u8 = 8;
    pub const INT24: u8 = 9;
    pub const DATE: u8 = 10;
    pub const YEAR: u8 = 13;
    pub const VARCHAR: u8 = 15;
    pub const BIT: u8 = 16;
    pub const TIMESTAMP2: u8 = 17;
    pub const DATETIME2: u8 = 18;
    pub const TIME2: u8 = 19;
    pub const TYPED_ARRAY: u8 = 20;
    pub const BLOB_COMPRESSED: u8 = 140;
    pub const VARCHAR_COMPRESSED: u8 = 141;
    pub const VECTOR: u8 = 242;
    pub const JSON: u8 = 245;
    pub const NEWDECIMAL: u8 = 246;
    pub const ENUM: u8 = 247;
    pub const SET: u8 = 248;
    pub const BLOB: u8 = 252;
    pub const VAR_STRING: u8 = 253;
    pub const STRING: u8 = 254;
    pub const GEOMETRY: u8 = 255;
}

/// A column as the log describes it.
#[derive(Debug, Clone)]
pub struct LogColumn {
    /// The column's format in a row image.
    pub wire: Wire,
    /// The name, with FULL metadata.
    pub name: Option<Arc<str>>,
    /// Sign, character set and members, as far as they are logged.
    pub hints: Hints,
    /// Whether the log contains the column's sign (for a number) or character set (for a text).
    pub described: bool,
    /// Whether the column may be null.
    pub nullable: bool,
    /// The declared type of a spatial column, with FULL metadata.
    pub geometry: Option<&'static str>,
    /// Whether `SELECT *` shows the column, with MySQL's FULL metadata.
    pub visible: Option<bool>,
}

/// The types of spatial columns, indexed by the values of `Field::geometry_type`.
const GEOMETRIES: [&str; 8] = [
    "geometry",
    "point",
    "linestring",
    "polygon",
    "multipoint",
    "multilinestring",
    "multipolygon",
    "geometrycollection",
];

/// A parsed table map.
#[derive(Debug, Clone)]
pub struct TableMap {
    /// The id that rows events use for the table. Every change of the definition changes the id.
    pub table_id: u64,
    /// The database name in UTF-8.
    pub database: Arc<str>,
    /// The table name in UTF-8.
    pub table: Arc<str>,
    /// The columns in table order.
    pub columns: Vec<LogColumn>,
    /// Names of the primary key's columns, with FULL metadata; empty otherwise.
    pub primary_key: Vec<Arc<str>>,
}

/// Reads the table id from the start of a body.
#[inline]
pub fn table_id(body: &[u8], bytes: usize) -> Result<u64> {
    Cursor::new(body).uint(bytes)
}

/// Reads the names of the database and the table from a body.
pub fn table_names(body: &[u8], id_bytes: usize) -> Result<(&[u8], &[u8])> {
    let mut cursor = Cursor::new(body);
    cursor.skip(id_bytes + 2)?;
    let database = cursor.length_encoded_bytes()?;
    cursor.skip(1)?;
    Ok((database, cursor.length_encoded_bytes()?))
}

impl TableMap {
    /// Reads the body, without checksum.
    pub fn read(body: &[u8], format: &Format) -> Result<TableMap> {
        let mut cursor = Cursor::new(body);
        let table_id = cursor.uint(format.table_id_bytes_table_map)?;
        cursor.skip(2)?;
        let database = read_name(&mut cursor)?;
        let table = read_name(&mut cursor)?;
        let count = usize::try_from(cursor.length_encoded()?).unwrap_or(usize::MAX);
        if count > COLUMNS_MAX {
            let message = format!("a table map of {count} columns");
            return Err(Error::new(ErrorKind::LimitExceeded, message));
        }
        let codes = cursor.take(count)?;
        let mut metadata = Cursor::new(cursor.length_encoded_bytes()?);
        let wires = codes.iter().map(|&code| read_wire(code, &mut metadata)).collect::<Result<Vec<Wire>>>()?;
        let nullable = cursor.take(count.div_ceil(8))?;
        let columns = wires
            .into_iter()
            .enumerate()
            .map(|(index, wire)| LogColumn {
                wire,
                name: None,
                hints: Hints { mariadb: format.mariadb, ..Hints::default() },
                described: false,
                nullable: nullable.get(index / 8).is_some_and(|byte| byte >> (index % 8) & 1 == 1),
                geometry: None,
                visible: None,
            })
            .collect();
        let mut map = TableMap { table_id, database, table, columns, primary_key: Vec::new() };
        map.read_optional(cursor, if format.mariadb { is_text_of_mariadb } else { is_text })?;
        Ok(map)
    }

    /// Whether the log alone describes the table: every column has a name.
    pub fn is_complete(&self) -> bool {
        self.columns.iter().all(|column| column.name.is_some())
    }

    /// Returns how to skip each column, which requires neither names nor signs.
    pub fn skip_kinds(&self) -> Result<Vec<Kind>> {
        self.columns.iter().map(|column| Kind::opaque(column.wire, column.hints.mariadb)).collect()
    }

    fn read_optional(&mut self, mut cursor: Cursor<'_>, text: fn(Wire) -> bool) -> Result<()> {
        let mut key: Vec<usize> = Vec::new();
        let mut members: Vec<(bool, &[u8])> = Vec::new();
        while !cursor.is_empty() {
            let field = cursor.u8()?;
            let value = cursor.length_encoded_bytes()?;
            let mut value_cursor = Cursor::new(value);
            match field {
                1 => self.signs(value),
                2 => self.default_charset(value_cursor, text)?,
                3 => self.charset_of_each(value_cursor, text)?,
                4 => {
                    for column in &mut self.columns {
                        let text = value_cursor.length_encoded_bytes()?;
                        column.name = Some(utf8(text, "a column's name")?.into());
                    }
                }
                5 => members.push((true, value)),
                6 => members.push((false, value)),
                7 => self.geometries(value_cursor)?,
                8 => {
                    while !value_cursor.is_empty() {
                        key.push(value_cursor.length_encoded()? as usize);
                    }
                }
                9 => {
                    while !value_cursor.is_empty() {
                        key.push(value_cursor.length_encoded()? as usize);
                        value_cursor.length_encoded()?;
                    }
                }
                10 => self.default_charset(value_cursor, is_enumerated)?,
                11 => self.charset_of_each(value_cursor, is_enumerated)?,
                12 => self.visibility(value),
                // Field 13 (vector dimensions) and fields of later versions do not affect how values are decoded.
                _ => {}
            }
        }
        for (sets, value) in members {
            self.members(sets, Cursor::new(value))?;
        }
        self.primary_key =
            key.iter().filter_map(|&index| self.columns.get(index).and_then(|column| column.name.clone())).collect();
        Ok(())
    }

    /// Reads one number for each spatial column.
    fn geometries(&mut self, mut cursor: Cursor<'_>) -> Result<()> {
        for column in self.columns.iter_mut().filter(|column| column.wire.code == code::GEOMETRY) {
            let number = usize::try_from(cursor.length_encoded()?).ok();
            column.geometry = number.and_then(|number| GEOMETRIES.get(number)).copied();
        }
        Ok(())
    }

    /// Reads one bit for each numeric column, starting with the highest bit of the first byte; set means unsigned.
    fn signs(&mut self, bits: &[u8]) {
        let numeric = self.columns.iter_mut().filter(|column| is_numeric(column.wire));
        for (index, column) in numeric.enumerate() {
            column.hints.unsigned = bits.get(index / 8).is_some_and(|byte| byte << (index % 8) & 0x80 != 0);
            column.described = true;
        }
    }

    /// Reads one bit for each column, starting with the highest bit of the first byte; set means visible.
    fn visibility(&mut self, bits: &[u8]) {
        for (index, column) in self.columns.iter_mut().enumerate() {
            column.visible = bits.get(index / 8).map(|byte| byte << (index % 8) & 0x80 != 0);
        }
    }

    /// Reads the default collation of a class of columns, then pairs of an index within the class and a collation.
    fn default_charset(&mut self, mut cursor: Cursor<'_>, class: fn(Wire) -> bool) -> Result<()> {
        let default = find_charset(cursor.length_encoded()?)?;
        let mut exceptions = Vec::new();
        while !cursor.is_empty() {
            exceptions.push((cursor.length_encoded()?, find_charset(cursor.length_encoded()?)?));
        }
        let columns = self.columns.iter_mut().filter(|column| class(column.wire));
        for (index, column) in columns.enumerate() {
            let exception = exceptions.iter().find(|(at, _)| *at == index as u64).map(|(_, charset)| *charset);
            column.hints.charset = Some(exception.unwrap_or(default));
            column.described = true;
        }
        Ok(())
    }

    /// Reads one collation for each column of a class.
    fn charset_of_each(&mut self, mut cursor: Cursor<'_>, class: fn(Wire) -> bool) -> Result<()> {
        for column in self.columns.iter_mut().filter(|column| class(column.wire)) {
            column.hints.charset = Some(find_charset(cursor.length_encoded()?)?);
            column.described = true;
        }
        Ok(())
    }

    /// For each SET (or ENUM) column, reads a count, then that many members in the column's character set.
    fn members(&mut self, sets: bool, mut cursor: Cursor<'_>) -> Result<()> {
        let type_code = if sets { code::SET } else { code::ENUM };
        for column in self.columns.iter_mut().filter(|column| enumerated_code(column.wire) == Some(type_code)) {
            let charset = column.hints.charset.unwrap_or(Charset::Utf8mb4);
            let mut values: Vec<Arc<str>> = Vec::new();
            for _ in 0..cursor.length_encoded()? {
                let mut text = Vec::new();
                let bytes = cursor.length_encoded_bytes()?;
                if charset.decode_into(bytes, &mut text).is_err() {
                    text.extend_from_slice(String::from_utf8_lossy(bytes).as_bytes());
                }
                values.push(String::from_utf8_lossy(&text).into());
            }
            column.hints.values = Some(values.into());
        }
        Ok(())
    }
}

fn utf8<'a>(bytes: &'a [u8], what: &str) -> Result<&'a str> {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(malformed(format!("{what} is not UTF-8, or has a zero byte"))),
    }
}

fn read_name(cursor: &mut Cursor<'_>) -> Result<Arc<str>> {
    // MySQL 8 writes the length as a length-encoded integer: a single byte for names of up to 250 bytes, more bytes for
    // longer names (64 characters of four bytes).
    let bytes = cursor.length_encoded_bytes()?;
    if cursor.u8()? != 0 {
        return Err(malformed("a table map's name does not end with a zero"));
    }
    utf8(bytes, "a table map's name").map(Arc::from)
}

fn find_charset(collation: u64) -> Result<Charset> {
    u32::try_from(collation).ok().and_then(Charset::from_collation_id).ok_or_else(|| {
        Error::new(ErrorKind::EventUnsupported, format!("collation {collation} is not known"))
            .hint("SELECT * FROM information_schema.COLLATIONS on the server names it")
    })
}

/// Reads the metadata of a type: none, one byte or two, as `Field::do_save_field_metadata` writes it.
fn read_wire(code: u8, metadata: &mut Cursor<'_>) -> Result<Wire> {
    let bytes = match code {
        code::FLOAT | code::DOUBLE | code::BLOB | code::JSON | code::GEOMETRY | code::VECTOR => 1,
        code::TIMESTAMP2 | code::DATETIME2 | code::TIME2 | code::BLOB_COMPRESSED => 1,
        code::VARCHAR | code::VARCHAR_COMPRESSED | code::BIT | code::NEWDECIMAL => 2,
        code::STRING | code::VAR_STRING | code::ENUM | code::SET => 2,
        code::TYPED_ARRAY => {
            return Err(Error::new(ErrorKind::EventUnsupported, "a column of type TYPED_ARRAY")
                .hint("the server never writes such a column into row events; the log is damaged"));
        }
        _ => 0,
    };
    let metadata = match bytes {
        0 => 0,
        1 => u16::from(metadata.u8()?),
        _ => metadata.u16()?,
    };
    Ok(Wire { code, metadata })
}

/// ENUM and SET are logged as STRING: the first metadata byte is the real type.
fn enumerated_code(wire: Wire) -> Option<u8> {
    let real = if wire.code == code::STRING { (wire.metadata & 0xff) as u8 } else { wire.code };
    matches!(real, code::ENUM | code::SET).then_some(real)
}

fn is_enumerated(wire: Wire) -> bool {
    enumerated_code(wire).is_some()
}

/// MySQL counts VECTOR among the columns with a character set (binary).
fn is_text(wire: Wire) -> bool {
    use code::{BLOB, BLOB_COMPRESSED, STRING, VARCHAR, VARCHAR_COMPRESSED, VAR_STRING, VECTOR};
    let string =
        matches!(wire.code, STRING | VAR_STRING | VARCHAR | BLOB | BLOB_COMPRESSED | VARCHAR_COMPRESSED | VECTOR);
    string && !is_enumerated(wire)
}

/// MariaDB counts spatial columns among the columns with a character set (binary).
fn is_text_of_mariadb(wire: Wire) -> bool {
    is_text(wire) || wire.code == code::GEOMETRY
}

/// Both servers log a sign bit for YEAR, but none for BIT.
fn is_numeric(wire: Wire) -> bool {
    use code::{DOUBLE, FLOAT, INT24, LONG, LONGLONG, NEWDECIMAL, SHORT, TINY, YEAR};
    matches!(wire.code, TINY | SHORT | INT24 | LONG | LONGLONG | FLOAT | DOUBLE | NEWDECIMAL | YEAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNS: u8 = 1;
    const CHARSET_OF_EACH: u8 = 3;
    const VISIBILITY: u8 = 12;

    fn format() -> Format {
        Format {
            server_version: "9.7.0".to_owned(),
            mariadb: false,
            gtid_events: true,
            checksum: false,
            created: 0,
            table_id_bytes_table_map: 6,
            table_id_bytes_rows: 6,
        }
    }

    /// The body of a table map with columns of these types, their metadata, and one optional field.
    fn body(codes: &[u8], metadata: &[u8], field: u8, value: &[u8]) -> Vec<u8> {
        let mut body = vec![7, 0, 0, 0, 0, 0, 1, 0];
        body.extend(b"\x02db\0\x01t\0");
        body.push(codes.len() as u8);
        body.extend(codes);
        body.push(metadata.len() as u8);
        body.extend(metadata);
        body.extend(vec![0; codes.len().div_ceil(8)]);
        body.extend([field, value.len() as u8]);
        body.extend(value);
        body
    }

    #[test]
    fn only_numeric_columns_have_sign_bits() {
        use code::{BIT, DOUBLE, FLOAT, INT24, LONG, LONGLONG, NEWDECIMAL, SHORT, TINY, VARCHAR, YEAR};
        let codes = [VARCHAR, TINY, SHORT, BIT, INT24, LONG, LONGLONG, FLOAT, DOUBLE, NEWDECIMAL, YEAR, LONG];
        let metadata = [40, 0, 1, 1, 4, 8, 10, 2];
        // The signs of the ten numbers, highest bit first: TINY, INT24, LONGLONG and the last LONG are unsigned.
        let map = TableMap::read(&body(&codes, &metadata, SIGNS, &[0b1010_1000, 0b0100_0000]), &format()).unwrap();
        let unsigned: Vec<u8> =
            map.columns.iter().filter(|column| column.hints.unsigned).map(|column| column.wire.code).collect();
        assert_eq!(unsigned, [TINY, INT24, LONGLONG, LONG]);
        let described: Vec<bool> = map.columns.iter().map(|column| column.described).collect();
        let numbers: Vec<bool> = codes.iter().map(|code| ![VARCHAR, BIT].contains(code)).collect();
        assert_eq!(described, numbers);
    }

    #[test]
    fn every_column_has_a_visibility_bit() {
        use code::{LONG, VARCHAR};
        let map = body(&[LONG, VARCHAR, LONG], &[40, 0], VISIBILITY, &[0b1010_0000]);
        let columns = TableMap::read(&map, &format()).unwrap().columns;
        let visible: Vec<_> = columns.iter().map(|column| column.visible).collect();
        assert_eq!(visible, [Some(true), Some(false), Some(true)]);
    }

    #[test]
    fn vectors_have_a_character_set() {
        use code::{JSON, VARCHAR, VECTOR};
        let (latin1, utf8mb3, binary) = (8, 33, 63);
        let value = [latin1, binary, utf8mb3];
        let map = body(&[VARCHAR, VECTOR, JSON, VARCHAR], &[40, 0, 4, 4, 40, 0], CHARSET_OF_EACH, &value);
        let columns = TableMap::read(&map, &format()).unwrap().columns;
        let charsets: Vec<_> = columns.iter().map(|column| column.hints.charset).collect();
        assert_eq!(charsets, [Some(Charset::Latin1), Some(Charset::Binary), None, Some(Charset::Utf8mb3)]);
    }
}
