//! Message keys: the values of a table's key columns, in the format that the dialect's own queues use.

use std::sync::Arc;

use super::debezium::column_traits::{column_traits, ColumnTraits};
use super::debezium::handling::BinaryFormat;
use super::view::{DialectOptions, MessageColumn, TableView};
use super::{debezium, json_object, maxwell};
use crate::column::{quoted, Kind, Value};
use crate::error::{Error, ErrorKind, Result};

/// The format of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    /// An object of the columns, with values in Debezium's format.
    Debezium,
    /// A record of the columns in a binary format.
    DebeziumBinary(BinaryFormat),
    /// Database and table, then the columns with the prefix `pk.`.
    Maxwell,
    /// An object of the columns, with values as the server's client shows them.
    Shown,
}

struct Part {
    at: usize,
    key: Box<[u8]>,
    name: Arc<str>,
    kind: Kind,
    traits: ColumnTraits,
}

/// The precomputed parts of a table's message keys.
pub struct Keys {
    style: Style,
    head: Vec<u8>,
    tail: &'static [u8],
    parts: Vec<Part>,
}

impl Keys {
    /// Creates keys that consist of the given columns, in the given order. Without columns, messages have no keys.
    /// Raises `OptionInvalid` for a column that the table does not have.
    pub fn new(table: &TableView, columns: &[String], options: &DialectOptions, instance: &str) -> Result<Keys> {
        let (dialect, handling) = (options.name.as_str(), options.debezium.handling);
        let style = match (dialect, options.debezium.registered) {
            ("debezium", Some(schemas)) => Style::DebeziumBinary(schemas.format),
            ("debezium" | "debezium_schema", _) => Style::Debezium,
            ("maxwell", _) => Style::Maxwell,
            _ => Style::Shown,
        };
        let mut parts = Vec::with_capacity(columns.len());
        for (at, column) in columns_of(table, columns)? {
            parts.push(Part {
                at,
                key: match style {
                    Style::Maxwell => json_object::key(&format!("pk.{}", column.name)),
                    _ => json_object::key(&column.name),
                },
                name: column.name.clone(),
                kind: column.kind.clone(),
                traits: column_traits(&column.type_text, column.nullable, handling),
            });
        }
        let mut head = Vec::new();
        let mut tail: &[u8] = b"";
        if style == Style::Maxwell {
            for (name, value) in [("database", &table.database), ("table", &table.table)] {
                head.extend_from_slice(&json_object::key(name));
                quoted::write(value.as_bytes(), &mut head);
            }
        } else if let (Style::DebeziumBinary(format), Some(schemas)) = (style, options.debezium.registered) {
            debezium::binary::write_frame(format, schemas.key, &mut head);
        } else if dialect == "debezium_schema" {
            let columns: Vec<_> = parts.iter().filter_map(|part| table.columns.get(part.at)).collect();
            head = debezium::schema::head(&debezium::schema::key(instance, table, &columns, handling));
            tail = b"}";
        }
        Ok(Keys { style, head, tail, parts })
    }

    /// Whether messages have keys.
    pub fn is_some(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Writes the key of a row, whose values `cell` returns. Raises `EventUnsupported` if a value is missing, because
    /// with incomplete keys, consumers would merge different rows.
    pub fn write<'a>(&self, cell: impl Fn(usize) -> Result<Option<Value<'a>>>, out: &mut Vec<u8>) -> Result<()> {
        let before = out.len();
        out.extend_from_slice(&self.head);
        // In Maxwell's format, the JSON object begins with the head. In the other formats, the head is empty, or it is
        // a schema or frame that precedes the object.
        let start = if self.style == Style::Maxwell { before } else { out.len() };
        let is_binary = matches!(self.style, Style::DebeziumBinary(_));
        for (index, part) in (0..).zip(&self.parts) {
            let value = cell(part.at)?.ok_or_else(|| lacks_key(&part.name))?;
            if !is_binary {
                out.extend_from_slice(&part.key);
            }
            let written = match self.style {
                Style::DebeziumBinary(format) => {
                    debezium::binary::write_key_column(format, index, &value, &part.kind, part.traits, out)
                }
                Style::Debezium => debezium::values::write(&value, &part.kind, part.traits, out),
                Style::Maxwell => maxwell::values::write(&value, &part.kind, out),
                Style::Shown => value.write_shown(&part.kind, out),
            };
            written.map_err(|error| error.within(&format!("column `{}`", part.name)))?;
        }
        if !is_binary {
            json_object::close(start, out);
            out.extend_from_slice(self.tail);
        }
        Ok(())
    }
}

/// Returns the columns of a key with their indexes. Raises `OptionInvalid` for a column that the table does not have.
pub(crate) fn columns_of<'t>(table: &'t TableView, names: &[String]) -> Result<Vec<(usize, &'t MessageColumn)>> {
    let position = |name: &String| {
        let position = table.columns.iter().enumerate().find(|(_, column)| *column.name == **name);
        position.ok_or_else(|| no_column(name, table))
    };
    names.iter().map(position).collect()
}

#[cold]
fn lacks_key(name: &str) -> Error {
    Error::new(ErrorKind::EventUnsupported, format!("a row was logged without column `{name}` of its message's key"))
        .hint("SET GLOBAL binlog_row_image = FULL on the server, or take the primary key for the key of messages")
}

#[cold]
fn no_column(name: &str, table: &TableView) -> Error {
    let names: Vec<&str> = table.columns.iter().map(|column| &*column.name).collect();
    Error::new(ErrorKind::OptionInvalid, format!("messages of `{}` have no column `{name}` for their key", table.name))
        .hint(format!("name some of {}", names.join(", ")))
}
