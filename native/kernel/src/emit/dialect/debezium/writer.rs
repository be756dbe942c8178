//! What writes the rows of a table in both forms of the messages, JSON and Avro.

use std::sync::Arc;

use super::column_traits::ColumnTraits;
use super::handling::{Flat, FlatField};
use crate::column::Kind;
use crate::emit::dialect::{json_object, Image, TableView};

/// The version of the writer in messages.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The connector name in messages, for MariaDB as well.
pub(super) const CONNECTOR: &str = "mysql";

/// A column of the messages, with its name as a key of JSON.
pub(super) struct Field {
    pub(super) key: Box<[u8]>,
    pub(super) kind: Kind,
    pub(super) traits: ColumnTraits,
    pub(super) name: Arc<str>,
}

/// The fields of flat rows, with their names as keys of JSON.
pub(super) struct FlatKeys {
    pub(super) fields: Vec<(Box<[u8]>, FlatField)>,
    pub(super) deleted: Option<Box<[u8]>>,
}

impl FlatKeys {
    pub(super) fn new(flat: &Flat) -> FlatKeys {
        FlatKeys {
            fields: flat.fields.iter().map(|(name, field)| (json_object::key(name), *field)).collect(),
            deleted: flat.deleted.then(|| json_object::key("__deleted")),
        }
    }
}

/// Writes the rows of a table.
pub struct Writer {
    pub(super) table: Arc<TableView>,
    pub(super) fields: Vec<Field>,
    /// Indexes of the primary key's columns.
    pub(super) keys: Vec<usize>,
    /// The text before the payload; empty if messages have no schema.
    pub(super) head: Vec<u8>,
    /// What flat rows have besides their columns; None for messages with an envelope.
    pub(super) flat: Option<FlatKeys>,
    /// The id of the messages' schema in the registry, for messages in Avro.
    pub(super) avro_schema: Option<u32>,
}

/// A change with its operation code and images.
pub(super) struct ChangeView<'r, 'a> {
    pub(super) operation: &'r [u8],
    pub(super) before: Option<Image<'r, 'a>>,
    pub(super) after: Option<Image<'r, 'a>>,
}
